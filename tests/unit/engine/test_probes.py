# SPDX-License-Identifier: Apache-2.0
"""Alive and ready are two questions, and a hung event loop cannot answer for itself."""

from __future__ import annotations

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deltaserve.engine import probes
from deltaserve.engine.probes import Health, serve


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextmanager
def served(health: Health) -> Iterator[int]:
    port = free_port()
    close = serve("127.0.0.1", port, health)
    try:
        yield port
    finally:
        close()


def test_a_worker_that_drains_is_alive_and_not_ready() -> None:
    with running_loop() as loop:
        health = Health(loop)
        with served(health) as port:
            assert (get(port, "/alive")[0], get(port, "/ready")[0]) == (200, 503)  # not joined yet
            health.ready = True
            assert (get(port, "/alive")[0], get(port, "/ready")[0]) == (200, 200)
            health.ready = False
            assert (get(port, "/alive")[0], get(port, "/ready")[0]) == (200, 503)


def test_a_hung_or_closed_loop_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOOP_SECONDS", 0.2)
    release = threading.Event()
    with running_loop() as loop:
        health = Health(loop)
        with served(health) as port:
            loop.call_soon_threadsafe(release.wait)
            assert get(port, "/alive")[0] == 503
            release.set()
            monkeypatch.setattr(probes, "LOOP_SECONDS", 60.0)
            assert get(port, "/alive")[0] == 200
    assert not health.alive()


def test_the_same_port_has_the_metrics() -> None:
    with running_loop() as loop, served(Health(loop)) as port:
        status, body = get(port, "/metrics")
        assert status == 200
        assert "# TYPE" in body


def test_a_port_that_is_taken_is_an_error() -> None:
    with (
        running_loop() as loop,
        served(Health(loop)) as port,
        pytest.raises(OSError, match="in use"),
    ):
        serve("127.0.0.1", port, Health(loop))
