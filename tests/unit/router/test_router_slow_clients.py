# SPDX-License-Identifier: Apache-2.0
"""Clients that send or read slowly, against the router's HTTP server and gateway over an application of the test's own.

The time that a client has is a fraction of a second here. Nothing is measured: each test waits for what must come, and
the controls for what must come nevertheless.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from deltaserve.config import RouterConfig
from router.dispatcher import Dispatcher
from router.gateway import Gateway, answer
from router.main import _listen, _make_server
from router.metrics import Metrics
from tests.doubles.static_membership import StaticMembership
from tests.support.processes import wait_until

WAIT = 60.0
CHUNK = b"x" * (64 << 10)
HEAD = b"POST /tokenize HTTP/1.1\r\nHost: x\r\n"
ENDLESS = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """The server on a thread of its own. GET /v1/models never ends, POST /tokenize says how long the body was."""

    def __init__(self, client_timeout: float) -> None:
        config = RouterConfig(port=0, client_timeout=client_timeout)
        self.listener = _listen(config)
        self.port = self.listener.getsockname()[1]
        self.running = 0
        self.chunks = 0
        self._server: Any = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(config)), daemon=True)
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started, WAIT, "the server serves")

    async def _serve(self, config: RouterConfig) -> None:
        dispatcher = Dispatcher(config, StaticMembership([]), Metrics(CollectorRegistry()))
        self._server = _make_server(Gateway(self._app, dispatcher), lambda: None, config)
        await self._server.serve(sockets=[self.listener])

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["method"] == "POST":
            body = (await receive())["body"]
            await answer(send, 200, {"bytes": len(body)})
            return
        self.running += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            left = asyncio.ensure_future(_gone(receive))
            while not left.done():
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.chunks += 1
                await asyncio.sleep(0)
        finally:
            self.running -= 1

    def connect(self) -> socket.socket:
        """A connection whose kernel keeps little for it."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(WAIT)
        client.connect(("127.0.0.1", self.port))
        return client

    @property
    def connections(self) -> int:
        """Connections that the server holds."""
        return len(self._server.server_state.connections)

    def stop(self) -> None:
        """End the server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(WAIT)
        self.listener.close()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    served = Served(0.4)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def patient() -> Iterator[Served]:
    served = Served(WAIT)
    yield served
    served.stop()


def everything(client: socket.socket) -> bytes:
    """What comes until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := client.recv(1 << 16):
            received += chunk
    return received


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),  # nothing was asked, so nothing is answered
        (b"\r\n", b"408"),
        (b"GET /v1", b"408"),
        (HEAD + b"X-A: b\r\n", b"408"),
        (HEAD + b"Content-Length: 100\r\n\r\nabc", b"408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab", b"408"),
    ],
)
def test_what_does_not_come_in_time(hasty: Served, sent: bytes, status: bytes) -> None:
    with hasty.connect() as client:
        client.sendall(sent)
        received = everything(client)
    assert received.split(b" ", 2)[1:2] == ([status] if status else [])
    wait_until(lambda: hasty.connections == 0, WAIT, "the connection is gone")


def test_bytes_that_trickle_do_not_buy_time(hasty: Served) -> None:
    stop = threading.Event()
    with hasty.connect() as client:

        def trickle() -> None:
            with contextlib.suppress(OSError):
                client.sendall(HEAD)
                while not stop.wait(0.02):
                    client.sendall(b"A: b\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        received = everything(client)
        stop.set()
        thread.join(WAIT)
    assert received == b"" or received.startswith(b"HTTP/1.1 408 ")  # lost, where the sender wrote on
    wait_until(lambda: hasty.connections == 0, WAIT, "the connection is gone")


def test_a_body_that_trickles_is_answered_by_a_patient_server(patient: Served) -> None:
    """The control: the same bytes, and time enough."""
    with patient.connect() as client:
        for part in (HEAD, b"Content-Length: 6\r\nConnection: close\r\n\r\n", b"abc", b"def"):
            client.sendall(part)
            time.sleep(0.1)
        received = everything(client)
    assert received.startswith(b"HTTP/1.1 200 ")
    assert received.endswith(b'{"bytes": 6}')


def test_a_client_that_does_not_read_loses_its_connection(hasty: Served) -> None:
    with hasty.connect() as client:
        client.sendall(ENDLESS)
        wait_until(lambda: hasty.running == 1, WAIT, "the answer has begun")
        wait_until(lambda: hasty.running == 0, WAIT, "the answer was given up")
        wait_until(lambda: hasty.connections == 0, WAIT, "the connection is gone")


def test_a_client_that_reads_on_keeps_it(patient: Served) -> None:
    with patient.connect() as client:
        client.sendall(ENDLESS)
        for _ in range(200):
            assert client.recv(1 << 14)
        assert patient.running == 1
    wait_until(lambda: patient.running == 0, WAIT, "the answer ends with its reader")


def test_the_buffers_of_a_client_that_does_not_read_are_bounded(patient: Served) -> None:
    with patient.connect() as client:
        client.sendall(ENDLESS)
        wait_until(lambda: patient.running == 1, WAIT, "the answer has begun")
        seen = -1
        while seen != (seen := patient.chunks):  # until the application is held back
            time.sleep(0.5)
        assert patient.running == 1
        assert seen * len(CHUNK) < 64 << 20
    wait_until(lambda: patient.running == 0, WAIT, "the answer ends with its reader")
