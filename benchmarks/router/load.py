# SPDX-License-Identifier: Apache-2.0
"""Clients: many streams at once, many short requests after one another, and streams that only stay open.

They read with as little work as Python allows, so that the two cores are left to what is measured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

SECONDS = 240.0


class LoadFailed(RuntimeError):
    """A request was not answered as it must be."""


@dataclass
class Result:
    """Times of one load, seconds."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    events: int = 0


class _Client(asyncio.Protocol):
    """One connection; `ask` sends a request and returns its times."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.events = 0
        self.begun: asyncio.Future[None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._seen = b""
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self._done, self.begun):
            if future is not None and not future.done():
                future.set_exception(LoadFailed(f"the connection was lost: {exc}"))

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
            if self.begun is not None and not self.begun.done():
                self.begun.set_result(None)
        self.events += body.count(b"data: {")
        self._seen = body

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def start(self, head: bytes, body: bytes) -> None:
        """Send a request."""
        loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._first, self._seen = 0.0, b""
        self._done, self.begun = loop.create_future(), loop.create_future()
        self.transport.write(head + body)

    async def ask(self, head: bytes, body: bytes, stream: bool) -> tuple[float, float]:
        """Send a request and read the answer: seconds to its first byte of body, and to its end."""
        began = time.perf_counter()
        self.start(head, body)
        assert self._done is not None
        await self._done
        status = self._parser.get_status_code()
        if status != 200 or (stream and b"[DONE]" not in self._seen):
            raise LoadFailed(f"status {status}, the answer ends with {self._seen[-200:]!r}")
        return self._first - began, time.perf_counter() - began


def _request(url: str, path: str, body: dict[str, Any]) -> tuple[bytes, bytes]:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode(), data


async def _connect(url: str) -> _Client:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(_Client, parts.hostname, parts.port)
    return client


def chat(tokens: int, stream: bool, words: int = 12, serial: int = 0) -> dict[str, Any]:
    """A chat's body; no two with different serials have the same prompt."""
    text = " ".join(f"word{serial}x{i}" if i == 0 else "the" for i in range(words))
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": stream,
    }


async def streams(url: str, number: int, tokens: int) -> Result:
    """`number` streamed chats at once."""
    result = Result()

    async def one(serial: int) -> None:
        client = await _connect(url)
        first, whole = await client.ask(
            *_request(url, "/v1/chat/completions", chat(tokens, True, serial=serial)), True
        )
        result.first.append(first)
        result.whole.append(whole)
        result.events += client.events
        client.transport.close()

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(one(serial) for serial in range(number)))
    return result


async def short(url: str, number: int, tokens: int, at_once: int, stream: bool = False) -> Result:
    """`number` short chats over `at_once` connections."""
    result = Result()
    left = iter(range(number))

    async def one() -> None:
        client = await _connect(url)
        for serial in left:
            first, whole = await client.ask(
                *_request(url, "/v1/chat/completions", chat(tokens, stream, serial=serial)), stream
            )
            result.first.append(first)
            result.whole.append(whole)
        client.transport.close()

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(one() for _ in range(at_once)))
    return result


async def idle(url: str, number: int, tokens: int, measure: Callable[[], Any]) -> Any:
    """`measure()` while `number` streams are open that have had their first token, and get no other."""
    clients = []
    async with asyncio.timeout(SECONDS):
        for start in range(0, number, 50):
            some = [await _connect(url) for _ in range(min(50, number - start))]
            for serial, client in enumerate(some):
                client.start(
                    *_request(url, "/v1/chat/completions", chat(tokens, True, serial=start + serial))
                )
            await asyncio.gather(*(client.begun for client in some if client.begun is not None))
            clients.extend(some)
        await asyncio.sleep(1.0)
        found = measure()
    for client in clients:
        client.transport.abort()
    return found
