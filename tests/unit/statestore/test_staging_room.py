# SPDX-License-Identifier: Apache-2.0
"""A rank's staging memory holds what it writes and what it reads of its longest boundary at once."""

from __future__ import annotations

import dataclasses

import pytest

from statestore.boundary import ObjectEntry
from statestore.connector.worker_half import LEAST_STAGING, MOST_STAGING, staging_bytes
from statestore.geometry import Geometry
from statestore.pool import PoolUnavailable
from statestore.reshard import ObjectPlan, Packing, plan_read, plan_write
from statestore.staging import Staging
from tests.doubles.pool import PoolDouble, Store
from tests.property.reshard_cases import Case, geometry
from tests.property.reshard_worker import record_of

LONGEST = 20_000
ONE = geometry(tp=1, head_k=128, head_v=128, latent_width=576)
LAYOUTS = {
    "tp 1": ONE,
    "tp 4": dataclasses.replace(ONE, tp=4),
    "tp 4 dcp 4": dataclasses.replace(ONE, tp=4, dcp=4, interleave=16),
    "tp 8 dcp 2": dataclasses.replace(ONE, tp=8, dcp=2, interleave=1),
}


def entry(plan: ObjectPlan, rank: int) -> ObjectEntry:
    digests = ("0",) * len(plan.units)
    return ObjectEntry(
        f"{plan.group}/{rank}", plan.group, plan.nbytes, digests, plan.token_lo, plan.token_hi, True
    )


def most(source: Geometry, target: Geometry) -> tuple[int, int]:
    """Bytes of the largest publish of a rank of `target`, and of the largest load from `source`."""
    packing = Packing(target.dcp, target.interleave)
    written = [plan_write(target, rank, LONGEST) for rank in range(target.tp)]
    theirs = [plan_write(source, rank, LONGEST, packing) for rank in range(source.tp)]
    entries = [[entry(plan, rank) for plan in plans] for rank, plans in enumerate(theirs)]
    record = record_of(Case(source, target, LONGEST, packing), entries)
    loads = [plan_read(record, source, target, rank).nbytes for rank in range(target.tp)]
    return max(sum(plan.nbytes for plan in plans) for plans in written), max(loads)


@pytest.mark.parametrize("target", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("source", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_publish_and_a_load_of_the_longest_fit(source: Geometry, target: Geometry) -> None:
    room = staging_bytes(target, LONGEST)
    assert room < MOST_STAGING
    staging = Staging(PoolDouble(Store(), segment_bytes=0), room)
    publish, load = most(source, target)
    for nbytes in (publish, load):
        assert staging.acquire(nbytes, 0.0).offset >= 0, "from the staging memory, not memory of its own"


def test_control_the_same_without_the_rows() -> None:
    """Sized for the states alone, the second of them finds no room."""
    room = staging_bytes(ONE, 1)
    staging = Staging(PoolDouble(Store(), segment_bytes=0), room)
    publish, load = most(ONE, ONE)
    staging.acquire(publish, 0.0)
    with pytest.raises(PoolUnavailable):
        staging.acquire(load, 0.0)


def test_it_is_bounded() -> None:
    assert staging_bytes(geometry(), 100) == LEAST_STAGING
    assert staging_bytes(ONE, 10_000_000) == MOST_STAGING
