# SPDX-License-Identifier: Apache-2.0
"""The form of vLLM's streamed events, learned from vLLM's own generators when the router starts.

Building a pydantic object for every token costs more than all else in a stream together, and nearly all of an event
is the same from token to token. So each handler's generator is run once over made-up outputs with marks in the places
of the text, the response's id, its model and its time, and what comes out is cut at the marks. What vLLM's next
version writes into its events is then written here too; an event without the expected marks is refused at start.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any

from router.errors import CannotServe

TEXT, ID, MODEL, STOP, FINISH = "@text@", "@id@", "@model@", "@stop@", "length"
_CREATED = re.compile(r'"created":\d+')
compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""JSON as vLLM writes it. One encoder: `json.dumps` with separators makes a new one each time."""
_FINISH = f'"finish_reason":"{FINISH}"'


class FormChanged(CannotServe):
    """vLLM's events do not have the marks that were put in."""


@dataclass(frozen=True)
class Form:
    """The events of one kind of stream, JSON with marks; `head` comes before the first text and may be empty."""

    head: str
    middle: str
    last: str
    usage: dict[str, Any] | None
    """The usage event, None when the request does not ask for one."""

    def fill(self, response_id: str, model: str, created: int) -> Filled:
        """The form of one response."""

        def fill(event: str) -> str:
            if not event:
                return ""
            event = _CREATED.sub(f'"created":{created}', event, count=1)
            return f"data: {event}\n\n".replace(f'"{MODEL}"', quote(model)).replace(
                f'"{ID}"', quote(response_id)
            )

        before, after = fill(self.middle).split(f'"{TEXT}"')
        last_before, last_after = fill(self.last).split(f'"{TEXT}"')
        return Filled(fill(self.head), before, after, last_before, last_after)


@dataclass(frozen=True)
class Filled:
    """One response's events, all but text, finish reason and stop reason."""

    head: str
    before: str
    after: str
    last_before: str
    last_after: str

    def text(self, text: str) -> str:
        """The event of some text in the middle."""
        return f"{self.before}{quote(text)}{self.after}"

    def end(self, text: str, finish_reason: str, stop_reason: int | str | None) -> str:
        """The event that has the finish reason."""
        after = self.last_after.replace(f'"{STOP}"', compact(stop_reason), 1)
        after = after.replace(_FINISH, f'"finish_reason":{quote(finish_reason)}', 1)
        return f"{self.last_before}{quote(text)}{after}"


def counted(
    usage: dict[str, Any], prompt_tokens: int, completion_tokens: int, cached: dict[str, int]
) -> dict[str, Any]:
    """A form's `usage` with a request's numbers. `cached`: values for those of vLLM's `prompt_tokens_details` that the
    form has; what vLLM leaves null there stays null."""
    filled = {
        **usage,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    details = filled.get("prompt_tokens_details")
    if details is not None:
        filled["prompt_tokens_details"] = {
            name: value if value is None else cached[name] for name, value in details.items()
        }
    return filled


def usage_event(
    form: dict[str, Any],
    response_id: str,
    model: str,
    created: int,
    prompt_tokens: int,
    completion_tokens: int,
    cached: dict[str, int],
) -> str:
    """The usage event. `cached`: as in `counted`."""
    usage = counted(form["usage"], prompt_tokens, completion_tokens, cached)
    event = {**form, "id": response_id, "model": model, "created": created, "usage": usage}
    return f"data: {compact(event)}\n\n"


async def learn(generate: Callable[[AsyncIterator[Any]], AsyncIterator[str]], usage: bool) -> Form:
    """Run a generator over made-up outputs. Raises FormChanged.

    `generate` gives vLLM's generator of events for an iterator of RequestOutput.
    """
    events = [event async for event in generate(made_up())]
    if not events or events.pop() != "data: [DONE]\n\n":
        raise FormChanged("vLLM's stream does not end with [DONE]")
    bodies = [event.removeprefix("data: ").removesuffix("\n\n") for event in events]
    counts = json.loads(bodies.pop()) if usage else None
    if len(bodies) not in (2, 3) or (counts is not None and "usage" not in counts):
        raise FormChanged(f"vLLM's stream has other events than expected: {events}")
    head = bodies[0] if len(bodies) == 3 else ""
    middle, last = bodies[-2:]
    for event in (middle, last):
        if any(event.count(f'"{mark}"') != 1 for mark in (TEXT, ID, MODEL)) or not _CREATED.search(event):
            raise FormChanged(f"vLLM's event lacks a text, an id, a model or a time: {event}")
    if last.count(f'"{STOP}"') != 1 or last.count(_FINISH) != 1:
        raise FormChanged(f"vLLM's last event lacks a finish or a stop reason: {last}")
    return Form(head, middle, last, counts)


async def made_up() -> AsyncIterator[Any]:
    """Two outputs with the marks, the second one the last."""
    from vllm.outputs import CompletionOutput, RequestOutput

    for finish, stop in ((None, None), (FINISH, STOP)):
        output = CompletionOutput(
            index=0,
            text=TEXT,
            token_ids=[3],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=finish,
            stop_reason=stop,
        )
        yield RequestOutput(
            request_id=ID,
            prompt=None,
            prompt_token_ids=[3],
            prompt_logprobs=None,
            outputs=[output],
            finished=finish is not None,
            num_cached_tokens=0,
            num_cache_creation_tokens=0,
        )
