# SPDX-License-Identifier: Apache-2.0
"""The scheduler half over plain requests: when a link is taken, from which blocks, and how long they are pinned."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry
from statestore.connector.events import listen
from statestore.connector.intents import (
    MAX_LINKS,
    PARAMS,
    Intents,
    LoadIntent,
    PublishIntent,
    PublishOutcome,
)
from statestore.connector.links import Links
from statestore.connector.messages import RankReport, RankReports
from statestore.connector.pins import Pins
from statestore.connector.scheduler_half import SchedulerHalf

BLOCK = 16
KDA = SimpleNamespace(
    kv_cache_spec=MambaSpec(
        block_size=BLOCK, shapes=((3, 24), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32)
    )
)
MLA = SimpleNamespace(
    kv_cache_spec=MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=6, dtype=torch.bfloat16)
)


class Manager:
    """What the half uses of vLLM's cache manager: block tables, and references to blocks."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.references: Counter[int] = Counter()
        self.block_pool = SimpleNamespace(touch=self._touch, free_blocks=self._free)

    def get_block_ids(self, key: str) -> tuple[list[int], ...]:
        return self.tables[key]

    def get_blocks(self, key: str) -> Any:
        groups = [[SimpleNamespace(block_id=i, is_null=i == 0) for i in table] for table in self.tables[key]]
        return SimpleNamespace(blocks=tuple(groups))

    def _touch(self, blocks: Any) -> None:
        self.references.update(block.block_id for block in blocks)

    def _free(self, blocks: Any) -> None:
        self.references.subtract(block.block_id for block in blocks)

    @property
    def pinned(self) -> list[int]:
        """Blocks with a reference of ours; each must have one only."""
        assert set(self.references.values()) <= {0, 1}, self.references
        return sorted(block for block, count in self.references.items() if count)


class Half:
    """A scheduler half with `world` ranks, its block tables, and what it told the service."""

    def __init__(
        self, world: int = 2, dcp: int = 1, groups: tuple[Any, ...] = (KDA, MLA), speculative: bool = False
    ) -> None:
        self.worker = f"test-{uuid.uuid4().hex}"
        self.events: list[tuple[Any, ...]] = []
        self.manager = Manager()
        self.tables = self.manager.tables
        self.half = SchedulerHalf(self.worker, world, dcp, list(groups), speculative)
        self.half.bind(self.manager)
        listen(self.worker, lambda *event: self.events.append(event))

    def add(self, key: str, intents: Any = None, tokens: int = 1 << 20) -> Any:
        request = SimpleNamespace(
            request_id=key,
            kv_transfer_params=None if intents is None else {PARAMS: intents},
            num_computed_tokens=0,
            num_tokens=tokens,
            num_in_flight_tokens=0,
            all_token_ids=list(range(1000, 1000 + min(tokens, 500))),
            status=RequestStatus.RUNNING,
        )
        self.half.added(request)
        return request

    def load(self, key: str, length: int, tokens: int = 1 << 20, publish: PublishIntent | None = None) -> Any:
        return self.add(key, Intents(LoadIntent((record(length),)), publish), tokens)

    def publish(self, key: str, length: int | None, tables: tuple[list[int], ...], **intent: Any) -> Any:
        self.tables[key] = tables
        return self.add(key, Intents(publish=PublishIntent(Epoch(7, 1), length, "segment", **intent)))

    def step(self, **scheduled: int) -> Any:
        """Metadata of the step that schedules so many tokens."""
        return self.half.build_metadata(scheduled)

    def steps(self, request: Any, *ends: int) -> list[Any]:
        """Steps of one request that end there; the publish jobs that they start."""
        jobs = []
        for end in ends:
            jobs += self.step(**{request.request_id: end - request.num_computed_tokens}).publish
            request.num_computed_tokens = end
        return jobs

    def end(self, request: Any, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> None:
        request.status = status
        self.half.finished(request)

    def written(self, key: str, *ranks: int, link: int = 0, failure: str = "") -> None:
        reports = [RankReport(rank, failure=failure, detail=failure) for rank in ranks]
        self.half.collect(RankReports(publish={(key, link): reports}))

    def loaded(self, key: str, *ranks: int, failure: str = "") -> None:
        self.half.collect(RankReports(load={key: [RankReport(rank, failure=failure) for rank in ranks]}))

    @property
    def pinned(self) -> list[int]:
        return self.manager.pinned

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(event[0], event[1]) for event in self.events]

    @property
    def outcome(self) -> PublishOutcome:
        """Of the last event, which is a publish that is over."""
        name, _, outcome = self.events[-1]
        assert name == "written"
        assert isinstance(outcome, PublishOutcome)
        return outcome


@pytest.fixture
def half() -> Iterator[Half]:
    made = Half()
    yield made
    listen(made.worker, None)


def record(length: int, **changes: Any) -> BoundaryRecord:
    entry = ObjectEntry("k", "kda", 4, ("ab",), 0, length, True)
    values: dict[str, Any] = {
        "id": f"b{length}",
        "model_digest": "ab",
        "prefix_hash": "cd",
        "length": length,
        "epoch": Epoch(7, 1),
        "owner": "p",
        "geometry": "{}",
        "state": "committed",
        "ranks": (RankEntry(0, "written", (entry,)),),
    }
    return BoundaryRecord(**{**values, **changes})


# ---- publish: when, and which blocks


def test_the_job_is_built_in_the_step_that_ends_the_prompt(half: Half) -> None:
    half.publish("r", 40, ([0, 0, 9], [4, 5, 6]), packing_dcp=2, packing_interleave=8)
    (job,) = half.step(r=40).publish
    assert (job.key, job.epoch, job.length, job.segment) == ("r", Epoch(7, 1), 40, "segment")
    assert (job.packing_dcp, job.packing_interleave) == (2, 8)
    assert (job.base, job.link, job.final) == (0, 0, True)
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
    assert half.pinned == [running, *[21, 22, 23, 24][:rows]]


def test_dcp_scales_the_rows_blocks_and_not_the_states() -> None:
    """A block id of MLA stands for block_size tokens on each of the DCP ranks."""
    half = Half(dcp=4)
    half.publish("r", 65, ([11, 12, 13, 14, 15], [21, 22, 23]))
    (job,) = half.step(r=65).publish
    assert job.blocks == ([15], [21, 22])
    assert half.pinned == [15, 21, 22]
    plain = Half(dcp=1)
    plain.publish("r", 65, ([11, 12, 13, 14, 15], [21, 22, 23, 24, 25]))
    (job,) = plain.step(r=65).publish
    assert job.blocks == ([15], [21, 22, 23, 24, 25])


def test_several_groups_of_states() -> None:
    half = Half(groups=(KDA, MLA, KDA))
    half.publish("r", 20, ([0, 5], [6, 7], [0, 8]))
    (job,) = half.step(r=20).publish
    assert job.blocks == ([5], [6, 7], [8])
    assert half.pinned == [5, 6, 7, 8]


def test_a_null_running_state_is_handed_over_to_be_refused(
    half: Half, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes out, so that every rank reports (checks.check_table refuses it) and the pins come back."""
    half.publish("r", 40, ([3, 9, 0], [4, 5, 6]))
    (job,) = half.step(r=40).publish
    assert job.blocks[0] == [0], "another block was taken for the missing one"
    assert "null block" in caplog.text
    assert half.pinned == [4, 5, 6]


def test_requests_without_an_intent_are_left_alone(half: Half) -> None:
    for key, intents in (("plain", None), ("foreign", {"do_remote_prefill": True})):
        request = half.add(key, intents)
        assert half.step(**{key: 100}).publish == []
        assert half.half.matched(request, 0) == (0, False)
        half.half.finished(request)
    assert not half.half.pending
    assert half.events == []


def test_intents_do_not_travel_with_the_request(half: Half) -> None:
    """vLLM pickles a request's sampling parameters, of which these are part, for every rank."""
    request = half.load("r", 40, publish=PublishIntent(Epoch(7, 1), 100, base=40))
    assert request.kv_transfer_params == {}
    assert half.half.matched(request, 0) == (40, True)


# ---- publish: pins


def test_blocks_are_pinned_until_every_rank_has_reported(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    assert half.half.pending
    half.end(request)
    assert half.pinned == [3, 4], "blocks would be freed under the writers"
    half.written("r", 0)
    assert half.half.pending
    assert half.pinned == [3, 4]
    assert half.events == []
    half.written("r", 1)
    assert not half.half.pending, "an idle engine would step for ever"
    assert half.pinned == []
    assert half.names == [("written", "r")]
    outcome = half.outcome
    assert (outcome.complete, outcome.length, outcome.base, outcome.dropped) == (True, 10, 0, ())
    assert [report.rank for report in outcome.links[0].reports] == [0, 1]


def test_a_failed_rank_ends_the_pin_too(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    half.end(request)
    half.written("r", 0)
    half.written("r", 1, failure="store_full")
    assert not half.half.pending
    assert half.pinned == []
    outcome = half.outcome
    assert (outcome.complete, outcome.failure, outcome.links) == (False, "store_full", ())
    assert outcome.detail == "rank 1: store_full"
    assert len(outcome.dropped) == 1


def test_an_abort_after_the_job_went_out_waits_for_the_ranks(half: Half) -> None:
    """Aborted in the same step: the ranks are reading the blocks."""
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    half.end(request, RequestStatus.FINISHED_ABORTED)
    assert half.names == []
    assert half.pinned == [3, 4]
    half.written("r", 0, 1)
    assert half.names == [("written", "r")]
    assert half.pinned == []


def test_reports_before_the_end_leave_nothing_pinned(half: Half) -> None:
    request = half.publish("r", 10, ([3], [4]))
    half.step(r=10)
    half.written("r", 0, 1)
    half.end(request)
    assert half.pinned == []
    assert half.names == [("written", "r")], "told twice"


def test_an_abort_before_the_last_chunk_publishes_nothing(half: Half) -> None:
    request = half.publish("r", 40, ([3, 2, 1], [4, 5, 6]))
    half.step(r=16)
    assert not half.half.pending
    half.end(request, RequestStatus.FINISHED_ABORTED)
    assert half.names == [("publish_failed", "r")]
    request.num_computed_tokens = 16
    assert half.step(r=24).publish == [], "a request that has ended is published"


def test_requests_do_not_end_each_others_pins(half: Half) -> None:
    first, second = half.publish("a", 10, ([3], [4])), half.publish("b", 10, ([5], [6]))
    assert len(half.step(a=10, b=10).publish) == 2
    half.end(first)
    half.end(second)
    half.written("a", 0)
    half.written("b", 1)
    assert half.names == []
    half.written("b", 0)
    assert half.names == [("written", "b")]
    assert half.pinned == [3, 4]


def test_a_manager_that_has_changed_is_refused_at_start() -> None:
    half = Half()
    with pytest.raises(RuntimeError, match=r"no get_blocks, touch; install vLLM 0.32.0 or 0.33.0"):
        half.half.bind(SimpleNamespace(block_pool=SimpleNamespace(free_blocks=print)))


# ---- checkpoints on the way

LONG = (list(range(1, 9)), list(range(11, 19)))


def test_a_step_that_ends_on_a_block_boundary_writes_a_checkpoint(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    jobs = half.steps(request, 32, 64, 100)
    assert [(job.link, job.base, job.length, job.final) for job in jobs] == [
        (0, 0, 32, False),
        (1, 32, 64, False),
        (2, 64, 100, True),
    ]
    assert [job.blocks for job in jobs] == [
        ([2], [11, 12]),
        ([4], [11, 12, 13, 14]),
        ([7], [11, 12, 13, 14, 15, 16, 17]),
    ]
    # A link pins its state and its own rows; the state of a link before it stays pinned by that link.
    assert half.pinned == [2, 4, 7, 11, 12, 13, 14, 15, 16, 17]
    half.end(request)
    for link in (1, 2, 0):
        assert half.events == []
        half.written("r", 0, 1, link=link)
    assert half.pinned == []
    outcome = half.outcome
    assert outcome.complete
    assert outcome.length == 100
    assert [(link.link, link.base, link.length) for link in outcome.links] == [
        (0, 0, 32),
        (1, 32, 64),
        (2, 64, 100),
    ]


@pytest.mark.parametrize(
    ("ends", "links"),
    [
        ((30, 62, 100), [(0, 100)]),  # steps that end inside a block: the state there is overwritten in place
        ((16, 48, 100), [(0, 48), (48, 100)]),  # 16 is too near
        ((16, 31, 32, 100), [(0, 32), (32, 100)]),
        ((96, 100), [(0, 96), (96, 100)]),  # the end of the prompt may be near
        ((48, 64, 79, 96, 100), [(0, 48), (48, 96), (96, 100)]),
        ((100,), [(0, 100)]),
    ],
)
def test_where_checkpoints_are(half: Half, ends: tuple[int, ...], links: list[tuple[int, int]]) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    assert [(job.base, job.length) for job in half.steps(request, *ends)] == links


def test_a_prompt_that_ends_on_a_block_boundary_has_one_link_there(half: Half) -> None:
    request = half.publish("r", 64, LONG, checkpoint_tokens=32)
    jobs = half.steps(request, 32, 64)
    assert [(job.base, job.length, job.final) for job in jobs] == [(0, 32, False), (32, 64, True)]


def test_links_begin_at_the_parent(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32, base=40, first_link=5)
    request.num_computed_tokens = 40
    jobs = half.steps(request, 64, 80, 100)
    assert [(job.link, job.base, job.length) for job in jobs] == [(5, 40, 80), (6, 80, 100)]
    assert half.pinned == [5, 7, 13, 14, 15, 16, 17], "rows below the base are pinned, or a state is not"
    assert jobs[0].blocks[1] == [11, 12, 13, 14, 15], "rows are found by their place in the whole table"


def test_no_checkpoints_without_a_distance(half: Half) -> None:
    request = half.publish("r", 100, LONG)
    assert [job.length for job in half.steps(request, 32, 64, 100)] == [100]


def test_a_long_prompt_spaces_its_checkpoints_wider() -> None:
    half = Half()
    blocks = 64 * 20
    request = half.publish(
        "r", blocks * BLOCK - 1, (list(range(1, blocks + 1)),) * 2, checkpoint_tokens=BLOCK
    )
    half.manager.references.clear()
    jobs = half.steps(request, *range(BLOCK, blocks * BLOCK, BLOCK), blocks * BLOCK - 1)
    assert len(jobs) <= MAX_LINKS
    lengths = [job.length for job in jobs]
    assert lengths[0] == 21 * BLOCK, "1,280 blocks over 62 checkpoints"
    assert lengths[-1] - lengths[-2] < 42 * BLOCK, "the end of the prompt has no checkpoint"


def test_never_more_links_than_a_commit_holds() -> None:
    """Even when every one of them fails, so that the next begins anew."""
    half = Half(world=1)
    request = half.publish("r", 1 << 19, (list(range(1, 9000)),) * 2, checkpoint_tokens=BLOCK)
    jobs = []
    for end in range(BLOCK * 600, BLOCK * 8000, BLOCK * 10):
        for job in half.steps(request, end):
            jobs.append(job)
            half.written("r", 0, link=job.link, failure="store_full")
    assert len(jobs) == MAX_LINKS - 1
    half.tables["r"] = (list(range(1, (1 << 15) + 1)),) * 2
    (final,) = half.steps(request, 1 << 19)
    assert (final.link, final.base, final.final) == (MAX_LINKS - 1, 0, True)


def test_a_state_is_pinned_beyond_the_steps_that_recycle_its_block(half: Half) -> None:
    """Align mode gives a state's block back two steps later: the table no longer names it, the pin still holds it."""
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    half.steps(request, 32)
    half.tables["r"] = ([0, 0, 0, 4, 5], LONG[1])
    half.steps(request, 48, 63)
    assert 2 in half.pinned
    half.written("r", 1)
    assert 2 in half.pinned
    half.written("r", 0)
    assert half.pinned == []
    assert half.events == [], "the service heard before the last link"


def test_an_abort_with_links_out_waits_for_them(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    half.steps(request, 32, 64)
    half.end(request, RequestStatus.FINISHED_ABORTED)
    assert half.half.pending
    half.written("r", 0, 1, link=1)
    assert half.events == []
    assert half.pinned == [2, 11, 12]
    half.written("r", 0, 1, link=0)
    assert half.pinned == []
    outcome = half.outcome
    assert (outcome.complete, outcome.failure, outcome.length) == (False, "aborted", 0)
    assert [link.length for link in outcome.links] == [32, 64], "checkpoints of an aborted request are whole"
    assert half.step(r=10).publish == []


def test_an_abort_with_reported_links_is_told_at_once(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    half.steps(request, 32)
    half.written("r", 0, 1)
    assert half.events == []
    half.end(request, RequestStatus.FINISHED_ABORTED)
    assert half.outcome.failure == "aborted"
    assert len(half.events) == 1


def test_a_link_after_a_failed_one_begins_where_that_began(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    half.steps(request, 32)
    half.written("r", 0, 1)
    half.steps(request, 64)
    half.written("r", 0, link=1)
    half.written("r", 1, link=1, failure="store_full")
    (job,) = half.steps(request, 100)
    assert (job.link, job.base, job.length) == (2, 32, 100)
    half.written("r", 0, 1, link=2)
    outcome = half.outcome
    assert (outcome.complete, outcome.failure) == (True, "")
    assert [(link.link, link.base, link.length) for link in outcome.links] == [(0, 0, 32), (2, 32, 100)]
    assert [link.link for link in outcome.dropped] == [1]


def test_what_rests_on_a_failed_link_is_dropped(half: Half) -> None:
    """The failure is reported after the next links have gone out."""
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    half.steps(request, 32, 64, 100)
    half.written("r", 0, 1, link=2)
    half.written("r", 0, 1, link=0)
    half.written("r", 0, 1, link=1, failure="null_state")
    outcome = half.outcome
    assert not outcome.complete
    assert outcome.failure == "null_state"
    assert [link.link for link in outcome.links] == [0]
    assert [link.link for link in outcome.dropped] == [1, 2]


def test_a_preempted_request_writes_no_link_twice(half: Half) -> None:
    request = half.publish("r", 100, LONG, checkpoint_tokens=32)
    assert len(half.steps(request, 32, 64)) == 2
    request.num_computed_tokens = 0
    half.tables["r"] = ([0, 0, 0, 0, 0, 0, 28], list(range(31, 38)))
    jobs = half.steps(request, 32, 64, 100)
    assert [(job.link, job.base, job.length) for job in jobs] == [(2, 64, 100)]
    assert half.pinned == [2, 4, 11, 12, 13, 14, 28, 35, 36, 37], (
        "the first run's blocks are still being read"
    )


# ---- the end of an answer


def _answered(half: Half, prompt: int, output: int, **intent: Any) -> Any:
    """A request that has just sampled its last token, which is not computed."""
    request = half.publish("r", None, LONG, **intent)
    half.steps(request, *range(prompt, prompt + output))
    return request


def test_the_end_of_an_answer_is_published_with_the_next_step(half: Half) -> None:
    request = _answered(half, 40, 6)
    half.end(request, RequestStatus.FINISHED_STOPPED)
    assert half.events == []
    assert half.half.pending, "an idle engine would never send it"
    assert half.pinned == [3, 11, 12, 13], "the blocks would be freed before the step"
    (job,) = half.step().publish
    assert (job.base, job.length, job.final, job.blocks) == (0, 45, True, ([3], [11, 12, 13]))
    assert half.step().publish == []
    half.written("r", 0, 1)
    assert half.outcome.tokens == list(range(1000, 1045))
    assert half.outcome.length == 45
    assert half.pinned == []


def test_an_answer_rests_on_the_checkpoint_of_its_prompt(half: Half) -> None:
    request = _answered(half, 40, 9, base=32)
    half.end(request)
    (job,) = half.step().publish
    assert (job.base, job.length) == (32, 48)
    assert half.pinned == [3, 13]


@pytest.mark.parametrize(
    ("status", "changes", "speculative", "reason"),
    [
        (RequestStatus.FINISHED_ABORTED, {}, False, "aborted"),
        (RequestStatus.FINISHED_ERROR, {}, False, "aborted"),
        (RequestStatus.FINISHED_STOPPED, {}, True, "speculation"),
        (RequestStatus.FINISHED_STOPPED, {"num_in_flight_tokens": 1}, False, "in flight"),
        (RequestStatus.FINISHED_STOPPED, {"num_computed_tokens": 32}, False, "nothing to publish"),
        (RequestStatus.FINISHED_STOPPED, {"num_computed_tokens": 0}, False, "nothing to publish"),
    ],
)
def test_answers_that_are_not_published(
    status: Any, changes: dict[str, int], speculative: bool, reason: str
) -> None:
    half = Half(speculative=speculative)
    request = _answered(half, 40, 6, base=32)
    vars(request).update(changes)
    half.end(request, status)
    assert half.names == [("publish_failed", "r")]
    assert reason in half.events[0][2]
    assert half.pinned == []
    assert half.step().publish == []


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


# ---- negative controls: each of these mistakes is noticed


def _first_block(self: SchedulerHalf, tables: tuple[list[int], ...], length: int) -> tuple[list[int], ...]:
    return tuple([table[0]] for table in tables)


def _last_block(self: SchedulerHalf, tables: tuple[list[int], ...], length: int) -> tuple[list[int], ...]:
    return tuple([table[-1]] if i == 0 else list(table) for i, table in enumerate(tables))


def _last_state_that_is_not_null(
    self: SchedulerHalf, tables: tuple[list[int], ...], length: int
) -> tuple[list[int], ...]:
    return tuple([[block for block in table if block][-1]] for table in tables)


def _first_report_ends_it(self: SchedulerHalf, reports: Any) -> None:
    self._world_size = 1
    for publish in self._publish.values():
        publish.links._ranks = 1
    _collect(self, reports)


def _failures_do_not_count(self: SchedulerHalf, reports: Any) -> None:
    for of_ranks in (*reports.load.values(), *reports.publish.values()):
        for report in of_ranks:
            report.failure = ""
    _collect(self, reports)


def _always_offered(self: SchedulerHalf, request: Any, local_tokens: int) -> tuple[int, bool]:
    return self._load[request.request_id].intent.length - local_tokens, True


def _at_once(self: SchedulerHalf, scheduled: dict[str, int]) -> Any:
    for key in scheduled:
        if key in self._publish:
            self._publish[key].request.num_computed_tokens = 1 << 20
    return _build(self, scheduled)


def _pins_nothing(self: Pins, name: Any, request_id: str, spans: list[tuple[int, int]]) -> None:
    self._blocks[name] = []


def _pins_rows_only(self: Pins, name: Any, request_id: str, spans: list[tuple[int, int]]) -> None:
    _pin(self, name, request_id, [(1, 0), *spans[1:]])


def _never_unpins(self: Pins, name: Any) -> None:
    self._blocks.pop(name)


def _unpins_all(self: Pins, name: Any) -> None:
    for each in list(self._blocks):
        _unpin(self, each)


def _any_step_end(self: Links, computed: int, block: int) -> Any:
    return _due(self, computed, 1)


def _never_rebased(self: Links) -> None:
    """Keeps the base of the parent that could not be loaded."""


def _everything_counts(self: Links, unreported: bool = False) -> Any:
    return self._sent


_collect, _build, _pin, _unpin, _due = (
    SchedulerHalf.collect,
    SchedulerHalf.build_metadata,
    Pins.pin,
    Pins.unpin,
    Links.due,
)


@pytest.mark.parametrize(
    ("where", "method", "mistake", "scenario"),
    [
        (SchedulerHalf, "_blocks", _first_block, test_the_job_is_built_in_the_step_that_ends_the_prompt),
        (SchedulerHalf, "_blocks", _last_block, test_a_load_takes_no_block_past_its_length),
        (
            SchedulerHalf,
            "collect",
            _first_report_ends_it,
            test_blocks_are_pinned_until_every_rank_has_reported,
        ),
        (SchedulerHalf, "collect", _failures_do_not_count, test_a_failed_load_is_never_offered_again),
        (SchedulerHalf, "collect", _failures_do_not_count, test_what_rests_on_a_failed_link_is_dropped),
        (SchedulerHalf, "collect", _failures_do_not_count, test_after_a_failed_load_everything_is_published),
        (SchedulerHalf, "matched", _always_offered, test_a_failed_load_is_never_offered_again),
        (SchedulerHalf, "build_metadata", _at_once, test_a_chunked_prompt_is_published_after_its_last_chunk),
        (SchedulerHalf, "build_metadata", _at_once, test_an_abort_before_the_last_chunk_publishes_nothing),
        (Pins, "pin", _pins_nothing, test_blocks_are_pinned_until_every_rank_has_reported),
        (Pins, "pin", _pins_nothing, test_an_abort_after_the_job_went_out_waits_for_the_ranks),
        (Pins, "pin", _pins_nothing, test_the_end_of_an_answer_is_published_with_the_next_step),
        (Pins, "pin", _pins_rows_only, test_a_state_is_pinned_beyond_the_steps_that_recycle_its_block),
        (Pins, "unpin", _never_unpins, test_a_failed_rank_ends_the_pin_too),
        (Pins, "unpin", _unpins_all, test_an_abort_with_links_out_waits_for_them),
        (
            Links,
            "due",
            _any_step_end,
            lambda half: test_where_checkpoints_are(half, (30, 62, 100), [(0, 100)]),
        ),
        (Links, "rebase", _never_rebased, test_after_a_failed_load_everything_is_published),
        (Links, "_chain", _everything_counts, test_a_link_after_a_failed_one_begins_where_that_began),
        (Links, "_chain", _everything_counts, test_what_rests_on_a_failed_link_is_dropped),
    ],
)
def test_a_mistake_is_noticed(
    half: Half, where: Any, method: str, mistake: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, method, mistake)
    with pytest.raises(AssertionError):
        scenario(half)


def test_taking_another_block_for_a_null_one_is_noticed(
    half: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerHalf, "_blocks", _last_state_that_is_not_null)
    with pytest.raises(AssertionError, match="another block was taken"):
        test_a_null_running_state_is_handed_over_to_be_refused(half, caplog)
