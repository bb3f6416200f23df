# SPDX-License-Identifier: Apache-2.0
"""One HTTP request to `/v1/completions`, read with as little work as Python allows: times of events, not their text.

At 3,000 tokens a second every token is an event of its own; a client that parsed each would be what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools


class RequestFailed(RuntimeError):
    """The answer is not what was asked for; the message has the server's own words."""


@dataclass
class Answer:
    """Times are those of `time.monotonic`."""

    request_id: str = ""
    """The `id` of the response."""
    events: list[float] = field(default_factory=list)
    """When each event with tokens came."""
    body: bytes = b""
    """Of an answer that is no stream."""


class _Reader(asyncio.Protocol):
    """One connection for one request."""

    def __init__(self, stream: bool) -> None:
        self.answer = Answer()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stream = stream
        self._parser = httptools.HttpResponseParser(self)
        self._left = b""
        self._said: list[bytes] = []
        self._ended = False

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"no HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if not self._stream or self._parser.get_status_code() != 200:
            self._said.append(body)
            return
        now = time.monotonic()
        *events, self._left = (self._left + body).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: [DONE]"):
                self._ended = True
            elif event.startswith(b'data: {"error"'):
                self._fail(event[:300].decode(errors="replace"))
            elif event.startswith(b"data: "):
                if not self.answer.events:
                    self.answer.request_id = str(json.loads(event[6:]).get("id", ""))
                self.answer.events.append(now)

    def on_message_complete(self) -> None:
        self.answer.body = b"".join(self._said)
        status = self._parser.get_status_code()
        if status != 200:
            self._fail(f"status {status}: {self.answer.body[:300].decode(errors='replace')}")
        elif self._stream and not self._ended:
            self._fail("the stream ended without [DONE]")
        elif not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc}")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RequestFailed(why))


async def post(url: str, body: bytes, *, stream: bool, request_id: str = "") -> Answer:
    """Send one body to the completions endpoint at `url`. Raises RequestFailed or OSError."""
    parts = urlsplit(url)
    named = f"x-request-id: {request_id}\r\n" if request_id else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n{named}"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    transport, reader = await asyncio.get_running_loop().create_connection(
        lambda: _Reader(stream), parts.hostname or "127.0.0.1", parts.port or 80
    )
    try:
        transport.write(head.encode() + body)
        await reader.done
    finally:
        transport.close()
    return reader.answer


def completion(model: str, prompt: tuple[int, ...], answer: int, **more: Any) -> bytes:
    """A body: greedy, of exactly `answer` tokens, streamed unless `more` says otherwise."""
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **more,
        }
    ).encode()
