# SPDX-License-Identifier: Apache-2.0
"""Scenarios 10 and 13 against real engines: a prefill worker is killed, and the sweeper has to come.

One cluster without tensor parallelism, so that leases can be short (deltaserve/up/plan.py, `crowded`). No step here is
a matter of time: a worker is stopped before it is killed, so that what it was doing is known, and what has to be waited
for is waited for.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from deltaserve.config import WorkerConfig
from deltaserve.up import Cluster
from statestore.boundary import BoundaryRecord
from tests.cluster.calls import call, complete, metric, records, stored_objects
from tests.scenario import test_scenarios_cluster as base
from tests.support.cluster import cluster_config
from tests.support.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

LEASE = 8
"""Seconds of silence after which a worker is gone: more than a busy machine leaves it without a core."""
PATIENT = 240.0
"""Seconds after which what has not come will not come."""
SWEEP = 2.0 * WorkerConfig().longest_put + 60
"""The same of a sweep. It needs a lease, two of grace and its own turn; and where the kill came in the middle of an
object, up to twice what the store gives a writer (docs/handoff.md, crash paths)."""
QUEUE = 4
"""Requests that take the decode worker's only seat one after the other, each longer than a sweep takes."""
SEAT_TOKENS = 12_000
TRIES = 5
"""Of what a busy machine may spoil: a publish that has ended before its worker was stopped, a lease lost in between."""
PREFILLS = ("prefill-0", "prefill-1")
LOCAL = "deltaserve_router_local_prefill_total"
"""Of the router: prompts that a decode worker computed."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill workers, and a decode worker with one seat, that keep nothing for later requests."""
    options: dict[str, Any] = {"checkpoint_bytes": 0}
    config = cluster_config(
        tmp_path_factory.mktemp("killed"),
        prefill=2,
        lease_ttl=LEASE,
        prefill_options=options,
        decode_options={**options, "max_num_seqs": 1},
        # The queue is the decode worker's; a worker that is out of sight for a moment is waited for.
        router_options={"slots_per_seq": 16, "worker_wait": 60},
    )
    with Cluster(config) as running:
        # The first request imports what the others need.
        complete(running, base.prompt(40), cache_salt=base.salt())
        yield running


@pytest.fixture
def cluster(plain: Cluster) -> Iterator[Cluster]:
    """With a prefill worker at least, idle; whoever was stopped goes on."""
    if not any(plain.statuses[name].state == "ready" for name in PREFILLS):
        starts = plain.statuses[PREFILLS[0]].starts
        plain.restart(PREFILLS[0])
        plain.wait_ready(PREFILLS[0], PATIENT, after_start=starts)
    base.idle(plain)
    yield plain
    for name in PREFILLS:
        plain.kill(name, signal.SIGCONT)


def test_a_prefill_worker_killed_mid_publish(cluster: Cluster) -> None:
    """Whoever holds a publish that is open is killed; every request is answered, and what was written goes."""
    tokens = base.prompt(base.LONG)
    right = complete(cluster, tokens, cache_salt=base.salt())
    wait_until(lambda: handed_over(cluster, tokens), PATIENT, "the control: with nobody killed, handed over")
    with ThreadPoolExecutor(4 * TRIES) as threads:
        asked: list[Future[dict[str, Any]]] = []
        caught = False
        for _ in range(TRIES):
            asked += [threads.submit(complete, cluster, tokens, cache_salt=base.salt()) for _ in range(4)]
            wait_until(partial(pending_or_done, cluster, asked), PATIENT, "a publish is open")
            caught = bool(opened := pending(cluster)) and killed_with(cluster, opened[0])
            if caught:
                break
        answers = [each.result(PATIENT) for each in asked]
    assert caught, f"no publish was open when its worker was stopped, {TRIES} times"
    assert all(answer["tokens"] == right["tokens"] for answer in answers)
    assert any(answer["trace"]["route"].startswith("local prefill_failed") for answer in answers)
    swept(cluster)
    wait_until(lambda: handed_over(cluster, base.prompt(300)), PATIENT, "the other one serves")


def test_a_decode_that_starts_after_its_boundary_has_been_swept(cluster: Cluster) -> None:
    """The only seat is taken until a publisher that has died, and its boundary, have been swept."""
    tokens = base.prompt(300)
    right = complete(cluster, tokens, cache_salt=base.salt())
    wait_until(lambda: handed_over(cluster, tokens), PATIENT, "the control: with nobody killed, handed over")
    base.idle(cluster)
    seats = [base.Client(cluster, base.prompt(20), SEAT_TOKENS, "local") for _ in range(QUEUE)]
    with ThreadPoolExecutor(TRIES) as threads:
        try:
            wait_until(lambda: any(client.chunks for client in seats), PATIENT, "the seat is taken")
            wait_until(lambda: base.gauges(cluster)["decode requests"] >= QUEUE, PATIENT, "and queued for")
            waiting = published(cluster, tokens, threads)
            assert stored_objects(cluster) > 0, "the control: there is something to sweep"
            for name in PREFILLS:
                if cluster.statuses[name].state == "ready":
                    cluster.kill(name, hold=True)
            swept(cluster)
            assert not any(each.done() for each in waiting), "the seat was free before the boundary had gone"
        finally:
            for client in seats:
                client.go()
        answers = [each.result(PATIENT) for each in waiting]
    assert all(answer["tokens"] == right["tokens"] for answer in answers)
    assert all(answer["trace"]["from_store"] == 0 for answer in answers)
    assert answers[-1]["trace"]["failure"], "the one whose boundary was committed has looked for it"


def pending(cluster: Cluster) -> list[BoundaryRecord]:
    return [record for record in records(cluster) if record.state == "pending"]


def pending_or_done(cluster: Cluster, asked: list[Future[dict[str, Any]]]) -> bool:
    return bool(pending(cluster)) or all(each.done() for each in asked)


def killed_with(cluster: Cluster, record: BoundaryRecord) -> bool:
    """Kill the worker that holds an open publish, unless it has ended before the worker was stopped."""
    workers = call(cluster.endpoint + "/health")[1]["roles"]["prefill"]["workers"]
    address = {worker["id"]: worker["address"] for worker in workers}.get(record.owner)
    name = next((each for each in PREFILLS if cluster.statuses[each].address == address), None)
    if name is None:
        return False
    cluster.kill(name, signal.SIGSTOP)
    if not any(other.owner == record.owner for other in pending(cluster)):
        cluster.kill(name, signal.SIGCONT)
        return False
    cluster.kill(name, hold=True)
    return True


def published(
    cluster: Cluster, tokens: list[int], threads: ThreadPoolExecutor
) -> list[Future[dict[str, Any]]]:
    """Requests that wait for the seat; the boundary of the last one is committed."""
    waiting: list[Future[dict[str, Any]]] = []
    for _ in range(TRIES):
        before = metric(cluster, LOCAL)
        waiting.append(threads.submit(complete, cluster, tokens, cache_salt=base.salt()))
        wait_until(partial(committed_or_local, cluster, before), PATIENT, "its boundary is committed")
        if committed(cluster):
            return waiting
    raise AssertionError(f"no boundary was committed, {TRIES} times")


def committed(cluster: Cluster) -> bool:
    return any(record.state == "committed" for record in records(cluster))


def committed_or_local(cluster: Cluster, before: float) -> bool:
    return committed(cluster) or metric(cluster, LOCAL) > before


def handed_over(cluster: Cluster, tokens: list[int]) -> bool:
    return bool(complete(cluster, tokens, cache_salt=base.salt())["trace"]["from_store"] == len(tokens) - 1)


def swept(cluster: Cluster) -> None:
    """Wait until nothing of a dead worker is left."""
    wait_until(lambda: not records(cluster), SWEEP, "the dead worker's records are swept")
    wait_until(lambda: stored_objects(cluster) == 0, PATIENT, "its objects too")
