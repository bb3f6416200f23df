# SPDX-License-Identifier: Apache-2.0
"""`--processes 2` as real processes over worker doubles: one is killed, limits hold, counts add up, all end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.started_router import Router, Workers, wait_until

pytestmark = pytest.mark.cluster  # router processes of their own
WAIT = 60.0
TOKENS = 400
STREAM = {"model": "demo", "prompt": "x", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
SHORT = {"model": "demo", "prompt": "x", "max_tokens": 2}
SECRET = "a-secret-of-the-test-alone"


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    made.start()
    yield made
    for double in (made.prefill, made.decode):
        made.call(double.stop())


@pytest.fixture(scope="module")
def router(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = {"free": {"key": SECRET}, "four": {"key": f"{SECRET}-4", "concurrency": 4}}
    keys.write_text(json.dumps(entries))
    made = Router(
        [workers.prefill, workers.decode], processes=2, api_keys=str(keys), slots_per_seq=64.0, grpc_port=0
    )
    wait_until(lambda: health(made)["status"] == "ok", WAIT)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(autouse=True)
def as_new(workers: Workers) -> None:
    workers.reset()


def client(secret: str = SECRET) -> httpx.Client:
    """Opens a connection for each request: which process gets it is the kernel's choice."""
    return httpx.Client(
        timeout=WAIT,
        limits=httpx.Limits(max_keepalive_connections=0),
        headers={"authorization": f"Bearer {secret}"},
    )


def health(router: Router) -> dict[str, Any]:
    with client() as http:
        found: dict[str, Any] = http.get(f"{router.url}/health").json()
    return found


def children(router: Router) -> list[int]:
    return [child.pid for child in psutil.Process(router.process.pid).children()]


def finished(router: Router) -> int:
    with client() as http:
        text = http.get(f"{router.url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("deltaserve_router_requests_total")]
    return sum(int(float(line.split()[-1])) for line in lines if 'outcome="finished"' in line)


def owner(connection: socket.socket) -> int:
    """The process that holds the other end of a connection."""
    ours = connection.getsockname()
    for found in psutil.net_connections("tcp"):
        if found.raddr and tuple(found.raddr) == ours and found.status == "ESTABLISHED":
            return int(found.pid or 0)
    return 0


class Stream:
    """A streamed completion over a connection of its own."""

    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.connection = socket.create_connection((host, int(port)), timeout=WAIT)
        body = json.dumps(STREAM).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {SECRET}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.connection.sendall(head.encode() + body)
        self.data = self.connection.recv(1 << 16)
        self.pid = owner(self.connection)

    def rest(self) -> str:
        """How it ended: whole, broken, or with an error event."""
        try:
            while b"0\r\n\r\n" not in self.data[-5:]:
                if not (data := self.connection.recv(1 << 16)):
                    return "broken"
                self.data += data
        except ConnectionError:
            return "broken"
        finally:
            self.connection.close()
        events = self.data.count(b"data: {")
        whole = b"[DONE]" in self.data and b'"error"' not in self.data
        return "whole" if whole and events > TOKENS // 4 else f"ended after {events} events"


def test_only_a_killed_processs_streams_break_and_it_comes_back(router: Router, workers: Workers) -> None:
    workers.decode.knobs.step_seconds = 0.02
    streams = [Stream(router.url) for _ in range(24)]
    mine = Counter(stream.pid for stream in streams)
    assert len(mine) == 2, mine
    assert min(mine.values()) >= 3, mine  # the kernel spreads connections
    victim = next(iter(mine))
    before = finished(router)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    # Whoever comes now is served, without an error and without waiting for it.
    for _ in range(16):
        with client() as http:
            at = time.monotonic()
            answer = http.post(f"{router.url}/v1/completions", json=SHORT)
            assert answer.status_code == 200, answer.text
            assert time.monotonic() - at < 5
    ends = Counter((stream.pid == victim, stream.rest()) for stream in streams)
    assert ends == {(True, "broken"): mine[victim], (False, "whole"): 24 - mine[victim]}
    wait_until(lambda: health(router)["processes"]["serving"] == 2, WAIT)
    assert time.monotonic() - began < 30
    assert victim not in children(router)
    assert len(children(router)) == 2
    assert finished(router) == before + 16 + 24 - mine[victim]
    # The workers have let go of what the vanished process had there.
    wait_until(lambda: workers.decode.held == 0, WAIT)
    wait_until(lambda: health(router)["in_flight"] == 0, WAIT)
    fresh = [Stream(router.url) for _ in range(24)]
    assert {stream.pid for stream in fresh} == set(children(router))  # its socket is its own again
    assert Counter(stream.rest() for stream in fresh) == {"whole": 24}


def test_a_keys_concurrency_holds_over_both(router: Router, workers: Workers) -> None:
    workers.decode.knobs.step_seconds = 0.02

    async def ask() -> Counter[int]:
        limits = httpx.Limits(max_keepalive_connections=0, max_connections=100)
        headers = {"authorization": f"Bearer {SECRET}-4"}
        async with httpx.AsyncClient(timeout=WAIT, limits=limits, headers=headers) as http:
            body = {**SHORT, "max_tokens": 60}
            answers = await asyncio.gather(
                *(http.post(f"{router.url}/v1/completions", json=body) for _ in range(32))
            )
        return Counter(answer.status_code for answer in answers)

    assert asyncio.run(ask()) == {200: 4, 429: 28}


def test_one_process_answers_for_all(router: Router) -> None:
    before = finished(router)
    names = [f"both-{number}" for number in range(12)]
    with client() as http:
        for name in names:
            answer = http.post(f"{router.url}/v1/completions", json=SHORT, headers={"x-request-id": name})
            assert answer.status_code == 200
        for name in names:  # asked of whichever process accepts
            trace = http.get(f"{router.url}/deltaserve/requests/{name}")
            assert trace.status_code == 200
            assert trace.json()["status"] == "finished"
        assert http.get(f"{router.url}/deltaserve/requests/nobody").status_code == 404
        state = http.get(f"{router.url}/ui/state").json()
    assert finished(router) == before + 12
    listed = {one["id"].removeprefix("cmpl-") for one in state["recent"]}
    assert listed >= set(names)
    assert state["requests"]["ended"]["finished"] == before + 12
    assert [worker["id"] for worker in state["pools"]["decode"]] == ["d0"]


def test_the_grpc_port_is_shared(router: Router) -> None:
    port = next(line.split(":")[-1].strip() for line in router.lines if line.startswith("GRPC "))
    listening = [
        found.pid
        for found in psutil.net_connections("tcp")
        if found.status == "LISTEN" and found.laddr.port == int(port)
    ]
    assert set(children(router)) <= set(listening)


def test_a_signal_ends_all_of_them_and_nothing_stays(workers: Workers, tmp_path: Path) -> None:
    made = Router([workers.prefill, workers.decode], processes=2)
    pids = children(made)
    stream_url = made.url
    assert len(pids) == 2
    with client() as http:
        assert http.post(f"{stream_url}/v1/completions", json=SHORT).status_code == 200
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(20) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert "Traceback" not in "".join(made.errors)


def test_the_parents_death_ends_the_others(workers: Workers) -> None:
    made = Router([workers.prefill, workers.decode], processes=2)
    pids = children(made)
    made.process.kill()
    made.process.wait()
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), 30)
