# SPDX-License-Identifier: Apache-2.0
"""The scheduler half over plain requests: what is loaded, when a request may run, and what it publishes afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from statestore.boundary import Epoch
from statestore.connector.events import watch
from statestore.connector.intents import (
    Intents,
    LoadIntent,
    PublishIntent,
)
from statestore.connector.messages import RankReport, RankReports
from tests.unit.statestore.scheduler_probe import LONG, Half, record

# ---- load


def test_a_load_is_offered_made_and_reported_once(half: Half) -> None:
    request = half.load("r", 40)
    assert half.half.matched(request, 0) == (40, True)
    assert half.half.matched(request, 16) == (24, True), "tokens that are here already are offered"
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 24)
    (job,) = half.step().load
    assert (job.key, job.records, job.local_tokens) == ("r", (record(40),), 16)
    assert job.blocks == ([7], [4, 5, 6])
    assert half.step().load == [], "loaded twice"
    assert half.half.matched(request, 0) == (0, False), "offered twice"
    half.loaded("r", 0)
    assert half.events == []
    half.loaded("r", 1)
    assert half.events[0][:3] == ("restored", "r", 24)
    half.end(request)
    assert half.pinned == []


def test_a_chain_is_loaded_up_to_its_last_record(half: Half) -> None:
    chain = (record(16), record(40, base=16, parents=("b16",)))
    request = half.add("r", Intents(LoadIntent(chain)))
    assert half.half.matched(request, 0) == (40, True)
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 40)
    (job,) = half.step().load
    assert job.records == chain


def test_a_load_takes_no_block_past_its_length(half: Half) -> None:
    """vLLM allocates for token N too; its block is not the boundary's."""
    request = half.load("r", 32)
    half.half.allocated(request, ([0, 7, 8], [4, 5, 6]), 32)
    (job,) = half.step().load
    assert job.blocks == ([7], [4, 5])


def test_a_failed_load_is_never_offered_again(half: Half) -> None:
    request = half.load("r", 40)
    half.half.matched(request, 0)
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 40)
    half.step()
    half.loaded("r", 0)
    half.loaded("r", 1, failure="digest")
    assert half.events[0][:3] == ("restored", "r", 0), "tokens of a failed load are counted"
    # vLLM frees the request and schedules it again.
    assert half.half.matched(request, 0) == (0, False)
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 0)
    assert half.step().load == []
    assert len(half.events) == 1


def test_a_prefix_that_is_all_here_needs_no_load(half: Half) -> None:
    request = half.load("r", 32)
    assert half.half.matched(request, 32) == (0, False)
    assert half.half.matched(request, 48) == (0, False), "the local prefix is longer than the boundary"
    half.half.allocated(request, ([0, 7], [4, 5]), 0)
    assert half.step().load == []
    assert half.events == [("restored", "r", 0, [])]


@pytest.mark.parametrize("tokens", [39, 40])
def test_a_boundary_that_leaves_nothing_to_compute_is_refused(half: Half, tokens: int) -> None:
    """vLLM would compute the last token once more, and the recurrent state would hold it twice."""
    request = half.load("r", 40, tokens=tokens)
    assert half.half.matched(request, 0) == (0, False)
    assert half.half.matched(request, 0) == (0, False)
    ((name, _, restored, reports),) = half.events
    assert (name, restored, reports[0].failure) == ("restored", 0, "length")
    fits = half.load("s", 40, tokens=41)
    assert half.half.matched(fits, 0) == (40, True)


def test_an_abort_before_the_load_starts_takes_it_back(half: Half) -> None:
    request, other = half.load("r", 20), half.load("s", 20)
    half.half.allocated(request, ([0, 7], [4, 5]), 20)
    half.half.allocated(other, ([0, 8], [9, 10]), 20)
    half.end(request, RequestStatus.FINISHED_ABORTED)
    assert [job.key for job in half.step().load] == ["s"]


def test_an_abort_while_loading_is_reported_without_tokens(half: Half) -> None:
    request = half.load("r", 20)
    half.half.allocated(request, ([0, 7], [4, 5]), 20)
    half.step()
    half.end(request, RequestStatus.FINISHED_ABORTED)
    half.loaded("r", 0, 1)
    assert half.events[0][:3] == ("restored", "r", 0)


# ---- load, then publish


def _both(half: Half, **intent: Any) -> Any:
    publish = PublishIntent(Epoch(7, 1), 100, base=32, checkpoint_tokens=32, **intent)
    request = half.load("r", 32, publish=publish)
    half.tables["r"] = LONG
    assert half.half.matched(request, 0) == (32, True)
    half.half.allocated(request, ([0, 2], [11, 12]), 32)
    assert len(half.step().load) == 1
    return request


def test_what_was_restored_is_not_published_again(half: Half) -> None:
    request = _both(half)
    half.loaded("r", 0, 1)
    request.num_computed_tokens = 32
    assert [(job.base, job.length) for job in half.steps(request, 64, 100)] == [(32, 64), (64, 100)]
    half.written("r", 0, 1)
    half.written("r", 0, 1, link=1)
    assert half.names == [("restored", "r"), ("written", "r")]
    assert half.outcome.base == 32


def test_after_a_failed_load_everything_is_published(half: Half) -> None:
    request = _both(half)
    half.loaded("r", 0, 1, failure="digest")
    assert [(job.base, job.length) for job in half.steps(request, 32, 64, 100)] == [
        (0, 32),
        (32, 64),
        (64, 100),
    ]
    for link in range(3):
        half.written("r", 0, 1, link=link)
    assert half.outcome.base == 0, "the service would keep parents that could not be read"
    assert half.outcome.complete


def test_a_refused_load_publishes_everything_too(half: Half) -> None:
    publish = PublishIntent(Epoch(7, 1), 100, base=32)
    request = half.load("r", 32, tokens=32, publish=publish)
    half.tables["r"] = LONG
    half.half.matched(request, 0)
    (job,) = half.steps(request, 100)
    assert job.base == 0


def test_a_local_prefix_longer_than_the_boundary_changes_no_base(half: Half) -> None:
    publish = PublishIntent(Epoch(7, 1), 100, base=32, checkpoint_tokens=32)
    request = half.load("r", 32, publish=publish)
    half.tables["r"] = LONG
    assert half.half.matched(request, 80) == (0, False)
    half.half.allocated(request, LONG, 0)
    request.num_computed_tokens = 80
    assert [(job.base, job.length) for job in half.steps(request, 96, 100)] == [(32, 96), (96, 100)]


def test_steps_without_reports_say_nothing(half: Half) -> None:
    half.half.collect(None)
    half.half.collect(RankReports())
    assert half.events == []


def test_reports_of_ranks_are_merged() -> None:
    """vLLM merges the ranks of one step; both lists survive."""
    a, c = ("a", 0), ("a", 1)
    one = RankReports({a: [RankReport(0)]}, {"b": [RankReport(0)]})
    other = RankReports({a: [RankReport(1)], c: [RankReport(1)]}, {"b": [RankReport(1)]})
    merged = one.aggregate(other)
    assert [report.rank for report in merged.publish[a]] == [0, 1]
    assert [report.rank for report in merged.publish[c]] == [1]
    assert [report.rank for report in merged.load["b"]] == [0, 1]
    assert [report.rank for report in one.publish[a]] == [0], "the first rank's own list grew"


@pytest.mark.parametrize(
    ("intent", "named"),
    [
        ({"length": 40, "base": 40}, "base"),
        ({"length": 40, "base": -1}, "base"),
        ({"length": None, "base": -1}, "base"),
        ({"length": 40, "checkpoint_tokens": -1}, "checkpoint_tokens"),
        ({"length": 40, "first_link": -1}, "first_link"),
    ],
)
def test_intents_that_cannot_be_meant(intent: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        PublishIntent(Epoch(7, 1), **intent)
    with pytest.raises(ValueError, match="records"):
        LoadIntent(())


def test_who_looks_on_hears_of_what_kind_a_job_is(half: Half) -> None:
    """A prefill that begins with a checkpoint and publishes the rest: one request, jobs of both kinds."""
    seen: list[tuple[Any, ...]] = []
    watch(half.worker, lambda *event: seen.append(event))
    try:
        request = half.load("r", 40, publish=PublishIntent(Epoch(7, 1), 50, "segment"))
        half.tables["r"] = ([0, 0, 7, 8], [4, 5, 6, 9])
        half.half.matched(request, 0)
        half.half.allocated(request, half.tables["r"], 40)
        assert len(half.step().load) == 1
        half.loaded("r", 0, 1)
        request.num_computed_tokens = 40
        assert len(half.step(r=10).publish) == 1
        half.written("r", 0)
        half.written("r", 1)
    finally:
        watch(half.worker, None)
    told = [(name, kind, [r.rank for r in of] if name == "reported" else of) for name, _, kind, of in seen]
    assert told == [
        ("sent", "load", 2),
        ("reported", "load", [0, 1]),
        ("sent", "publish", 2),
        ("reported", "publish", [0]),
        ("reported", "publish", [1]),
    ]
