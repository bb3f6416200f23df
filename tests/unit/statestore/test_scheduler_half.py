# SPDX-License-Identifier: Apache-2.0
"""The scheduler half over plain requests: when a boundary is taken, in which blocks, and how long they are pinned."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry
from statestore.connector.events import listen
from statestore.connector.messages import RankReport, RankReports
from statestore.connector.scheduler_half import PARAMS, LoadIntent, PublishIntent, SchedulerHalf

BLOCK = 16
KDA = SimpleNamespace(
    kv_cache_spec=MambaSpec(
        block_size=BLOCK, shapes=((3, 24), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32)
    )
)
MLA = SimpleNamespace(
    kv_cache_spec=MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=6, dtype=torch.bfloat16)
)


class Half:
    """A scheduler half with `world` ranks, its block tables, and what it told the service."""

    def __init__(self, world: int = 2, dcp: int = 1, groups: tuple[Any, ...] = (KDA, MLA)) -> None:
        self.worker = f"test-{uuid.uuid4().hex}"
        self.events: list[tuple[Any, ...]] = []
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.half = SchedulerHalf(self.worker, world, dcp, list(groups))
        self.half.bind(SimpleNamespace(get_block_ids=lambda key: self.tables[key]))
        listen(self.worker, lambda *event: self.events.append(event))

    def add(self, key: str, intent: Any) -> Any:
        request = SimpleNamespace(
            request_id=key,
            kv_transfer_params=None if intent is None else {PARAMS: intent},
            num_computed_tokens=0,
        )
        self.half.added(request)
        return request

    def publish(
        self, key: str, length: int, tables: tuple[list[int], ...], packing: tuple[int, int] = (1, 1)
    ) -> Any:
        self.tables[key] = tables
        return self.add(key, PublishIntent(Epoch(7, 1), length, "segment", *packing))

    def step(self, **scheduled: int) -> Any:
        """One engine step: metadata of the step, after which the scheduled tokens are computed."""
        return self.half.build_metadata(scheduled)

    def report(self, kind: str, key: str, *ranks: int, failure: str = "") -> None:
        of_ranks = {key: [RankReport(rank, failure=failure) for rank in ranks]}
        self.half.collect(RankReports(**{kind: of_ranks}), set())

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(event[0], event[1]) for event in self.events]


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    yield made
    listen(made.worker, None)


def record(length: int) -> BoundaryRecord:
    entry = ObjectEntry("k", "kda", 4, ("ab",), 0, length, True)
    return BoundaryRecord(
        id="b",
        model_digest="ab",
        prefix_hash="cd",
        length=length,
        epoch=Epoch(7, 1),
        owner="p",
        geometry="{}",
        state="committed",
        ranks=(RankEntry(0, "written", (entry,)),),
    )


# ---- publish: when, and which blocks


def test_the_job_is_built_in_the_step_that_ends_the_prompt(half: Half) -> None:
    half.publish("r", 40, ([0, 0, 9], [4, 5, 6]), (2, 8))
    (job,) = half.step(r=40).publish
    assert (job.key, job.epoch, job.length, job.segment) == ("r", Epoch(7, 1), 40, "segment")
    assert (job.packing_dcp, job.packing_interleave) == (2, 8)
    assert job.blocks == ([9], [4, 5, 6])


def test_a_chunked_prompt_is_published_after_its_last_chunk(half: Half) -> None:
    request = half.publish("r", 40, ([3, 2, 1], [4, 5, 6]))
    assert half.step(r=16).publish == []
    request.num_computed_tokens = 16
    # The step that does not schedule the request takes nothing either.
    assert half.step(other=24).publish == []
    assert half.step(r=23).publish == []
    request.num_computed_tokens = 39
    # The table is read in the step that ends the prompt, not before.
    half.tables["r"] = ([0, 0, 8], [4, 5, 6])
    (job,) = half.step(r=1).publish
    assert job.blocks == ([8], [4, 5, 6])
    request.num_computed_tokens = 40
    assert half.step(r=1).publish == [], "published twice"


def test_a_prompt_that_the_prefix_cache_holds_but_for_a_chunk(half: Half) -> None:
    request = half.publish("r", 40, ([0, 2, 9], [4, 5, 6]))
    request.num_computed_tokens = 32
    assert [job.key for job in half.step(r=8).publish] == ["r"]


@pytest.mark.parametrize(
    ("length", "running", "rows"),
    [(1, 11, 1), (15, 11, 1), (16, 11, 1), (17, 12, 2), (32, 12, 2), (33, 13, 3)],
)
def test_blocks_are_those_of_the_last_token(half: Half, length: int, running: int, rows: int) -> None:
    """KDA: the one at the position of the last computed token; MLA: no block past it (lookahead, another's reuse)."""
    half.publish("r", length, ([11, 12, 13, 14], [21, 22, 23, 24]))
    (job,) = half.step(r=length).publish
    assert job.blocks == ([running], [21, 22, 23, 24][:rows])


def test_dcp_scales_the_rows_blocks_and_not_the_states() -> None:
    """A block id of MLA stands for block_size tokens on each of the DCP ranks."""
    half = Half(dcp=4)
    half.publish("r", 65, ([11, 12, 13, 14, 15], [21, 22, 23]))
    (job,) = half.step(r=65).publish
    assert job.blocks == ([15], [21, 22])
    plain = Half(dcp=1)
    plain.publish("r", 65, ([11, 12, 13, 14, 15], [21, 22, 23, 24, 25]))
    (job,) = plain.step(r=65).publish
    assert job.blocks == ([15], [21, 22, 23, 24, 25])


def test_several_groups_of_states() -> None:
    half = Half(groups=(KDA, MLA, KDA))
    half.publish("r", 20, ([0, 5], [6, 7], [0, 8]))
    (job,) = half.step(r=20).publish
    assert job.blocks == ([5], [6, 7], [8])


def test_a_null_running_state_is_handed_over_to_be_refused(
    half: Half, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes out, so that every rank reports (checks.check_table refuses it) and the pins come back."""
    half.publish("r", 40, ([3, 9, 0], [4, 5, 6]))
    (job,) = half.step(r=40).publish
    assert job.blocks[0] == [0], "another block was taken for the missing one"
    assert "null block" in caplog.text


def test_requests_without_an_intent_are_left_alone(half: Half) -> None:
    request = half.add("plain", None)
    assert half.step(plain=100).publish == []
    assert half.half.matched(request, 0) == (0, False)
    assert half.half.finished(request) is False
    assert not half.half.pending
    assert half.events == []


# ---- publish: pins


def test_blocks_are_pinned_until_every_rank_has_reported(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    assert half.half.pending
    assert half.half.finished(request) is True, "blocks would be freed under the writers"
    half.report("publish", "r", 0)
    assert half.half.pending
    assert half.events == []
    half.report("publish", "r", 1)
    assert not half.half.pending, "an idle engine would step for ever"
    assert half.names == [("written", "r")]
    assert sorted(report.rank for report in half.events[0][2]) == [0, 1]


def test_a_failed_rank_ends_the_pin_too(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    half.half.finished(request)
    half.report("publish", "r", 0)
    half.report("publish", "r", 1, failure="store_full")
    assert not half.half.pending
    assert [report.failure for report in half.events[0][2]] == ["", "store_full"]


def test_an_abort_after_the_job_went_out_waits_for_the_ranks(half: Half) -> None:
    """Aborted in the same step: the ranks are reading the blocks."""
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    assert half.half.finished(request) is True
    assert half.names == []
    half.report("publish", "r", 0, 1)
    assert half.names == [("written", "r")]


def test_reports_before_the_end_leave_nothing_pinned(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    half.report("publish", "r", 0, 1)
    assert half.half.finished(request) is False


def test_an_abort_before_the_last_chunk_publishes_nothing(half: Half) -> None:
    request = half.publish("r", 40, ([3, 2, 1], [4, 5, 6]))
    half.step(r=16)
    assert not half.half.pending
    assert half.half.finished(request) is False
    assert half.names == [("publish_failed", "r")]
    request.num_computed_tokens = 16
    assert half.step(r=24).publish == [], "a request that has ended is published"


def test_requests_do_not_end_each_others_pins(half: Half) -> None:
    first, second = half.publish("a", 10, ([3], [4])), half.publish("b", 10, ([5], [6]))
    assert len(half.step(a=10, b=10).publish) == 2
    assert half.half.finished(first) is True
    assert half.half.finished(second) is True
    half.report("publish", "a", 0)
    half.report("publish", "b", 1)
    assert half.names == []
    half.report("publish", "b", 0)
    assert half.names == [("written", "b")]
    assert half.half.pending


# ---- load


def test_a_load_is_offered_made_and_reported_once(half: Half) -> None:
    request = half.add("r", LoadIntent(record(40)))
    assert half.half.matched(request, 0) == (40, True)
    assert half.half.matched(request, 16) == (24, True), "tokens that are here already are offered"
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 24)
    (job,) = half.step().load
    assert (job.key, job.record, job.local_tokens) == ("r", record(40), 16)
    assert job.blocks == ([7], [4, 5, 6])
    assert half.step().load == [], "loaded twice"
    assert half.half.matched(request, 0) == (0, False), "offered twice"
    half.report("load", "r", 0)
    assert half.events == []
    half.report("load", "r", 1)
    assert half.events[0][:3] == ("restored", "r", 24)
    assert half.half.finished(request) is False


def test_a_load_takes_no_block_past_its_length(half: Half) -> None:
    """vLLM allocates for token N too; its block is not the boundary's."""
    request = half.add("r", LoadIntent(record(32)))
    half.half.allocated(request, ([0, 7, 8], [4, 5, 6]), 32)
    (job,) = half.step().load
    assert job.blocks == ([7], [4, 5])


def test_a_failed_load_is_never_offered_again(half: Half) -> None:
    request = half.add("r", LoadIntent(record(40)))
    half.half.matched(request, 0)
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 40)
    half.step()
    half.report("load", "r", 0)
    half.report("load", "r", 1, failure="digest")
    assert half.events[0][:3] == ("restored", "r", 0), "tokens of a failed load are counted"
    # vLLM frees the request and schedules it again.
    assert half.half.matched(request, 0) == (0, False)
    half.half.allocated(request, ([0, 0, 7], [4, 5, 6]), 0)
    assert half.step().load == []
    assert len(half.events) == 1


def test_a_prefix_that_is_all_here_needs_no_load(half: Half) -> None:
    request = half.add("r", LoadIntent(record(32)))
    assert half.half.matched(request, 32) == (0, False)
    half.half.allocated(request, ([0, 7], [4, 5]), 0)
    assert half.step().load == []
    assert half.events == [("restored", "r", 0, [])]


def test_an_abort_before_the_load_starts_takes_it_back(half: Half) -> None:
    request, other = half.add("r", LoadIntent(record(20))), half.add("s", LoadIntent(record(20)))
    half.half.allocated(request, ([0, 7], [4, 5]), 20)
    half.half.allocated(other, ([0, 8], [9, 10]), 20)
    assert half.half.finished(request) is False
    assert [job.key for job in half.step().load] == ["s"]


def test_an_abort_while_loading_is_reported_without_tokens(half: Half) -> None:
    request = half.add("r", LoadIntent(record(20)))
    half.half.allocated(request, ([0, 7], [4, 5]), 20)
    half.step()
    half.half.finished(request)
    half.report("load", "r", 0, 1)
    assert half.events[0][:3] == ("restored", "r", 0)


def test_steps_without_reports_say_nothing(half: Half) -> None:
    half.half.collect(None, set())
    half.half.collect(RankReports(), set())
    assert half.events == []


def test_reports_of_ranks_are_merged() -> None:
    """vLLM merges the ranks of one step; both lists survive."""
    one = RankReports({"a": [RankReport(0)]}, {"b": [RankReport(0)]})
    other = RankReports({"a": [RankReport(1)], "c": [RankReport(1)]}, {"b": [RankReport(1)]})
    merged = one.aggregate(other)
    assert [report.rank for report in merged.publish["a"]] == [0, 1]
    assert [report.rank for report in merged.publish["c"]] == [1]
    assert [report.rank for report in merged.load["b"]] == [0, 1]
    assert [report.rank for report in one.publish["a"]] == [0], "the first rank's own list grew"


# ---- negative controls: each of these mistakes is noticed


def _first_block(self: SchedulerHalf, tables: tuple[list[int], ...], length: int) -> tuple[list[int], ...]:
    return tuple([table[0]] for table in tables)


def _last_block(self: SchedulerHalf, tables: tuple[list[int], ...], length: int) -> tuple[list[int], ...]:
    return tuple([table[-1]] if i == 0 else list(table) for i, table in enumerate(tables))


def _last_state_that_is_not_null(
    self: SchedulerHalf, tables: tuple[list[int], ...], length: int
) -> tuple[list[int], ...]:
    return tuple([[block for block in table if block][-1]] for table in tables)


def _never_pinned(self: SchedulerHalf, request: Any) -> bool:
    self._publish.pop(request.request_id, None)
    return False


def _first_report_ends_it(self: SchedulerHalf, reports: Any, failed: set[str]) -> None:
    self._world_size = 1
    _collect(self, reports, failed)


def _failures_do_not_count(self: SchedulerHalf, reports: Any, failed: set[str]) -> None:
    for of_ranks in reports.load.values():
        for report in of_ranks:
            report.failure = ""
    _collect(self, reports, failed)


def _always_offered(self: SchedulerHalf, request: Any, local_tokens: int) -> tuple[int, bool]:
    return self._load[request.request_id].intent.record.length - local_tokens, True


def _at_once(self: SchedulerHalf, scheduled: dict[str, int]) -> Any:
    for key in scheduled:
        if key in self._publish:
            self._publish[key].request.num_computed_tokens = 1 << 20
    return _build(self, scheduled)


_collect, _build = SchedulerHalf.collect, SchedulerHalf.build_metadata


@pytest.mark.parametrize(
    ("method", "mistake", "scenario"),
    [
        ("_blocks", _first_block, test_the_job_is_built_in_the_step_that_ends_the_prompt),
        ("_blocks", _last_block, test_a_load_takes_no_block_past_its_length),
        ("finished", _never_pinned, test_blocks_are_pinned_until_every_rank_has_reported),
        ("finished", _never_pinned, test_an_abort_after_the_job_went_out_waits_for_the_ranks),
        ("collect", _first_report_ends_it, test_blocks_are_pinned_until_every_rank_has_reported),
        ("collect", _failures_do_not_count, test_a_failed_load_is_never_offered_again),
        ("matched", _always_offered, test_a_failed_load_is_never_offered_again),
        ("build_metadata", _at_once, test_a_chunked_prompt_is_published_after_its_last_chunk),
        ("build_metadata", _at_once, test_an_abort_before_the_last_chunk_publishes_nothing),
    ],
)
def test_a_mistake_is_noticed(
    half: Half, method: str, mistake: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerHalf, method, mistake)
    with pytest.raises(AssertionError):
        scenario(half)


def test_taking_another_block_for_a_null_one_is_noticed(
    half: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerHalf, "_blocks", _last_state_that_is_not_null)
    with pytest.raises(AssertionError, match="another block was taken"):
        test_a_null_running_state_is_handed_over_to_be_refused(half, caplog)
