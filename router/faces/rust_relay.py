# SPDX-License-Identifier: Apache-2.0
"""Takes plain requests to vLLM's Rust front end and its answers back; everything else goes to face one.

A plain request is what the short way of face one takes (router/faces/lean.py), but for what only face one knows: a
placement of one's own, a cache salt, template arguments. While the front end is away, and when a connection to it fails
before it has answered, face one answers. A stream that breaks off ends with an error event and without a [DONE].
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httptools
from starlette.types import ASGIApp as App
from starlette.types import Receive, Scope, Send

from router.errors import error_body
from router.faces.lean import PLAIN, again, plain
from router.faces.rust_front import RustFront

log = logging.getLogger(__name__)

POOL = 256
"""Connections kept for the next request."""
READ_BYTES = 64 << 10
_FACE_ONE = frozenset({"kv_transfer_params", "cache_salt", "chat_template_kwargs", "request_id", "priority"})
_HOP = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"date"})
_FORWARDED = frozenset({b"x-request-id"})


class Broken(ConnectionError):
    """The front end has gone in the middle of an answer."""


class RustRelay:
    """ASGI; see the module's description."""

    def __init__(self, app: App, front: RustFront) -> None:
        self._app = app
        self._front = front
        self._pool: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.relayed = 0
        """Requests that the front end has begun to answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"] not in PLAIN
            or not self._front.ready
        ):
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        document = None if message.get("more_body") else plain(scope, body)
        if document is None or document.keys() & _FACE_ONE:
            await self._app(scope, again(message, receive), send)
            return
        exchange = _Exchange(send)
        leaving = asyncio.ensure_future(receive())
        working = asyncio.ensure_future(self._exchange(exchange, _head(scope, body), body))
        try:
            await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            working.cancel()  # closes the connection, which the front end takes for the client's leaving
            await asyncio.wait({working})
        error = None if working.cancelled() else working.exception()
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        log.warning("vllm-rs: %s", error)
        if not exchange.begun:
            await self._app(scope, again(message, receive), send)
        else:
            await exchange.fail()

    async def _exchange(self, exchange: _Exchange, head: bytes, body: bytes) -> None:
        reader, writer = self._pool.pop() if self._pool else await self._front.connect()
        try:
            writer.write(head + body)
            while not exchange.complete:
                data = await reader.read(READ_BYTES)
                if not data:
                    raise Broken("it closed the connection")
                await exchange.feed(data)
                self.relayed += exchange.first
        except BaseException:
            writer.close()
            raise
        if exchange.keep and len(self._pool) < POOL:
            self._pool.append((reader, writer))
        else:
            writer.close()


class _Exchange:
    """One answer: HTTP/1.1 in, ASGI out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._head_done = False
        self.begun = False
        self.complete = False
        self.keep = False
        self.first = False
        """True when the last piece was the first one."""

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name not in _HOP:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep = self._parser.should_keep_alive()

    async def feed(self, data: bytes) -> None:
        """What has come from the front end."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Broken(f"it does not speak HTTP: {error}") from error
        self.first = False
        if not self._head_done:
            return
        if not self.begun:
            self.begun = self.first = True
            status = self._parser.get_status_code()
            await self._send({"type": "http.response.start", "status": status, "headers": self._headers})
        body = b"".join(self._body)
        self._body.clear()
        if body or self.complete:
            more = not self.complete
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def fail(self) -> None:
        """End an answer that has broken off: a stream with an error event; another cannot be completed."""
        if any(name == b"content-type" and b"event-stream" in value for name, value in self._headers):
            event = f"data: {json.dumps(error_body(500, 'Internal server error'))}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event, "more_body": False})


def _head(scope: Scope, body: bytes) -> bytes:
    lines = [
        f"POST {scope['path']} HTTP/1.1".encode(),
        b"host: rust",
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *(b"%b: %b" % (name, value) for name, value in scope["headers"] if name in _FORWARDED),
    ]
    return b"\r\n".join(lines) + b"\r\n\r\n"
