# SPDX-License-Identifier: Apache-2.0
"""Face one's short way, in parts: what is plain, the form of events, one stream, and who gets which output."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from router.faces.chunks import TEXT, Form, FormChanged, learn
from router.faces.lean import CHAT, COMPLETION, plain
from router.faces.lean_stream import LeanStream
from router.faces.switch import Switch
from tests.support import core_requests

MODEL = Path(__file__).parents[3] / "models" / "demo"
WORDS = "the quick brown fox jumps over the lazy dog"
JSON_HEADERS = [(b"content-type", b"application/json; charset=utf-8")]


@functools.cache
def tokenizer() -> Any:
    return get_tokenizer(str(MODEL))


def core_request(name: str = "r1", **params: Any) -> EngineCoreRequest:
    return core_requests.core_request(name, [1, 5, 6], SamplingParams(**params))


# ---- what is plain


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {"model": "m", "messages": [], "stream": True, "max_completion_tokens": 3}, True),
        (CHAT, {"messages": [], "n": 1, "stream_options": {"include_usage": True}}, True),
        (CHAT, {"messages": [], "n": 2}, False),
        (CHAT, {"messages": [], "n": True}, False),
        (CHAT, {"messages": [], "tools": []}, False),
        (CHAT, {"messages": [], "logprobs": False}, False),
        (CHAT, {"messages": [], "stream_options": {"continuous_usage_stats": False}}, False),
        (CHAT, {"messages": [], "stream_options": "yes"}, False),
        (CHAT, {"messages": [], "prompt": "x"}, False),
        (COMPLETION, {"prompt": "x", "stop": ["y"], "seed": 1}, True),
        (COMPLETION, {"prompt": [1, 2]}, True),
        (COMPLETION, {"prompt": [True, False]}, False),
        (COMPLETION, {"prompt": ["x", "y"]}, False),
        (COMPLETION, {"prompt": [[1], [2]]}, False),
        (COMPLETION, {"prompt": []}, False),
        (COMPLETION, {}, False),
        (COMPLETION, {"prompt": "x", "echo": True}, False),
        (COMPLETION, ["prompt"], False),
    ],
)
def test_what_is_plain(path: str, body: Any, expected: bool) -> None:
    scope = {"path": path, "headers": JSON_HEADERS}
    assert (plain(scope, json.dumps(body).encode()) is not None) == expected


def test_what_needs_the_whole_application() -> None:
    body = json.dumps({"prompt": "x"}).encode()
    assert plain({"path": COMPLETION, "headers": JSON_HEADERS}, body) is not None, "the control"
    for headers in ([], [(b"content-type", b"text/plain")], [*JSON_HEADERS, (b"origin", b"http://a")]):
        assert plain({"path": COMPLETION, "headers": headers}, body) is None
    for broken in (b"", b"{", b"\xff", b"[" * 100_000):
        assert plain({"path": COMPLETION, "headers": JSON_HEADERS}, broken) is None


# ---- the events' form


def events_of(head: bool, last: str = "[DONE]", **replaced: str) -> Callable[[Any], AsyncIterator[str]]:
    """A generator as vLLM's, whose events have `replaced` keys renamed."""

    async def generate(outputs: AsyncIterator[Any]) -> AsyncIterator[str]:
        first = True
        async for result in outputs:
            output = result.outputs[0]
            if first and head:
                yield 'data: {"id":"@id@","created":7,"model":"@model@","role":"assistant"}\n\n'
            first = False
            event = {"id": "@id@", "created": 7, "model": "@model@", "text": output.text}
            event |= {"finish_reason": output.finish_reason}
            if output.finish_reason is not None:
                event["stop_reason"] = output.stop_reason
            event = {key: replaced.get(key, value) for key, value in event.items()}
            yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
        yield f"data: {last}\n\n"

    return generate


async def form(head: bool = True) -> Form:
    return await learn(events_of(head), usage=False)


async def test_a_form_is_filled() -> None:
    filled = (await form()).fill('a"b', "m\n", 99)
    assert json.loads(filled.head.removeprefix("data: ")) == {
        "id": 'a"b',
        "created": 99,
        "model": "m\n",
        "role": "assistant",
    }
    text = f'é"\\\n\x00 {TEXT} "@id@"'
    event = json.loads(filled.text(text).removeprefix("data: "))
    assert event == {"id": 'a"b', "created": 99, "model": "m\n", "text": text, "finish_reason": None}
    event = json.loads(filled.end(text, "stop", "é").removeprefix("data: "))
    assert (event["text"], event["finish_reason"], event["stop_reason"]) == (text, "stop", "é")
    assert json.loads(filled.end("", "stop", None).removeprefix("data: "))["stop_reason"] is None
    assert (await form(head=False)).head == ""


@pytest.mark.parametrize(
    ("replaced", "what"),
    [
        ({"text": "gone"}, "lacks a text"),
        ({"id": "gone"}, "lacks a text, an id"),
        ({"stop_reason": "gone"}, "lacks a finish or a stop reason"),
    ],
)
async def test_events_that_have_changed_are_refused(replaced: dict[str, str], what: str) -> None:
    with pytest.raises(FormChanged, match=what):
        await learn(events_of(True, **replaced), usage=False)


async def test_another_end_is_refused() -> None:
    with pytest.raises(FormChanged, match="does not end with"):
        await learn(events_of(True, last="{}"), usage=False)


# ---- one stream


class Client:
    """Reads a stream's events."""

    def __init__(
        self, form: Form, push: Callable[[Client, bytes], bool] | None = None, **params: Any
    ) -> None:
        self.stopped: list[str] = []
        self.bodies: list[bytes] = []
        self.pushed = 0
        """Events that did not come as ASGI messages."""
        self.blocked = asyncio.Event()
        self.blocked.set()
        self.stream = LeanStream(
            core_request(**params),
            tokenizer(),
            self.stopped.append,
            None if push is None else functools.partial(push, self),
        )
        self.reading = asyncio.create_task(self.stream.events(form, "id", "demo", self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.bodies.append(message["body"])
        await self.blocked.wait()

    async def tokens(self, tokens: list[int], finish: FinishReason | None = None) -> None:
        """One output, and time for the reader."""
        self.stream.take(EngineCoreOutput("r1", tokens, finish_reason=finish))
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def events(self) -> list[Any]:
        """What was sent, [DONE] as text."""
        parts = b"".join(self.bodies).decode().split("\n\n")
        texts = [part.removeprefix("data: ") for part in parts if part]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]

    @property
    def text(self) -> str:
        return "".join(event.get("text", "") for event in self.events if event != "[DONE]")


async def test_tokens_become_text() -> None:
    client = Client(await form(), max_tokens=100)
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    for token in ids[:-1]:
        await client.tokens([token])
    assert client.events[0]["role"] == "assistant"
    await client.tokens(ids[-1:], FinishReason.LENGTH)
    await client.reading
    assert client.text.strip() == WORDS
    assert client.events[-2]["finish_reason"] == "length"
    assert client.events[-1] == "[DONE]"
    assert client.stopped == []


async def test_a_token_lost_or_repeated_would_be_seen() -> None:
    """The control of the text: it is that of the tokens taken, each once and in their order."""
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    for damaged in (ids[1:], [*ids[:3], ids[2], *ids[3:]], [ids[1], ids[0], *ids[2:]]):
        client = Client(await form(), max_tokens=100)
        for token in damaged[:-1]:
            await client.tokens([token])
        await client.tokens(damaged[-1:], FinishReason.LENGTH)
        await client.reading
        assert client.text.strip() != WORDS
        assert client.text.strip() == tokenizer().decode(damaged).strip()


@pytest.mark.parametrize("stop", [["cat"], []])
async def test_without_its_stop_string_a_request_goes_on(stop: list[str]) -> None:
    """The control of the next test: what ends a stream there is the string, and not the tokens."""
    client = Client(await form(), max_tokens=100, stop=stop)
    for token in tokenizer().encode(WORDS, add_special_tokens=False):
        await client.tokens([token])
    assert not client.reading.done()
    assert "fox" in client.text
    assert client.stopped == []
    await client.tokens([5], FinishReason.LENGTH)
    await client.reading
    assert client.events[-2]["finish_reason"] == "length"


async def test_a_stop_string_completes_the_request() -> None:
    client = Client(await form(), max_tokens=100, stop=["fox"])
    for token in tokenizer().encode(WORDS, add_special_tokens=False):
        await client.tokens([token])
    await client.reading
    assert client.text.strip() == "the quick brown"
    assert (client.events[-2]["finish_reason"], client.events[-2]["stop_reason"]) == ("stop", "fox")
    assert client.stopped == ["r1"]


async def test_an_error_is_the_last_event() -> None:
    client = Client(await form(), max_tokens=100)
    await client.tokens(tokenizer().encode(WORDS, add_special_tokens=False)[:3])
    await client.tokens([], FinishReason.ERROR)
    await client.reading
    assert client.text.strip() != ""
    assert client.events[-1]["error"]["code"] == 500
    assert "[DONE]" not in client.events, "a client must not take it for success"


async def test_a_slow_reader_gets_the_rest_at_once() -> None:
    client = Client(await form(), max_tokens=100)
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    client.blocked.clear()
    for token in ids[:-1]:
        await client.tokens([token])
    assert len(client.bodies) == 1
    client.blocked.set()
    await client.tokens(ids[-1:], FinishReason.LENGTH)
    await client.reading
    assert client.text.strip() == WORDS
    assert len(client.bodies) <= 3
    quick = Client(
        await form(), max_tokens=100
    )  # the control: a reader that keeps up gets every token's event
    for token in ids[:-1]:
        await quick.tokens([token])
    await quick.tokens(ids[-1:], FinishReason.LENGTH)
    await quick.reading
    assert quick.text.strip() == WORDS
    assert len(quick.bodies) > 3


def take_pushed(client: Client, body: bytes) -> bool:
    """A connection whose client reads."""
    client.bodies.append(body)
    client.pushed += 1
    return True


@pytest.mark.parametrize("head", [True, False])
async def test_what_is_pushed_is_what_would_be_sent(head: bool) -> None:
    """The control is the same stream over a connection without `push`."""
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    clients = [
        Client(await form(head), take_pushed, max_tokens=100),
        Client(await form(head), max_tokens=100),
    ]
    for client in clients:
        for token in ids[:-1]:
            await client.tokens([token])
        await client.tokens(ids[-1:], FinishReason.LENGTH)
        await client.reading
    pushing, sending = clients
    assert pushing.events == sending.events
    assert pushing.text.strip() == WORDS
    assert sending.pushed == 0
    assert pushing.pushed >= len(ids) - 3, "all but the first and the last"


async def test_outputs_of_one_turn_keep_their_order() -> None:
    """Nothing is pushed past an event that still waits for the stream's task."""
    client = Client(await form(), take_pushed, max_tokens=100)
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    for token in ids[:4]:
        client.stream.take(EngineCoreOutput("r1", [token]))
    await client.tokens(ids[4:5])
    client.blocked.clear()
    client.stream.take(EngineCoreOutput("r1", ids[5:6]))
    await client.tokens(ids[6:-1])
    client.blocked.set()
    await client.tokens(ids[-1:], FinishReason.LENGTH)
    await client.reading
    assert client.text.strip() == WORDS


async def test_a_connection_that_takes_nothing_gets_messages() -> None:
    """A client that does not read: its text waits where the stream's task waits for it."""
    client = Client(await form(), lambda client, body: False, max_tokens=100)
    ids = tokenizer().encode(WORDS, add_special_tokens=False)
    for token in ids[:-1]:
        await client.tokens([token])
    client.blocked.clear()
    await client.tokens(ids[:1])
    waiting = len(client.bodies)
    await client.tokens(ids[:2])
    assert len(client.bodies) == waiting
    client.blocked.set()
    await client.tokens(ids[-1:], FinishReason.LENGTH)
    await client.reading
    assert client.pushed == 0
    assert client.events[-1] == "[DONE]"
    assert client.text.strip().startswith(WORDS.rpartition(" ")[0])


async def test_a_client_that_leaves_ends_the_stream() -> None:
    client = Client(await form(), max_tokens=100)
    await client.tokens([5])
    assert not client.reading.done(), "the control: nothing else ends it"
    client.stream.leave()
    await asyncio.wait_for(client.reading, 60)
    assert "[DONE]" not in client.events


async def test_tokens_that_are_no_text_end_with_an_error() -> None:
    client = Client(await form(), max_tokens=100)
    client.stream.take(EngineCoreOutput("r1", ["x"]))  # type: ignore[list-item]
    client.stream.take(EngineCoreOutput("r1", [None], finish_reason=None))  # type: ignore[list-item]
    client.stream._detokenizer.update = None  # type: ignore[assignment,method-assign]
    await client.tokens([5])
    await asyncio.wait_for(client.reading, 60)
    assert client.events[-1]["error"]["code"] == 500
    assert client.stopped == ["r1"]


@pytest.mark.parametrize("cached", [2, 0])
async def test_usage_counts_what_was_cached(cached: int) -> None:
    usage = {"usage": {"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}, "choices": []}
    plain_form = await form()
    client = Client(Form(plain_form.head, plain_form.middle, plain_form.last, usage), max_tokens=2)
    first = EngineCoreOutput("r1", [5])
    first.prefill_stats = PrefillStats(
        num_prompt_tokens=3, num_computed_tokens=3 - cached, num_cached_tokens=cached
    )
    client.stream.take(first)
    await client.tokens([6], FinishReason.LENGTH)
    await client.reading
    assert client.events[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


async def test_usage_is_left_out_where_nobody_asked_for_it() -> None:
    client = Client(await form(), max_tokens=2)
    await client.tokens([5])
    await client.tokens([6], FinishReason.LENGTH)
    await client.reading
    assert not any("usage" in event for event in client.events if event != "[DONE]")


# ---- the switch


class Recorder:
    """A dispatcher that remembers."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.ready: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    def add(self, request: EngineCoreRequest) -> None:
        if request.request_id == "refused":
            raise ValueError("no")
        self.added.append(request.request_id)

    def abort(self, request_ids: Any, stopped: bool = False) -> None:
        self.aborted += request_ids

    async def outputs(self) -> EngineCoreOutputs:
        return await self.ready.get()

    def step(self, **tokens: int) -> None:
        outputs = [EngineCoreOutput(name, [token]) for name, token in tokens.items()]
        self.ready.put_nowait(EngineCoreOutputs(outputs=outputs))


class Bag:
    """A sink."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def take(self, output: EngineCoreOutput) -> None:
        if output.new_token_ids == [13]:
            raise RuntimeError("a sink's mistake")
        self.tokens += output.new_token_ids


async def test_everybody_gets_his_own() -> None:
    core, bag = Recorder(), Bag()
    switch = Switch(core)
    switch.add(core_request("mine"), bag)
    switch.add(core_request("others"))
    core.step(mine=1)
    core.step(mine=13)
    core.step(mine=2, others=3)
    rest = await asyncio.wait_for(switch.outputs(), 60)
    assert [(output.request_id, output.new_token_ids) for output in rest.outputs] == [("others", [3])]
    assert bag.tokens == [1, 2]
    switch.abort(["mine"])
    assert core.aborted == ["mine"]
    core.step(mine=4)
    rest = await asyncio.wait_for(switch.outputs(), 60)
    assert (rest.outputs[0].request_id, bag.tokens) == (
        "mine",
        [1, 2],
    )  # a sink hears nothing after its abort


async def test_a_refused_request_leaves_no_sink() -> None:
    core, bag = Recorder(), Bag()
    switch = Switch(core)
    with pytest.raises(ValueError, match="no"):
        switch.add(core_request("refused"), bag)
    core.step(refused=1)
    assert (await asyncio.wait_for(switch.outputs(), 60)).outputs[0].request_id == "refused"
    assert bag.tokens == []
    switch.add(core_request("taken"), bag)  # the control: the sink of one that is not refused hears
    core.step(taken=7)
    core.step(others=1)
    assert (await asyncio.wait_for(switch.outputs(), 60)).outputs[0].request_id == "others"
    assert bag.tokens == [7]
