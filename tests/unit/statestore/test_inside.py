# SPDX-License-Identifier: Apache-2.0
"""A state that a pass takes on its way becomes a checkpoint: the block that vLLM offers, and none that it does not."""

from __future__ import annotations

import pytest

from statestore.connector.inside import Inside, last_inside
from statestore.connector.intents import MAX_LINKS
from tests.unit.statestore.scheduler_probe import KDA, MLA, Half

TABLE = ([0, 0, 5, 9], [21, 22, 23, 24])
"""Blocks of 16 tokens, a prompt of 60: slot 2 is the checkpoint's, wherever that lies, slot 3 the running state's."""
OFFERS = {"r": [(0, 5, 52)]}


def links(half: Half) -> list[tuple[int, int]]:
    return [(link.base, link.length) for link in half.outcome.links]


def test_one_pass_publishes_the_checkpoint_and_the_boundary(half: Half) -> None:
    request = half.publish("r", 60, TABLE, checkpoint_tokens=16)
    checkpoint, boundary = half.step(OFFERS, r=60).publish
    assert (checkpoint.length, checkpoint.base, checkpoint.link, checkpoint.final) == (52, 0, 0, False)
    assert checkpoint.blocks == ([5], [21, 22, 23, 24])
    assert (boundary.length, boundary.base, boundary.link, boundary.final) == (60, 52, 1, True)
    assert boundary.blocks == ([9], [21, 22, 23, 24])
    request.num_computed_tokens = 60
    assert half.manager.references == {5: 1, 9: 1, 21: 1, 22: 1, 23: 1, 24: 2}
    half.written("r", 0, 1, link=1)
    assert half.manager.references == {5: 1, 9: 0, 21: 1, 22: 1, 23: 1, 24: 1}
    half.written("r", 0, 1, link=0)
    half.end(request)
    assert links(half) == [(0, 52), (52, 60)]
    assert (half.outcome.passes.steps, half.outcome.passes.computed, half.outcome.passes.again) == (1, 60, 0)
    assert half.pinned == []


def test_without_the_offer_there_is_no_checkpoint(half: Half) -> None:
    """Control: the slot's own place says 48 tokens, and the block before the running state holds no such state."""
    half.publish("r", 60, TABLE, checkpoint_tokens=16)
    (boundary,) = half.step({"other": [(0, 5, 52)]}, r=60).publish
    assert (boundary.length, boundary.base) == (60, 0)


@pytest.mark.parametrize(
    "offers",
    [
        [(0, 5, 60)],  # the state that the step ends with
        [(0, 5, 16)],  # the one that it began with
        [(0, 0, 52)],  # the null block
        [(0, 7, 52)],  # a block of nobody's here, which could not be pinned
    ],
)
def test_offers_that_are_no_state_of_this_step(half: Half, offers: list[tuple[int, int, int]]) -> None:
    request = half.publish("r", 60, TABLE, checkpoint_tokens=16, base=0)
    request.num_computed_tokens = 16
    assert [job.length for job in half.step({"r": offers}, r=44).publish] == [60]


def test_every_group_of_states_must_have_it() -> None:
    tables = ([0, 5, 9], [21, 22, 23], [0, 6, 8])
    half = Half(groups=(KDA, MLA, KDA))
    half.publish("r", 40, tables, checkpoint_tokens=16)
    jobs = half.step({"r": [(0, 5, 36), (2, 6, 36)]}, r=40).publish
    assert [job.blocks for job in jobs] == [([5], [21, 22, 23], [6]), ([9], [21, 22, 23], [8])]
    other = Half(groups=(KDA, MLA, KDA))
    other.publish("r", 40, tables, checkpoint_tokens=16)
    jobs = other.step({"r": [(0, 5, 36), (2, 6, 20)]}, r=40).publish
    assert [job.length for job in jobs] == [40], "half a state was published"


def test_the_distance_of_checkpoints_holds(half: Half) -> None:
    half.publish("r", 60, TABLE, checkpoint_tokens=53)
    assert [job.length for job in half.step(OFFERS, r=60).publish] == [60]
    half.publish("s", 60, TABLE)
    assert [job.length for job in half.step({"s": OFFERS["r"]}, s=60).publish] == [60]
    assert MAX_LINKS > 2


def test_the_end_of_an_answer_takes_none(half: Half) -> None:
    half.publish("r", None, TABLE, checkpoint_tokens=16)
    assert half.step(OFFERS, r=60).publish == []


def test_a_rank_that_cannot_write_it_costs_the_boundary_that_rests_on_it(half: Half) -> None:
    request = half.publish("r", 60, TABLE, checkpoint_tokens=16)
    half.step(OFFERS, r=60)
    half.written("r", 0, link=0)
    half.written("r", 1, link=0, failure="store_full")
    half.written("r", 0, 1, link=1)
    half.end(request)
    assert not half.outcome.complete
    assert half.outcome.failure == "store_full"
    assert half.pinned == []


def test_the_last_of_several_is_taken() -> None:
    offers = [(0, 3, 16), (0, 4, 32), (0, 5, 48)]
    assert last_inside(offers, [0], [[3, 4, 5, 6]], 0, 60) == Inside(48, {0: 5})
    assert last_inside(offers, [0], [[3, 4, 5, 6]], 16, 40) == Inside(32, {0: 4})
    assert last_inside([], [0], [[3]], 0, 60) is None
