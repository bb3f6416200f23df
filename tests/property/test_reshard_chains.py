# SPDX-License-Identifier: Apache-2.0
"""A chain of boundaries, each of a publisher with a layout of its own, is read like one boundary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statestore.boundary import BoundaryRecord
from statestore.checkpoints.chain import check_chain
from statestore.geometry import Geometry, GeometryError
from statestore.reshard import (
    GeometryMismatch,
    ObjectPlan,
    Packing,
    ReadPlan,
    RecordIncomplete,
    plan_read,
    plan_read_chain,
    plan_write,
    written_tokens,
)
from tests.property.reshard_cases import DCP_SIZES, TP_SIZES, Case, chains, geometry
from tests.property.reshard_reference import owners
from tests.property.reshard_worker import check_links, publish_links


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_any_chain(links: tuple[Case, ...]) -> None:
    check_links(links, tally="chains, rows of a few bytes")


@settings(max_examples=80, deadline=None, database=None)
@given(
    tp=st.sampled_from(TP_SIZES),
    dcp=st.sampled_from(DCP_SIZES),
    interleave=st.sampled_from([1, 2, 4, 8, 16]),
    ends=st.lists(st.integers(1, 3000), min_size=2, max_size=2, unique=True),
)
def test_increments_are_divided_among_the_ranks(tp: int, dcp: int, interleave: int, ends: list[int]) -> None:
    """Every token of [base, length) once, by a rank that holds it, in balanced shares."""
    if tp % dcp:
        dcp = 1
    base, length = sorted(ends)
    geom = geometry(tp=tp, dcp=dcp, interleave=interleave)
    shares = [written_tokens(geom, length, rank, base).tolist() for rank in range(tp)]
    assert sorted(token for share in shares for token in share) == list(range(base, length))
    dealt = owners(length, dcp, interleave)
    for rank, share in enumerate(shares):
        assert set(dealt[share]) <= {rank % dcp}
    for owner in range(dcp):
        sizes = [len(share) for share in shares[owner::dcp]]
        assert max(sizes) - min(sizes) <= 32


LINKS = (
    Case(geometry(tp=2), geometry(tp=4, dcp=2, interleave=8), 160, Packing(2, 8)),
    Case(geometry(tp=3), geometry(tp=4, dcp=2, interleave=8), 277, Packing(), 0, 160, 1),
    Case(geometry(tp=4, dcp=2), geometry(tp=4, dcp=2, interleave=8), 400, Packing(2, 8), 0, 277, 2),
)


def test_this_chain() -> None:
    check_links(LINKS)


def test_state_comes_from_the_last_record_alone() -> None:
    records, _, _ = publish_links(LINKS)
    plan = plan_read_chain(records, LINKS[0].target, 1)
    assert {p.entry.key.split("/")[2] for p in plan.pieces if p.tokens is None} == {str(records[2].epoch)}
    assert {p.entry.key.split("/")[2] for p in plan.pieces if p.tokens is not None} == {
        str(record.epoch) for record in records
    }


@pytest.mark.parametrize("local", [159, 160, 161, 277, 300, 400])
def test_a_local_prefix_leaves_whole_records_out(local: int) -> None:
    links = [dataclasses.replace(link, local_tokens=local) for link in LINKS]
    check_links(links)
    records, _, _ = publish_links(links)
    plans = [plan_read_chain(records, LINKS[0].target, rank, local) for rank in range(4)]
    read = {p.entry.key.split("/")[2] for plan in plans for p in plan.pieces}
    assert read == {str(record.epoch) for record in records if record.length > local or record is records[2]}


def test_a_chain_of_one_is_a_boundary() -> None:
    records, _, _ = publish_links(LINKS[:1])
    case = LINKS[0]
    for rank in range(case.target.tp):
        one = plan_read(records[0], case.source, case.target, rank, 20)
        chain = plan_read_chain(records, case.target, rank, 20)
        assert one.reads() == chain.reads()
        assert one.bytes_needed == chain.bytes_needed


# ---- chains that are none


def _records() -> list[BoundaryRecord]:
    return publish_links(LINKS)[0]


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ([0, 2], "b2: parents"),
        ([1, 2], r"\['b1', 'b2'\] must start at token 0"),
        ([2], r"\['b2'\] must start at token 0"),
        ([1, 0, 2], r"\['b1', 'b0', 'b2'\] must start at token 0"),
        ([0, 1, 1, 2], "b1: parents"),
        ([0, 0], "b0: parents"),
        ([], "must start at token 0"),
    ],
)
def test_ranges_that_do_not_join(chosen: list[int], named: str) -> None:
    records = _records()
    check_chain(records)
    with pytest.raises(RecordIncomplete, match=named):
        plan_read_chain([records[i] for i in chosen], LINKS[0].target, 0)


def test_a_base_that_is_not_where_the_parents_end() -> None:
    records = _records()
    other = dataclasses.replace(records[2], base=276)
    with pytest.raises(RecordIncomplete, match="b2: base: 276 must be the length 277 of b1"):
        plan_read_chain([*records[:2], other], LINKS[0].target, 0)


def test_another_base_than_was_written() -> None:
    """A base that joins but is not what the writer used: the objects then have another layout."""
    shorter = dataclasses.replace(LINKS[1], length=270)
    records, _, _ = publish_links([LINKS[0], shorter, dataclasses.replace(LINKS[2], base=270)])
    check_chain(records)
    lie = dataclasses.replace(_records()[2], base=270)
    with pytest.raises(RecordIncomplete, match="another layout"):
        plan_read_chain([*records[:2], lie], LINKS[0].target, 0)


def test_parents_of_another_chain() -> None:
    records = _records()
    other = dataclasses.replace(records[2], parents=("b0", "c1"))
    with pytest.raises(RecordIncomplete, match="b2: parents"):
        plan_read_chain([*records[:2], other], LINKS[0].target, 0)


def test_a_parent_of_another_model() -> None:
    records = _records()
    other = dataclasses.replace(records[1], model_digest="e" * 32)
    with pytest.raises(RecordIncomplete, match="b1: model_digest"):
        plan_read_chain([records[0], other, records[2]], LINKS[0].target, 0)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_record_whose_geometry_does_not_map(number: int) -> None:
    records = _records()
    other = dataclasses.replace(LINKS[number].source, kv_cache_dtype="float8_e4m3")
    records[number] = dataclasses.replace(records[number], geometry=other.to_json())
    with pytest.raises(GeometryMismatch, match="kv_cache_dtype"):
        plan_read_chain(records, LINKS[0].target, 0, local_tokens=400)
    records[number] = dataclasses.replace(records[number], geometry="{}")
    with pytest.raises(GeometryError):
        plan_read_chain(records, LINKS[0].target, 0)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_record_that_lacks_an_object_or_a_rank(number: int) -> None:
    records = _records()
    first, *others = records[number].ranks
    kept = tuple(entry for entry in first.objects if entry.group != "mla")
    records[number] = dataclasses.replace(
        records[number], ranks=(dataclasses.replace(first, objects=kept), *others)
    )
    with pytest.raises(RecordIncomplete, match=f"b{number}: rank 0 has no mla object"):
        plan_read_chain(records, LINKS[0].target, 0)
    records[number] = dataclasses.replace(records[number], ranks=records[number].ranks[:1])
    with pytest.raises(RecordIncomplete, match=f"b{number} has entries of 1 ranks"):
        plan_read_chain(records, LINKS[0].target, 0)


def test_a_parent_that_may_go_with_its_request() -> None:
    records = _records()
    records[1] = dataclasses.replace(records[1], reusable=False)
    with pytest.raises(RecordIncomplete, match="'b1' must not be a parent"):
        plan_read_chain(records, LINKS[0].target, 0)


def test_impossible_bases() -> None:
    with pytest.raises(ValueError, match="base=7 is outside"):
        plan_write(geometry(tp=1), 0, 7, None, 7)
    with pytest.raises(ValueError, match="base=-1 is outside"):
        plan_write(geometry(tp=1), 0, 7, None, -1)
    with pytest.raises(ValueError, match="local_tokens=401 is outside"):
        plan_read_chain(_records(), LINKS[0].target, 0, 401)


# ---- negative controls: the property notices wrong maps


def _ignores_base(geom: Geometry, rank: int, length: int, packing: Packing, base: int) -> Any:
    return plan_write(geom, rank, length, packing)


def _base_off_by_one(geom: Geometry, rank: int, length: int, packing: Packing, base: int) -> Any:
    return plan_write(geom, rank, length, packing, base and base - 1)


def _one_writer(geom: Geometry, rank: int, length: int, packing: Packing, base: int) -> Any:
    return plan_write(dataclasses.replace(geom, tp=1, dcp=1), 0, length, packing, base)


def _tokens_from_zero(geom: Geometry, rank: int, length: int, packing: Packing, base: int) -> Any:
    """As many rows, of the first tokens instead of the last."""
    return tuple(
        dataclasses.replace(plan, tokens=plan.tokens - base) if plan.group == "mla" else plan
        for plan in plan_write(geom, rank, length, packing, base)
    )


@pytest.mark.parametrize("writes", [_ignores_base, _base_off_by_one, _one_writer, _tokens_from_zero])
def test_property_notices_a_wrong_writer(writes: Callable[..., tuple[ObjectPlan, ...]]) -> None:
    with pytest.raises(AssertionError):
        check_links(LINKS, writes=writes)


def _first_state(records: Sequence[BoundaryRecord], target: Geometry, rank: int, local: int) -> ReadPlan:
    """KDA state of the first record."""
    right = plan_read_chain(records, target, rank, local)
    wrong = plan_read(records[0], Geometry.from_json(records[0].geometry), target, rank)
    states = [p for p in wrong.pieces if p.tokens is None]
    pieces = [states.pop(0) if p.tokens is None else p for p in right.pieces]
    at = np.cumsum([0, *(p.unit.nbytes for p in pieces)]).tolist()
    moved = tuple(dataclasses.replace(p, at=at[i]) for i, p in enumerate(pieces))
    return dataclasses.replace(right, pieces=moved)


def _without(number: int) -> Callable[..., ReadPlan]:
    def plan(records: Sequence[BoundaryRecord], target: Geometry, rank: int, local: int) -> ReadPlan:
        right = plan_read_chain(records, target, rank, local)
        epoch = str(records[number].epoch)
        kept = [p for p in right.pieces if p.tokens is None or p.entry.key.split("/")[2] != epoch]
        at = np.cumsum([0, *(p.unit.nbytes for p in kept)]).tolist()
        moved = tuple(dataclasses.replace(p, at=at[i]) for i, p in enumerate(kept))
        return dataclasses.replace(right, pieces=moved)

    return plan


def _one_packing(records: Sequence[BoundaryRecord], target: Geometry, rank: int, local: int) -> ReadPlan:
    """Every record in the packing of the last."""
    last = records[-1]
    same = [
        dataclasses.replace(record, packing_dcp=last.packing_dcp, packing_interleave=last.packing_interleave)
        for record in records
    ]
    return plan_read_chain(same, target, rank, local)


@pytest.mark.parametrize("plan", [_first_state, _without(0), _without(1), _without(2), _one_packing])
def test_property_notices_a_wrong_reader(
    plan: Callable[..., ReadPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.property.reshard_worker.plan_read_chain", plan)
    with pytest.raises((AssertionError, RecordIncomplete)):
        check_links(LINKS)
