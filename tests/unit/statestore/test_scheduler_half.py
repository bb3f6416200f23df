# SPDX-License-Identifier: Apache-2.0
"""The scheduler half over plain requests: when a link is taken, from which blocks, and how long they are pinned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from statestore.boundary import Epoch
from statestore.connector.intents import (
    MAX_LINKS,
    PublishIntent,
)
from tests.unit.statestore.scheduler_probe import BLOCK, KDA, LONG, MLA, Half

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


def _one_step_ahead(half: Half, prompt: int, output: int, **changes: Any) -> Any:
    """The same where the step of its last token is on the device."""
    request = _answered(half, prompt, output)
    half.steps(request, prompt + output)
    vars(request).update({"num_in_flight_tokens": 1, "num_tokens": prompt + output, **changes})
    return request


@pytest.mark.parametrize(("output", "running"), [(6, 3), (8, 3), (9, 4)])
def test_an_answer_that_stops_with_a_step_ahead_is_published_whole(
    half: Half, output: int, running: int
) -> None:
    """The step's own token is the last one: the state behind it is that of all, in the block of its position."""
    request = _one_step_ahead(half, 40, output)
    half.end(request, RequestStatus.FINISHED_STOPPED)
    assert half.names == []
    assert running in half.pinned
    (job,) = half.step().publish
    assert (job.length, job.final, job.blocks[0]) == (40 + output, True, [LONG[0][running - 1]])
    half.written("r", 0, 1)
    assert half.outcome.tokens == list(range(1000, 1040 + output))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_in_flight_tokens": 2},
        {"num_tokens": 45},
        {"num_tokens": 47},
        {"num_stale_output_tokens": 1},
    ],
)
def test_what_is_in_flight_besides_is_not_published(half: Half, changes: dict[str, int]) -> None:
    """A preempted request's steps, or more than one: the counts are of something else."""
    request = _one_step_ahead(half, 40, 6, **changes)
    half.end(request, RequestStatus.FINISHED_STOPPED)
    assert half.names == [("publish_failed", "r")]
    assert "in flight" in half.events[0][2]
    assert half.pinned == []


@pytest.mark.parametrize(
    ("status", "changes", "speculative", "reason"),
    [
        (RequestStatus.FINISHED_ABORTED, {}, False, "aborted"),
        (RequestStatus.FINISHED_ERROR, {}, False, "aborted"),
        (RequestStatus.FINISHED_STOPPED, {}, True, "speculation"),
        (RequestStatus.FINISHED_STOPPED, {"num_in_flight_tokens": 8}, False, "in flight"),
        (RequestStatus.FINISHED_ABORTED, {"num_in_flight_tokens": 1}, False, "aborted"),
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
