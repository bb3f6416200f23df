# SPDX-License-Identifier: Apache-2.0
"""One plain stream: engine-core outputs in, server-sent events out.

Text, stop strings and the tokens that count come from vLLM's own incremental detokenizer; the events' form from
chunks.py. Outputs that come while the client is not reading share an event, as in vLLM, so what waits for a slow
reader is text, and no more of it than the answer has.

The first and the last events are ASGI messages. Between them, while everything before has been written, `take` writes
an event itself, through the connection's `push` where it has one (router/http_protocol.py): no task wakes for a token.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.types import Send
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from router.errors import error_body
from router.faces.chunks import Filled, Form, usage_event
from router.faces.whole import WholeForm, draft_metrics

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
FAILED = "Internal server error"
"""What vLLM says of a request whose engine-core output is an error."""


class LeanStream:
    """A sink of the switch (`take`), and the events of what it has taken (`events`)."""

    def __init__(
        self,
        request: EngineCoreRequest,
        tokenizer: Any,
        stop: Callable[[str], None],
        push: Callable[[bytes], bool] | None = None,
    ) -> None:
        """`stop` is called with the request's id when a stop string has completed it; `push` as in http_protocol."""
        assert request.prompt_token_ids is not None
        self.request = request
        self.prompt_tokens = len(request.prompt_token_ids)
        self.gone = False
        """Set by `leave`: the client has gone."""
        self.ended = False
        """True once the last output has been taken."""
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        self._stop = stop
        self._push = push
        self._filled: Filled | None = None
        """Set once events may be pushed: the first one has been sent."""
        self._quiet = False
        """Set by `end`: nobody waits for anything but the end."""
        self._kept: list[int] | None = None
        """Tokens for the end: nobody reads before, and no stop string can end the answer earlier."""
        self._text = ""
        self._finish: str = ""
        self._drafts: Any = None
        self._stop_reason: int | str | None = None
        self._cached: dict[str, int] = {"cached_tokens": 0, "created_cache_tokens": 0}
        self._waiter: asyncio.Future[None] | None = None

    # ---- from the switch

    def take(self, output: EngineCoreOutput) -> None:
        """One output of the engine core."""
        if self.ended:
            return
        reason, stop_reason = output.finish_reason, output.stop_reason
        reasons = FinishReason
        try:
            if output.prefill_stats is not None:
                self._cached = {
                    "cached_tokens": output.prefill_stats.num_cached_tokens,
                    "created_cache_tokens": output.prefill_stats.num_cache_creation_tokens,
                }
            if output.spec_decode_metrics is not None:
                self._drafts = output.spec_decode_metrics
            tokens = output.new_token_ids
            if self._kept is not None:
                self._kept.extend(tokens)
                if reason is None:
                    return
                tokens = self._kept
            stop = self._detokenizer.update(tokens, reason is reasons.STOP)
            if stop:
                if reason is None:
                    self._stop(self.request.request_id)
                reason, stop_reason = reasons.STOP, stop
            self._text += self._detokenizer.get_next_output_text(reason is not None, True)
        except Exception:
            log.exception("request %s: its tokens could not be turned into text", self.request.request_id)
            if reason is None:
                self._stop(self.request.request_id)
            reason = reasons.ERROR
        if reason is not None:
            self.ended, self._finish, self._stop_reason = True, str(reason), stop_reason
        elif self._quiet or (self._filled is not None and (not self._text or self._pushed(self._filled))):
            return
        self._wake()

    def _pushed(self, filled: Filled) -> bool:
        """Write the text that waits as an event, if nothing before it is still on its way."""
        waiter, push = self._waiter, self._push
        if push is None or waiter is None or waiter.done():
            return False
        if not push(filled.text(self._text).encode()):
            return False
        self._text = ""
        return True

    def leave(self) -> None:
        """The client has gone: `events` ends."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # ---- to the client

    async def end(self) -> None:
        """Return when the last output has been taken, or the client has gone."""
        self._quiet = True
        params = self.request.sampling_params
        if params is not None and not params.stop:
            self._kept = []
        while not (self.ended or self.gone):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._finish == "error"

    def whole(self, form: WholeForm, response_id: str, model: str, created: int) -> bytes:
        """The answer that is not streamed, after `end`."""
        return form.fill(
            response_id=response_id,
            model=model,
            created=created,
            text=self._text,
            finish_reason=self._finish,
            stop_reason=self._stop_reason,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self._detokenizer.num_output_tokens(),
            cached=self._cached,
            metrics="null" if self._drafts is None else draft_metrics(self._drafts),
        )

    async def events(self, form: Form, response_id: str, model: str, send: Send) -> None:
        """Send the events, as bodies of an ASGI response that has begun, until the answer's end or the client's."""
        created = int(time.time())
        filled = form.fill(response_id, model, created)
        head = filled.head
        loop = asyncio.get_running_loop()
        while not self.gone:
            if self.ended:
                await send(_body(self._end(form, filled, head, response_id, model, created), more=False))
                return
            if head and self._detokenizer.num_output_tokens():
                events, head = head, ""
            elif self._text:
                events = ""
            else:
                self._waiter = loop.create_future()
                await self._waiter
                continue
            if self._text:
                text, self._text = self._text, ""
                events += filled.text(text)
            await send(_body(events, more=True))
            if not head:
                self._filled = filled

    def _end(self, form: Form, filled: Filled, head: str, response_id: str, model: str, created: int) -> str:
        """The last events."""
        text = self._text
        if self._finish == "error":
            error = f"data: {json.dumps(error_body(500, FAILED))}\n\n"
            return (head + filled.text(text) if text else "") + error
        events = head + filled.end(text, self._finish, self._stop_reason)
        if form.usage is not None:
            events += usage_event(
                form.usage,
                response_id,
                model,
                created,
                self.prompt_tokens,
                self._detokenizer.num_output_tokens(),
                self._cached,
            )
        return events + DONE


def _body(events: str, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": events.encode(), "more_body": more}
