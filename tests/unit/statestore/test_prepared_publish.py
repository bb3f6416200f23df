# SPDX-License-Identifier: Apache-2.0
"""A publish begins with the step that computes its state: room is taken then, and not a byte is read before its end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.config import StoreConfig
from statestore.boundary import Epoch
from statestore.connector import events, worker_half
from statestore.connector.cache_view import CacheView
from statestore.connector.messages import PublishJob, RankReport
from statestore.connector.publishing import Publisher
from statestore.connector.worker_half import WorkerHalf
from statestore.reshard import stored_row_bytes
from tests.doubles.pool import PoolDouble, Store
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import geometry
from tests.property.reshard_reference import World
from tests.support.patience import HUNG
from tests.support.processes import wait_until

G = geometry(tp=1, head_v=4)
LENGTH = 100
STORED = G.sizes.kda + LENGTH * stored_row_bytes(G)
WORKER = "prefill-1"


class Rank:
    """One rank's worker half over a pool in memory; `compute` is what a step's kernels would do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_half, "geometry_of", lambda *arguments: G)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            model_config=SimpleNamespace(max_model_len=LENGTH),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        extra: dict[str, Any] = {
            "worker_id": WORKER,
            "model_digest": G.model_digest,
            "store": StoreConfig().model_dump(mode="json"),
            "load_timeout": HUNG,
        }
        self.half = WorkerHalf(config, None, extra)
        self.store = Store()
        pool = PoolDouble(self.store)
        self.caches = RankCaches(G, blocks_for(G, LENGTH))
        self.tables = self.caches.tables(LENGTH, 1)
        view = CacheView(self.caches.caches, self.caches.config, G)
        self.half._view, self.half._pool = view, pool
        self.half._publisher = Publisher(view, pool, 0, HUNG)
        self.job = PublishJob("r", Epoch(7, 1), LENGTH, self.tables, "", 1, 1)
        self.reports: list[RankReport] = []

    def compute(self) -> None:
        self.caches.lay_out(World.random(G, LENGTH, 1), 0, self.tables)

    def report(self) -> RankReport:
        def told() -> bool:
            found = self.half.take_reports()
            if found is not None:
                self.reports += found.publish[self.job.name]
            return bool(self.reports)

        wait_until(told, HUNG, "the job is reported")
        (report,) = self.reports
        return report


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch)
    yield made
    made.half.close()


def test_room_is_taken_while_the_step_computes(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    wait_until(lambda: rank.store.used == STORED, HUNG, "room is taken")
    assert not any(stored.sealed for stored in rank.store.objects.values())
    assert rank.half.take_reports() is None
    # What the caches hold before the step has ended is no state: without the wait the publisher would refuse it.
    rank.compute()
    rank.half.start_publishes([rank.job])
    report = rank.report()
    assert report.failure == "", report.detail
    assert {entry.key for entry in report.objects} == set(rank.store.objects)
    assert all(stored.sealed for stored in rank.store.objects.values())
    assert rank.store.calls["reserve"] == 2, "once"


def test_control_a_step_that_is_said_to_have_ended_too_early(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    rank.half.start_publishes([rank.job])
    assert rank.report().failure in ("null_state", "not_finite")
    assert not rank.store.objects, "its room has been given back"


def test_a_job_that_nobody_prepared(rank: Rank) -> None:
    rank.compute()
    rank.half.start_publishes([rank.job])
    assert rank.report().failure == ""


def test_the_service_hears_of_a_final_link_before_the_engine_takes_the_report(rank: Rank) -> None:
    heard: list[Any] = []
    events.listen(WORKER, lambda *event: heard.append(event))
    try:
        rank.compute()
        rank.half.start_publishes([rank.job])
        wait_until(lambda: bool(heard), HUNG, "the service is told")
        ((name, key, link),) = heard
        assert (name, key, link.link, link.base, link.length) == ("wrote", "r", 0, 0, LENGTH)
        assert link.reports == (rank.report(),)
    finally:
        events.listen(WORKER, None)


@pytest.mark.parametrize("why", ["several ranks", "a checkpoint", "a failure"])
def test_control_what_is_not_all_of_a_publish_is_left_to_the_engine(rank: Rank, why: str) -> None:
    heard: list[Any] = []
    events.listen(WORKER, lambda *event: heard.append(event))
    try:
        rank.half._alone = why != "several ranks"
        rank.job.final = why != "a checkpoint"
        if why != "a failure":
            rank.compute()
        rank.half.start_publishes([rank.job])
        assert bool(rank.report().failure) == (why == "a failure")
        assert heard == []
    finally:
        events.listen(WORKER, None)


def test_a_full_store_is_known_before_the_step_ends(rank: Rank) -> None:
    (segment,) = rank.store.room
    rank.store.room[segment] = 100
    rank.half.prepare_publishes([rank.job])
    assert rank.report().failure == "store_full"
    rank.half.start_publishes([rank.job])
    assert not rank.store.objects
    assert rank.half.take_reports() is None, "one report, whatever happens"


def test_a_step_that_never_ends_leaves_nothing(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    wait_until(lambda: rank.store.calls["reserve"] == 2, HUNG, "room is taken")
    rank.half.close()
    assert not rank.store.objects
