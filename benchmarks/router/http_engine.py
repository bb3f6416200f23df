# SPDX-License-Identifier: Apache-2.0
"""The simulator's HTTP side: an OpenAI server that has nothing to do but to write text, at the engine's pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

import httptools

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"


async def steps(seconds: float, running: Sized, work: asyncio.Event) -> AsyncIterator[None]:
    """A turn every `seconds` while there is something in `running`, for ever; `work` is set when something comes."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        if not running:
            work.clear()
            await work.wait()
            due = loop.time()
        due = max(due + seconds, loop.time() - seconds)  # what is late is not made up for
        await asyncio.sleep(max(0.0, due - loop.time()))
        yield


@dataclass(slots=True, eq=False)
class _Running:
    """One request."""

    transport: asyncio.Transport
    limit: int
    stream: bool
    chat: bool
    made: int = 0
    text: list[str] = field(default_factory=list)


class HttpEngine:
    """`start` gives it a port."""

    def __init__(self, seconds: float, words: Sequence[str], idle: int) -> None:
        """`words`: the text of each token; requests for more than `idle` tokens get only the first."""
        self._seconds, self._words, self._idle = seconds, words, idle
        self.running: set[_Running] = set()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Serve on a loopback port of its own."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=2048)
        self._task = asyncio.create_task(self._run())
        return int(server.sockets[0].getsockname()[1])

    def add(self, running: _Running) -> None:
        """Begin with a request."""
        if running.stream:
            running.transport.write(_HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        self.running.add(running)
        self._work.set()

    async def _run(self) -> None:
        async for _ in steps(self._seconds, self.running, self._work):
            for running in list(self.running):
                self._step(running)

    def _step(self, running: _Running) -> None:
        if running.limit > self._idle and running.made:
            return
        running.made += 1
        word = self._words[(running.made * 7919) % len(self._words)]
        last = running.made >= running.limit
        if last:
            self.running.discard(running)
        if running.stream:
            data = _event(word, running.chat, last)
            running.transport.write(b"%x\r\n%b\r\n" % (len(data), data) + (b"0\r\n\r\n" if last else b""))
            return
        running.text.append(word)
        if last:
            data = _answer("".join(running.text), running.chat, running.made)
            head = _HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(data)
            running.transport.write(head + data)


def _event(text: str, chat: bool, last: bool) -> bytes:
    key = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, **key, "logprobs": None, "finish_reason": "length" if last else None}
    kind = "chat.completion.chunk" if chat else "text_completion"
    event = {"id": "chatcmpl-0", "object": kind, "created": 1, "model": "demo", "choices": [choice]}
    return (
        f"data: {json.dumps(event, separators=(',', ':'))}\n\n{'data: [DONE]' if last else ''}".encode()
        + (b"\n\n" if last else b"")
    )


def _answer(text: str, chat: bool, tokens: int) -> bytes:
    key: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer = {
        "id": "chatcmpl-0",
        "object": "chat.completion" if chat else "text_completion",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, **key, "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
    }
    return json.dumps(answer).encode()


class _Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._mine: set[_Running] = set()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = self._url + url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        if self._parser.get_method() != b"POST":
            models = {"object": "list", "data": [{"id": "demo", "object": "model"}]}
            data = json.dumps(models if b"models" in url else {"status": "ok", "model_path": "demo"}).encode()
            self._transport.write(
                _HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(data) + data
            )
            return
        body = json.loads(self._body)
        limit = body.get("max_tokens") or 16
        running = _Running(self._transport, limit, bool(body.get("stream")), b"chat" in url)
        self._mine.add(running)
        self._engine.add(running)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.running.difference_update(self._mine)
