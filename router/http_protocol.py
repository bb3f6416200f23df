# SPDX-License-Identifier: Apache-2.0
"""The HTTP/1.1 connection: uvicorn's protocol with bounds on what a client may cost and with stricter framing.

    a head (request line and headers) of more than MAX_HEAD bytes                           431, closed
    a head that is not complete after `client_timeout` seconds                              408, closed
    framing that two readers could understand differently (RFC 9112, sections 3.2, 5.2, 6.1 and 6.3): Content-Length
    twice or beside Transfer-Encoding, a Transfer-Encoding other than chunked, folded header lines, not exactly one Host
                                                                                            400, closed
    a client that does not read what has been written for `client_timeout` seconds          closed, its request aborted

Nothing of what a client sent is logged. The time for a body is the gateway's affair (router/gateway.py).

`scope[PUSH]` is a way past ASGI for what a stream sends between its first and its last piece: a function that writes a
chunk at once and returns True, or does nothing and returns False, when the client is not reading or no chunked answer
is under way. Whoever gets False sends the piece as ASGI has it, and waits there. An ASGI message costs six coroutines
and a task's turn on its way to the socket; a token's event is not worth that.

`scope[LEAVING]` calls a function when the connection is lost before the answer has ended (`Leaving`). Who gives it one
needs no task that waits in `receive` for the same.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from router.errors import error_body

log = logging.getLogger(__name__)

MAX_HEAD = 64 << 10
"""Bytes of a request line with its headers."""
PUSH = "deltaserve.push"
"""Where the ASGI scope keeps the function that writes a chunk at once."""


WHOLE = "deltaserve.whole"
"""Where the ASGI scope keeps the function that says whether all of the request's body has come."""
LEAVING = "deltaserve.leaving"
"""Where the ASGI scope keeps what says that the client has left."""


class Malformed(ValueError):
    """A head that is refused; httptools hands it on as an error of its parser."""


class BoundedProtocol(HttpToolsProtocol):
    """See the module's description. `bounded` makes the class that uvicorn gets."""

    client_timeout = 60.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusal = (400, "this is no HTTP/1.1 request")
        self._head = 0
        """Bytes of the head so far, by what has come."""
        self._named = 0
        """The same, by what the parser has made of it."""
        self._turns = 0
        """Heads and messages that are complete."""
        self._in_head = True
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_unread()
        super().connection_lost(exc)
        if self.cycle is not None and not self.cycle.response_complete:
            _left(self.cycle)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._watch_head()
        before = self._turns
        super().data_received(data)
        if self._in_head and self._turns == before and not self.transport.is_closing():
            # The parser keeps an unfinished line to itself, so its length shows only here.
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(431, f"the request's head is longer than {MAX_HEAD} bytes")

    def send_400_response(self, msg: str) -> None:
        """Called by the base class for whatever the parser, or a callback below, does not accept."""
        self._refuse(*self._refusal)

    def _refuse(self, status: int, message: str) -> None:
        self._forget_head()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its body has become unreadable
            cycle.message_event.set()
            _left(cycle)
            if cycle.response_started:
                self.transport.abort()
                return
        body = json.dumps(error_body(status, message)).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    # ---- the head

    def on_message_begin(self) -> None:
        self._in_head, self._head, self._named = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if not self._in_head:
            return  # a trailer: what follows the body must not become a header of the request
        if b"\r" in value or b"\n" in value:
            self._malformed("a header is folded over several lines")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_framing()
        self._in_head = False
        self._turns += 1
        self._forget_head()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:  # else: an upgrade, which is not served
            self.cycle.transport = HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]
            self.scope[LEAVING] = Leaving()  # type: ignore[literal-required]
            self.scope[WHOLE] = functools.partial(_whole, self.cycle)  # type: ignore[literal-required]
            self.scope[PUSH] = functools.partial(_push, self.cycle)  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._turns += 1
        self._in_head, self._head = True, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and not self.transport.is_closing():
            self._watch_head()  # the rest of a body that nobody reads

    def _count(self, nbytes: int) -> None:
        self._named += nbytes
        if self._named > MAX_HEAD:
            self._refusal = (431, f"the request's head is longer than {MAX_HEAD} bytes")
            raise Malformed

    def _malformed(self, message: str) -> None:
        self._refusal = (400, message)
        raise Malformed

    def _check_framing(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._malformed("the version of HTTP must be 1.0 or 1.1")
        lengths = hosts = 0
        encoded = False
        for name, value in self.headers:
            if name == b"content-length":
                lengths += 1
            elif name == b"transfer-encoding":
                if encoded or value.strip().lower() != b"chunked":
                    self._malformed("the only Transfer-Encoding accepted is chunked")
                encoded = True
            elif name == b"host":
                hosts += 1
        if lengths > 1 or (lengths and encoded):
            self._malformed("the length of the body is given twice")
        if hosts != 1 and (hosts or version == "1.1"):
            self._malformed("exactly one Host header is needed")

    def _watch_head(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.client_timeout, self._head_late)

    def _forget_head(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _head_late(self) -> None:
        self._late = None
        if self.transport.is_closing():
            return
        if self._in_head and self._head:
            self._refuse(408, f"the request's head did not arrive within {self.client_timeout:g} s")
        else:
            self.transport.close()

    # ---- a client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.client_timeout, self._not_read)

    def resume_writing(self) -> None:
        self._forget_unread()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self._not_read()
        else:
            super().timeout_keep_alive_handler()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _not_read(self) -> None:
        self._unread = None
        log.warning("a client does not read its answer; its connection ends")
        self.transport.abort()


class Leaving:
    """Whether a request's client has left, and whom to tell."""

    __slots__ = ("_gone", "_tell")

    def __init__(self) -> None:
        self._gone = False
        self._tell: Callable[[], None] | None = None

    def then(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the client leaves: now, if it has left."""
        if self._gone:
            tell()
        else:
            self._tell = tell

    def forget(self) -> None:
        """Tell nobody any more."""
        self._tell = None

    def left(self) -> None:
        """The client has left."""
        self._gone = True
        if self._tell is not None:
            self._tell()


def _left(cycle: RequestResponseCycle) -> None:
    leaving: Leaving | None = cycle.scope.get(LEAVING)  # type: ignore[assignment]
    if leaving is not None:
        leaving.left()


class HeadWithBody:
    """A transport on which an answer's head waits for its first piece of body, in the same turn of the event loop.

    Two writes are two system calls, two packets, and two wake-ups of the client. What else a transport does is done
    after what waits has been written, so nothing changes its order.
    """

    __slots__ = ("_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        """Write; the first time: with what is written next in this turn, or at its end."""
        if self._head:
            data, self._head = self._head + data, b""
        elif not self._begun:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def __getattr__(self, name: str) -> Any:
        self._flush()
        return getattr(self._transport, name)


def _whole(cycle: RequestResponseCycle) -> bool:
    return not cycle.more_body


def _push(cycle: RequestResponseCycle, body: bytes) -> bool:
    """Write a chunk of an answer that has begun; False: not now (see the module's description)."""
    if (
        cycle.flow.write_paused
        or cycle.disconnected
        or not cycle.response_started
        or cycle.response_complete
        or not cycle.chunked_encoding
    ):
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


def bounded(client_timeout: float) -> type[BoundedProtocol]:
    """The protocol with its times in seconds."""
    return type("BoundedProtocol", (BoundedProtocol,), {"client_timeout": client_timeout})
