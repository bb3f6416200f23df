# SPDX-License-Identifier: Apache-2.0
"""Every worker of a real cluster leaves and comes back under load: no request fails, and no token differs.

A prefill and two decode workers, two requests at once each, so that requests wait on a decode worker with their
boundary published and unread. The load is the five kinds of streams that must go on exactly
(benchmarks/recovery/streams.py), compared with the same ones undisturbed: text, token ids, number of tokens, ends
(tests/unit/benchmarks/test_recovery_benchmark.py shows that the comparison sees each of them).

The last test is the control of the first: workers that leave at once move what the first one waits for, and a counter
that was still there says so.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.recovery.streams import TOOL_PARSER, Stream, differences, finish, streams
from deltaserve.config import EtcdConfig
from deltaserve.drain import Drained, drain
from deltaserve.up import Cluster
from deltaserve.up.supervisor import Event
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import call, metric, trace
from tests.support.cluster import DEMO, cluster_config
from tests.support.cluster_gauges import all_came_back, gauges
from tests.support.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PROMPT = list(PromptMaker(DEMO).make(300).tokens)
SEATS = 2
"""Requests that a decode worker runs at once."""
TOKENS, LONG = 40, 150
"""Length of the answers of the load, and of those that take all seats."""
PATIENCE = 240.0
MOVED = {
    "resumed": "deltaserve_router_resume_seconds_count",
    "moved": "deltaserve_router_decode_retries_total",
    "failed loads": "deltaserve_router_load_failures_total",
    "failed handovers": 'deltaserve_router_local_prefill_total{reason="prefill_failed"}',
    "errors": 'deltaserve_router_requests_total{outcome="error"}',
}
"""What a worker that leaves in order must not make grow."""
_salts = iter(range(1_000_000))


class Rolling:
    """The cluster, and how its processes have ended."""

    def __init__(self) -> None:
        self.cluster: Cluster
        self.ends: list[tuple[str, str]] = []

    def on_event(self, event: Event) -> None:
        """Remember how a process ended that is about to start again."""
        if event.state == "restarting":
            self.ends.append((event.name, event.text.partition(";")[0]))

    def counters(self) -> dict[str, float]:
        """What moved or was lost so far."""
        return {name: metric(self.cluster, sample) for name, sample in MOVED.items()}

    def worker_id(self, name: str) -> str:
        """The register's name of a process."""
        address = self.cluster.statuses[name].address
        workers = self._workers(name)
        return str(next(worker["id"] for worker in workers if worker["address"] == address))

    def wait_back(self, name: str, starts: int) -> None:
        """Until a process has been started anew and the router gives it requests."""
        self.cluster.wait_ready(name, PATIENCE, after_start=starts)
        address = self.cluster.statuses[name].address

        def known() -> bool:
            return any(
                worker["address"] == address and worker["state"] == "ready" for worker in self._workers(name)
            )

        wait_until(known, PATIENCE, f"{name} serves again")

    def requests(self, name: str) -> int:
        """What the router has given a process and not got back."""
        address = self.cluster.statuses[name].address
        return sum(worker["requests"] for worker in self._workers(name) if worker["address"] == address)

    def _workers(self, name: str) -> list[dict[str, Any]]:
        report = call(self.cluster.endpoint + "/health")[1]["roles"][name.partition("-")[0]]
        return list(report["workers"])

    def command(self, name: str) -> str:
        """Drain with `deltaserve drain`; its line. It exits 0."""
        command = [sys.executable, "-m", "deltaserve", "drain", self.worker_id(name), "--seconds", "200"]
        command += ["--etcd-endpoints", self.cluster.etcd_endpoint]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def drain(self, seconds: float, *names: str) -> list[Drained]:
        """Drain from this process, all at once."""
        register = EtcdConfig(endpoints=[self.cluster.etcd_endpoint])
        workers = [self.worker_id(name) for name in names]

        async def all_of_them() -> list[Drained]:
            return await asyncio.gather(
                *(drain(register, worker, seconds=seconds, wait=PATIENCE) for worker in workers)
            )

        return asyncio.run(all_of_them())


@pytest.fixture(scope="module")
def rolling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rolling]:
    """The cluster whose workers come and go. It keeps no checkpoints, so that whatever stays is seen."""
    made = Rolling()
    config = cluster_config(
        tmp_path_factory.mktemp("rolling"),
        decode=2,
        max_num_seqs=SEATS,
        max_restarts=100,
        tool_parser=TOOL_PARSER,
        router_options={"resume_wait": 200.0, "worker_wait": 60.0, "slots_per_seq": 8.0},
        prefill_options={"checkpoint_bytes": 0, "drain_seconds": 200.0},
        decode_options={"checkpoint_bytes": 0, "drain_seconds": 200.0},
    )
    with Cluster(config, on_event=made.on_event) as running:
        made.cluster = running
        yield made


def load(cluster: Cluster, tokens: int, **fields: Any) -> dict[str, Stream]:
    """One stream of each kind, over a prompt that no cache knows, handed over; not started."""
    made = streams(
        cluster.endpoint,
        cluster.served_model_name,
        PROMPT,
        tokens,
        cache_salt=f"rolling {next(_salts)}",
        kv_transfer_params={"placement": "handover"},
        stream_options={"include_usage": True},
        **fields,
    )
    for kind, stream in made.items():
        stream.name = f"rolling-{next(_salts)}"
        # The chat goes the router's short way, which gives no token ids: its text and its count are compared.
        if kind != "chat":
            stream.body["return_token_ids"] = True
    return made


class Load:
    """Rounds of the five streams, one after the other, for as long as the block lasts."""

    def __init__(self, cluster: Cluster, expected: dict[str, Stream]) -> None:
        self.rounds = 0
        self.wrong: list[dict[str, str]] = []
        self._cluster, self._expected = cluster, expected
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.is_set():
            running = load(self._cluster, TOKENS)
            finish([stream.start() for stream in running.values()])
            self.wrong.append(differences(running, self._expected))
            self.rounds += 1
            self._over.wait(1.0)  # a worker that starts on the same cores gets some of them

    def two_more(self) -> None:
        """Wait for two more rounds: one of them began from now on."""
        seen = self.rounds
        wait_until(lambda: self.rounds >= seen + 2, PATIENCE, "two more rounds of streams")


class Crowd:
    """More long answers than decode workers have seats: those that wait have their boundary published and unread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running = {number: load(cluster, LONG)["greedy"] for number in range(4 * SEATS)}
        self._threads = [stream.start() for stream in self._running.values()]
        self.unread: list[Stream] = []
        wait_until(self._waits, PATIENCE, "two requests wait with a published boundary")
        self.seen = time.time()

    def _waits(self) -> bool:
        self.unread = [stream for stream in self._running.values() if self._is_unread(stream)]
        return len(self.unread) >= 2

    def _is_unread(self, stream: Stream) -> bool:
        status, found = call(f"{self._cluster.endpoint}/deltaserve/requests/{stream.name}")
        return status == 200 and found["published_after"] and found["first_token_after"] is None

    def end(self) -> None:
        """Wait for all answers."""
        finish(self._threads)

    def wrong(self, expected: Stream) -> dict[str, str]:
        """The answers that are not as they must be."""
        running = {str(number): stream for number, stream in self._running.items()}
        return differences(running, dict.fromkeys(running, expected))

    def traces(self) -> list[dict[str, Any]]:
        """Of the requests that waited."""
        return [trace(self._cluster, stream.id) for stream in self.unread]

    def all_were_read(self) -> None:
        """The boundaries that were unread when the crowd had come were read afterwards, and none was lost."""
        for found in self.traces():
            assert found["arrival"] + found["first_token_after"] > self.seen
            assert (found["from_store"], found["load_failure"]) == (len(PROMPT) - 1, "")


@dataclass
class Right:
    """Answers as they must be."""

    short: dict[str, Stream]
    """Of each kind."""
    long: Stream
    """Of the kind `greedy`."""


@pytest.fixture(scope="module")
def right(rolling: Rolling) -> Right:
    """The streams undisturbed."""
    short, long = load(rolling.cluster, TOKENS), load(rolling.cluster, LONG)["greedy"]
    finish([stream.start() for stream in (*short.values(), long)])
    for kind, stream in [*short.items(), ("long", long)]:
        assert (stream.error, stream.ends[-1:]) == ("", ["[DONE]"]), kind
        assert stream.counted > 0
        assert len(stream.tokens) == (0 if kind == "chat" else stream.counted), kind
    return Right(short, long)


def test_every_worker_is_restarted_under_load(rolling: Rolling, right: Right) -> None:
    cluster, before = rolling.cluster, rolling.cluster.pids
    with Load(cluster, right.short) as busy, ThreadPoolExecutor(1) as beside:
        # One of each role. The decode worker runs some requests, and others wait there whose boundaries lie unread in
        # its memory; the prefill worker has published what nobody has read yet. Both stay until it has been.
        crowd = Crowd(cluster)
        starts = {name: cluster.statuses[name].starts for name in ("decode-0", "prefill-0")}
        line = beside.submit(rolling.command, "decode-0")
        assert [gone.moved for gone in rolling.drain(200, "prefill-0")] == [0]
        assert all(stream.chunks for stream in crowd.unread), "it went before they were read"
        assert "it finished all that it held" in line.result()
        crowd.end()
        assert crowd.wrong(right.long) == {}
        crowd.all_were_read()
        for name, number in starts.items():
            rolling.wait_back(name, number)

        number = cluster.statuses["decode-1"].starts
        wait_until(lambda: rolling.requests("decode-1") > 0, PATIENCE, "decode-1 has something to finish")
        cluster.restart("decode-1")  # SIGTERM
        rolling.wait_back("decode-1", number)
        busy.two_more()
    assert [wrong for wrong in busy.wrong if wrong] == []
    assert rolling.counters() == dict.fromkeys(MOVED, 0.0)
    assert sorted(rolling.ends) == [
        (name, "ended with exit code 0") for name in ("decode-0", "decode-1", "prefill-0")
    ]
    after = cluster.pids
    assert all(before[name] != after[name] for name in ("decode-0", "decode-1", "prefill-0"))
    all_came_back(cluster, PATIENCE)


def test_what_a_drain_does_not_wait_for_is_seen(rolling: Rolling, right: Right) -> None:
    """The control: without time, requests are moved, and the counters say so. No token differs even so."""
    crowd = Crowd(rolling.cluster)
    assert gauges(rolling.cluster)["records"] >= len(crowd.unread)
    assert all(gone.moved for gone in rolling.drain(0, "prefill-0", "decode-0"))
    crowd.end()
    assert crowd.wrong(right.long) == {}
    # What is handed over once more, when the prefill worker is back, is in the store again: only the counters, of which
    # the test before wants every one to be zero, know whatever way it went.
    counters = rolling.counters()
    assert counters["resumed"] + counters["moved"] > 0
    assert counters["errors"] == 0
