# SPDX-License-Identifier: Apache-2.0
"""Scenarios 4, 7 and 11 against real engines: two prefill workers of TP 1, a decode worker of TP 2 with DCP 2.

The decode worker's heads and rows lie otherwise than the prefill worker's, so every handover here is scenario 7's. What
the engines' in-process double shows in bits is shown here in tokens and log-probs of the demonstration model.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import complete, records
from tests.support.cluster import DEMO, cluster_config
from tests.support.cluster_gauges import gauges
from tests.support.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LONG = 1500
TOLERANCE = 1e-4
"""Largest difference of a log-prob, nats: tensor-parallel sums are taken in another order."""
PATIENT = 120.0
"""Seconds after which what has not come will not come."""
SEATS = 4
"""Requests that a worker runs at once."""


def prompt(length: int) -> list[int]:
    return list(PromptMaker(DEMO).make(length).tokens)


_salts = iter(range(1_000_000))


def salt() -> str:
    """A cache salt that no cache knows."""
    return f"scenario-{next(_salts)}"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that keeps nothing for later requests, so that what is left belongs to one of ours."""
    options: dict[str, Any] = {"checkpoint_bytes": 0}
    config = cluster_config(
        tmp_path_factory.mktemp("scenarios"),
        prefill=2,
        decode_tp=2,
        decode_dcp=2,
        max_num_seqs=SEATS,
        prefill_options=options,
        decode_options=options,
    )
    with Cluster(config) as running:
        complete(running, prompt(40), cache_salt=salt())  # the first request imports what the others need
        yield running


def idle(cluster: Cluster) -> dict[str, float]:
    """The gauges when no request is anywhere: workers tell that the last one has ended after its client knows."""
    wait_until(lambda: not any(gauges(cluster).values()), PATIENT, "an idle cluster")
    return gauges(cluster)


def back_to(cluster: Cluster, baseline: dict[str, float], seconds: float = PATIENT) -> None:
    """Wait until every gauge is at its baseline, and still is when the workers have told their load again.

    A worker tells it when its stream has been silent for a second.
    """
    deadline = time.monotonic() + seconds
    while (now := gauges(cluster)) != baseline:
        off = {
            name: (baseline.get(name), value) for name, value in now.items() if baseline.get(name) != value
        }
        assert time.monotonic() < deadline, f"not back at the baseline after {seconds:g} s (was, is): {off}"
        time.sleep(0.2)
    time.sleep(1.5)
    assert gauges(cluster) == baseline


class Client:
    """A streaming request whose client may go at any moment."""

    def __init__(self, cluster: Cluster, tokens: list[int], count: int, placement: str = "handover") -> None:
        body = {
            "model": cluster.served_model_name,
            "prompt": tokens,
            "max_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": salt(),
            "kv_transfer_params": {"placement": placement},
        }
        address = urlsplit(cluster.endpoint)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        self.chunks = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            reply = self._connection.getresponse()
            for line in reply:
                self.chunks += line.startswith(b"data: {")
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def go(self) -> None:
        """Close the connection."""
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._thread.join(30)
        self._connection.close()


# ---- 4 and 7


@pytest.mark.parametrize("length", [2, 16, 128, 129, 257, 600])
def test_the_answer_is_that_of_one_engine(real: Cluster, length: int) -> None:
    """Handed over, again with all N-1 tokens in the prefill worker's own cache, and computed by one engine alone."""
    tokens, shared = prompt(length), salt()
    first = complete(real, tokens, cache_salt=shared)
    assert first["trace"]["from_store"] == length - 1
    again = complete(real, tokens, cache_salt=shared)
    assert again["trace"]["recomputed"] == 1
    alone = complete(real, tokens, "local", cache_salt=salt())
    assert alone["trace"]["from_store"] == 0
    for answer in (first, again):
        assert answer["tokens"] == alone["tokens"]
        worst = max(abs(a - b) for a, b in zip(answer["logprobs"], alone["logprobs"], strict=True))
        assert worst < TOLERANCE, f"log-probs differ by {worst}"


def test_control_another_prompt_has_another_answer(real: Cluster) -> None:
    """One token further back in the prompt is another one: what is compared above would notice."""
    tokens = prompt(600)
    one = complete(real, tokens, cache_salt=salt())
    other = complete(real, [*tokens[:-1], tokens[-2]], cache_salt=salt())
    worst = max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))
    assert one["tokens"] != other["tokens"] or worst > 10 * TOLERANCE


# ---- 11


def _queued(cluster: Cluster) -> list[Client]:
    return [Client(cluster, prompt(LONG), 20) for _ in range(2 * SEATS)]


def _mid_prefill(cluster: Cluster) -> list[Client]:
    made = [Client(cluster, prompt(LONG), 20) for _ in range(2)]
    wait_until(lambda: gauges(cluster)["records"] > 0, 30, "a prefill has begun")
    return made


def _published(cluster: Cluster) -> list[Client]:
    """The decode worker's seats are taken: what is published waits for one."""
    made = [Client(cluster, prompt(20), 400) for _ in range(SEATS)]
    wait_until(lambda: all(client.chunks for client in made), 60, "the seats are taken")
    made += [Client(cluster, prompt(300), 20) for _ in range(2)]
    wait_until(lambda: gauges(cluster)["decode requests"] > SEATS, 30, "one waits for a seat")
    return made


def _mid_load(cluster: Cluster) -> list[Client]:
    made = [Client(cluster, prompt(LONG), 20) for _ in range(2)]
    wait_until(lambda: any(r.state == "committed" for r in records(cluster)), 30, "one is committed")
    return made


def _decoding(cluster: Cluster) -> list[Client]:
    made = [Client(cluster, prompt(300), 400) for _ in range(SEATS)]
    wait_until(lambda: all(client.chunks >= 2 for client in made), 60, "all decode")
    return made


def _after_the_last(cluster: Cluster) -> list[Client]:
    made = [Client(cluster, prompt(300), 3) for _ in range(SEATS)]
    wait_until(lambda: any(client.ended for client in made), 60, "one has ended")
    return made


POINTS: list[Callable[[Cluster], list[Client]]] = [
    _queued,
    _mid_prefill,
    _published,
    _mid_load,
    _decoding,
    _after_the_last,
]


def test_cancelled_at_six_points_everything_returns(real: Cluster) -> None:
    baseline = idle(real)
    right = complete(real, prompt(300), "local", cache_salt=salt())["tokens"]
    cancelled = 0
    for point in POINTS:
        clients = point(real)
        with ThreadPoolExecutor(len(clients)) as threads:
            list(threads.map(Client.go, clients))
        cancelled += len(clients)
        assert complete(real, prompt(300), cache_salt=salt())["tokens"] == right, point.__name__
        back_to(real, baseline)
    assert cancelled >= 26


def test_control_the_gauges_see_a_living_request(real: Cluster) -> None:
    baseline = idle(real)
    client = Client(real, prompt(300), 2000)
    try:
        wait_until(lambda: client.chunks >= 2, 60, "it decodes")
        moved = {name for name, value in gauges(real).items() if value != baseline[name]}
    finally:
        client.go()
    assert {"flights", "records", "objects", "decode requests", "decode outstanding_tokens"} <= moved
    back_to(real, baseline)
