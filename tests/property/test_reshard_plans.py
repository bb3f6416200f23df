# SPDX-License-Identifier: Apache-2.0
"""Every head and every row that a rank owns reaches it, and nothing else is moved, between any two geometries."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statestore.geometry import Geometry
from statestore.reshard import (
    CHUNK,
    ROW_DIGEST,
    GeometryMismatch,
    ObjectPlan,
    Packing,
    Piece,
    ReadPlan,
    RecordIncomplete,
    local_index,
    local_length,
    locate,
    owned_tokens,
    owner,
    place,
    plan_read,
    plan_write,
    row_bytes,
    written_tokens,
)
from tests.property.reshard_cases import DCP_SIZES, TP_SIZES, Case, cases, geometry
from tests.property.reshard_reference import World, deal
from tests.property.reshard_worker import check, publish


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_any_case(case: Case) -> None:
    check(case, tally="random, rows of a few bytes")


@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_every_tp_and_dcp(dcp: int) -> None:
    """All writing sizes with all reading sizes that this DCP divides; 48 is the least number of heads for all."""
    small = {"kda_layers": (1,), "mla_layers": (2,), "head_k": 1, "head_v": 2}
    for index, (a, b) in enumerate(itertools.product(TP_SIZES, (b for b in TP_SIZES if b % dcp == 0))):
        heads = 96 if index % 2 else 48
        interleave = (1, 2, 4, 8, 16)[index % 5]
        source = geometry(**small, num_heads=heads, tp=a, block_size=48)
        target = geometry(
            **small, num_heads=heads, tp=b, dcp=dcp, block_size=16, interleave=interleave, num_spec=3
        )
        length = (7, 130, 161, 2600)[index % 4]
        check(
            Case(source, target, length, Packing.for_reader(target)),
            tally="every TP and DCP, rows of a few bytes",
        )


@settings(max_examples=100, deadline=None, database=None)
@given(
    dcp=st.sampled_from(DCP_SIZES),
    interleave=st.integers(1, 16),
    blocks=st.integers(1, 4),
    n=st.integers(0, 400),
)
def test_ownership_formulas(dcp: int, interleave: int, blocks: int, n: int) -> None:
    """owner, local, local_len, slot and their inverse against tokens dealt out one at a time."""
    geom = geometry(tp=8, dcp=dcp, interleave=interleave, block_size=interleave * blocks)
    table = np.random.default_rng(3).permutation(np.arange(1, n // (geom.block_size * dcp) + 2))
    dealt = deal(n, dcp, interleave, geom.block_size)
    tokens = np.arange(n)
    block, row = place(geom, tokens)
    owners, local = owner(tokens, dcp, interleave), local_index(tokens, dcp, interleave)
    assert list(zip(owners, block, row, strict=True)) == dealt
    ids, rows = locate(geom, tokens, table)
    assert list(zip(ids, rows, strict=True)) == [(table[b], r) for _, b, r in dealt]
    for rank in range(dcp):
        mine = [t for t, (who, _, _) in enumerate(dealt) if who == rank]
        assert local_length(n, rank, dcp, interleave) == len(mine)
        assert owned_tokens(0, len(mine), rank, dcp, interleave).tolist() == mine
        assert local[mine].tolist() == list(range(len(mine)))


@settings(max_examples=60, deadline=None, database=None)
@given(a=st.sampled_from(TP_SIZES), length=st.integers(1, 5000))
def test_shares_are_contiguous_balanced_and_aligned(a: int, length: int) -> None:
    shares = [written_tokens(geometry(tp=a), length, rank) for rank in range(a)]
    assert np.concatenate(shares).tolist() == list(range(length))
    filled = [len(share) for share in shares if len(share)]
    assert all(size % 16 == 0 for size in filled[:-1])
    assert max(map(len, shares)) - min(map(len, shares)) <= 32


def test_equal_geometry_reads_whole_objects() -> None:
    geom = geometry(tp=4)
    case = Case(geom, geom, 4000, Packing())
    record, _ = publish(case, World.random(geom, case.length))
    for rank in range(4):
        reads = plan_read(record, geom, geom, rank).reads()
        assert [read.entry.group for read in reads] == ["kda", "mla", "mla", "mla", "mla"]
        assert all(len(read.ranges) == 1 for read in reads)
        # Nobody who reads all rows needs the digests behind them.
        tables = [(read.entry.token_hi - read.entry.token_lo) * ROW_DIGEST for read in reads[1:]]
        assert [read.entry.nbytes - read.ranges[0][2] for read in reads] == [0, *tables]


def test_readers_spread_over_writers() -> None:
    geom = geometry(tp=8)
    record, _ = publish(Case(geom, geom, 800, Packing()), World.random(geom, 800))
    first = [
        next(p.entry.key for p in plan_read(record, geom, geom, rank).pieces if p.tokens is not None)
        for rank in range(8)
    ]
    assert len(set(first)) == 8


def test_dcp_does_not_divide_heads() -> None:
    source, plain, dcp = geometry(tp=2), geometry(tp=8), geometry(tp=8, dcp=8)
    record, _ = publish(Case(source, plain, 9, Packing()), World.random(source, 9))
    for rank in range(8):
        heads = [
            [(p.unit, p.head) for p in plan_read(record, source, target, rank).pieces if p.tokens is None]
            for target in (plain, dcp)
        ]
        assert heads[0] == heads[1]


def test_rank_that_owns_no_token_reads_its_heads_only() -> None:
    source, target = geometry(tp=2), geometry(tp=8, dcp=8, interleave=16)
    record, _ = publish(Case(source, target, 17, Packing.for_reader(target)), World.random(source, 17))
    plans = [plan_read(record, source, target, rank) for rank in range(8)]
    rows = [sum(int(p.wanted.sum()) for p in plan.pieces if p.wanted is not None) for plan in plans]
    assert rows == [16, 1, 0, 0, 0, 0, 0, 0]
    assert all(len([p for p in plan.pieces if p.tokens is None]) == 6 for plan in plans)


def test_packing_saves_the_other_owners_rows() -> None:
    """Interleave 1 under DCP8: one range an object when packed, and when not the digests of all rows beside those
    that are wanted, which lie alone, each eighth one."""
    wide = {"mla_layers": (4, 5, 6, 7), "latent_width": 576}
    source, target = geometry(**wide, tp=4), geometry(**wide, tp=8, dcp=8, interleave=1)
    moved, ranges = {}, {}
    for packing in (Packing.for_reader(target), Packing()):
        record, _ = publish(Case(source, target, 1600, packing), World.random(source, 1600))
        plan = plan_read(record, source, target, 3)
        heads = sum(p.unit.nbytes for p in plan.pieces if p.tokens is None)
        moved[packing.dcp] = (plan.nbytes - heads) / (plan.bytes_needed - heads)
        ranges[packing.dcp] = sum(len(read.ranges) for read in plan.reads() if read.entry.group == "mla")
    assert moved == {8: 1.0, 1: 1 + 8 * ROW_DIGEST / row_bytes(source)}
    # Of four writers; without packing 200 rows, and the tables of 4 units each, one of which follows its last row.
    assert ranges[8] == 4
    assert 200 < ranges[1] <= 200 + 16


def test_a_local_prefix_is_not_read_again() -> None:
    """Only units with rows beyond the prefix, here the last of the second of two writers, and of those the table and
    the rows beyond it where that is less."""
    geom = geometry(tp=1)
    source = geometry(tp=2)
    length = 5 * CHUNK
    record, _ = publish(Case(source, geom, length, Packing()), World.random(source, length))
    plan = plan_read(record, source, geom, 0, local_tokens=length - 5)
    (last,) = [p for p in plan.pieces if p.tokens is not None]
    assert last.unit.count == CHUNK // 2
    assert last.wanted is not None
    assert int(last.wanted.sum()) == 5
    assert last.rows is not None
    assert last.rows.tolist() == list(range(CHUNK // 2 - 5, CHUNK // 2))
    assert last.nbytes == 5 * row_bytes(geom) + ROW_DIGEST * CHUNK // 2
    # Without its table a unit of which most is wanted is less.
    (last,) = [
        p for p in plan_read(record, source, geom, 0, length - CHUNK // 2 + 3).pieces if p.tokens is not None
    ]
    assert last.rows is None
    assert last.nbytes == last.unit.nbytes
    assert not any(p.tokens is not None for p in plan_read(record, source, geom, 0, length).pieces)


@pytest.mark.parametrize("arguments", [{"rank": 8}, {"rank": -1}, {"rank": 0, "local_tokens": 101}])
def test_impossible_reads_are_refused(arguments: dict[str, int]) -> None:
    geom = geometry(tp=8)
    record, _ = publish(Case(geom, geom, 100, Packing()), World.random(geom, 100))
    with pytest.raises(ValueError, match=r"rank -?\d is outside|local_tokens=101"):
        plan_read(record, geom, geom, **arguments)


def test_impossible_writes_are_refused() -> None:
    with pytest.raises(ValueError, match="length 0"):
        plan_write(geometry(tp=1), 0, 0)
    with pytest.raises(ValueError, match="rank 2"):
        plan_write(geometry(tp=2), 2, 5)
    with pytest.raises(ValueError, match="interleave=0"):
        Packing(2, 0)
    assert Packing(1, 64) == Packing()
    with pytest.raises(IndexError, match="block table has 1 blocks"):
        locate(geometry(tp=1), [16], [5])


@pytest.mark.parametrize(
    "changes",
    [{"kv_cache_dtype": "float8_e4m3"}, {"recurrent_dtype": "bfloat16"}, {"latent_width": 4}, {"head_v": 4}],
    ids=lambda changes: next(iter(changes)),
)
def test_geometries_that_do_not_map_are_refused(changes: dict[str, Any]) -> None:
    geom = geometry(tp=2)
    record, _ = publish(Case(geom, geom, 10, Packing()), World.random(geom, 10))
    with pytest.raises(GeometryMismatch, match=next(iter(changes))):
        plan_read(record, geom, dataclasses.replace(geom, **changes), 0)


# ---- records that lie


def _record(case: Case, **changes: Any) -> Any:
    record, _ = publish(case, World.random(case.source, case.length))
    return dataclasses.replace(record, **changes)


CASE = Case(geometry(tp=2), geometry(tp=4, dcp=2, interleave=8), 3000, Packing(2, 8))


def test_record_without_an_object_is_refused() -> None:
    record = _record(CASE)
    kept = dataclasses.replace(record.ranks[1], objects=record.ranks[1].objects[:1])
    with pytest.raises(RecordIncomplete, match="rank 1 has no mla object"):
        plan_read(dataclasses.replace(record, ranks=(record.ranks[0], kept)), CASE.source, CASE.target, 0)


def test_record_of_other_ranks_is_refused() -> None:
    record = _record(CASE)
    with pytest.raises(RecordIncomplete, match="entries of 1 ranks; its geometry says tp=2"):
        plan_read(dataclasses.replace(record, ranks=record.ranks[:1]), CASE.source, CASE.target, 0)


@pytest.mark.parametrize(
    "changes", [{"nbytes": 16}, {"digests": ("ab",)}, {"token_lo": 5}, {"token_hi": 2999}], ids=str
)
def test_record_with_another_layout_is_refused(changes: dict[str, Any]) -> None:
    record = _record(CASE)
    first = record.ranks[1]
    objects = (first.objects[0], dataclasses.replace(first.objects[1], **changes))
    ranks = (record.ranks[0], dataclasses.replace(first, objects=objects))
    with pytest.raises(RecordIncomplete, match="another layout"):
        plan_read(dataclasses.replace(record, ranks=ranks), CASE.source, CASE.target, 0)


@pytest.mark.parametrize("packing", [(1, 1), (4, 8), (2, 4)])
def test_record_with_another_packing_is_refused_or_seen(packing: tuple[int, int]) -> None:
    """Another packing has other units, or at least other rows in them."""

    def lie(plan: ReadPlan) -> ReadPlan:
        record = _record(CASE, packing_dcp=packing[0], packing_interleave=packing[1])
        return plan_read(record, CASE.source, CASE.target, 0)

    check(CASE)
    with pytest.raises((AssertionError, RecordIncomplete)):
        check(CASE, tamper=lie)


# ---- negative controls: the property notices every wrong map


def _kda(plan: ReadPlan, change: Callable[[Piece], Piece]) -> ReadPlan:
    return dataclasses.replace(plan, pieces=tuple(change(p) if p.tokens is None else p for p in plan.pieces))


def _mla(plan: ReadPlan, change: Callable[[Piece], Piece]) -> ReadPlan:
    return dataclasses.replace(plan, pieces=tuple(p if p.tokens is None else change(p) for p in plan.pieces))


def _next_head(plan: ReadPlan) -> ReadPlan:
    return _kda(plan, lambda p: dataclasses.replace(p, head=(p.head + 1) % 12))


def _other_unit(plan: ReadPlan) -> ReadPlan:
    return _kda(
        plan,
        lambda p: dataclasses.replace(
            p, unit=dataclasses.replace(p.unit, offset=abs(p.unit.offset - p.unit.nbytes))
        ),
    )


def _half_a_head_further(plan: ReadPlan) -> ReadPlan:
    return _kda(
        plan,
        lambda p: dataclasses.replace(p, unit=dataclasses.replace(p.unit, offset=p.unit.offset // 2)),
    )


def _lost_piece(plan: ReadPlan) -> ReadPlan:
    return dataclasses.replace(plan, pieces=plan.pieces[:-1])


def _piece_twice(plan: ReadPlan) -> ReadPlan:
    last = plan.pieces[-1]
    again = dataclasses.replace(last, at=last.at + last.unit.nbytes)
    return dataclasses.replace(plan, pieces=(*plan.pieces, again))


def _overlapping_staging(plan: ReadPlan) -> ReadPlan:
    return _mla(plan, lambda p: dataclasses.replace(p, at=p.at - 1))


def _other_rows(plan: ReadPlan) -> ReadPlan:
    return _mla(plan, lambda p: dataclasses.replace(p, tokens=np.roll(p.tokens, 1)))


def _one_row_less(plan: ReadPlan) -> ReadPlan:
    def change(piece: Piece) -> Piece:
        wanted = np.array(piece.wanted)
        wanted[np.flatnonzero(wanted)[0]] = False
        return dataclasses.replace(piece, wanted=wanted)

    return _mla(plan, change)


def _all_rows(plan: ReadPlan) -> ReadPlan:
    return _mla(plan, lambda p: dataclasses.replace(p, wanted=np.ones_like(p.wanted)))


def _neighbours_object(plan: ReadPlan) -> ReadPlan:
    first = next(p for p in plan.pieces if p.tokens is not None)
    second = next(p for p in plan.pieces if p.tokens is not None and p.entry is not first.entry)

    def change(piece: Piece) -> Piece:
        return dataclasses.replace(piece, entry=second.entry if piece.entry is first.entry else piece.entry)

    return _mla(plan, change)


def _shifted_table(plan: ReadPlan) -> ReadPlan:
    return _mla(plan, lambda p: dataclasses.replace(p, table=p.table + ROW_DIGEST))


def _rows_beside(plan: ReadPlan) -> ReadPlan:
    """The rows after those that are wanted, with these ones' tokens."""

    def change(piece: Piece) -> Piece:
        assert piece.rows is not None
        return dataclasses.replace(piece, rows=(piece.rows + 1) % piece.unit.count)

    return _mla(plan, change)


def _miscount(plan: ReadPlan) -> ReadPlan:
    return dataclasses.replace(plan, bytes_needed=plan.bytes_needed - 1)


TAMPERS = [
    _next_head,
    _other_unit,
    _half_a_head_further,
    _lost_piece,
    _piece_twice,
    _overlapping_staging,
    _other_rows,
    _one_row_less,
    _neighbours_object,
    _miscount,
]


@pytest.mark.parametrize(
    ("tamper", "packing"),
    # Packed for the reader, all rows of a unit are wanted.
    [*itertools.product(TAMPERS, [Packing(2, 8), Packing()]), (_all_rows, Packing())],
)
def test_property_notices_a_wrong_map(tamper: Callable[[ReadPlan], ReadPlan], packing: Packing) -> None:
    case = dataclasses.replace(CASE, length=400, packing=packing)
    check(case)
    with pytest.raises(AssertionError):
        check(case, tamper=tamper)


@pytest.mark.parametrize("tamper", [*TAMPERS, _shifted_table, _rows_beside])
def test_property_notices_a_wrong_map_of_some_rows(tamper: Callable[[ReadPlan], ReadPlan]) -> None:
    """Rows that are wide enough to be read one by one, with their unit's table."""
    wide = {"kda_layers": (1,), "latent_width": 64}
    case = Case(geometry(**wide, tp=2), geometry(**wide, tp=4, dcp=2, interleave=8), 400, Packing())
    record, _ = publish(case, World.random(case.source, case.length))
    pieces = plan_read(record, case.source, case.target, 0).pieces
    assert all(p.rows is not None for p in pieces if p.tokens is not None)
    check(case)
    with pytest.raises(AssertionError):
        check(case, tamper=tamper)


@pytest.mark.parametrize(
    "wrong", [{"interleave": 4}, {"dcp": 4}, {"dcp": 1, "interleave": 1}, {"tp": 8}], ids=str
)
def test_property_notices_another_geometry(wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading for another DCP, interleave or TP than the reader has does not pass."""

    def other(record: Any, source: Geometry, target: Geometry, rank: int, local: int) -> ReadPlan:
        return plan_read(record, source, dataclasses.replace(target, **wrong), rank, local)

    check(CASE)
    monkeypatch.setattr("tests.property.reshard_worker.plan_read", other)
    with pytest.raises(AssertionError):
        check(CASE)


def _tokens_of_all(geom: Geometry, rank: int, *where: Any) -> tuple[ObjectPlan, ...]:
    return plan_write(dataclasses.replace(geom, tp=1, dcp=1), 0, *where)


def _rows_rotated(geom: Geometry, rank: int, *where: Any) -> tuple[ObjectPlan, ...]:
    return tuple(
        dataclasses.replace(plan, tokens=np.roll(plan.tokens, 1)) if plan.group == "mla" else plan
        for plan in plan_write(geom, rank, *where)
    )


def _last_unit_lost(geom: Geometry, rank: int, *where: Any) -> tuple[ObjectPlan, ...]:
    return tuple(dataclasses.replace(plan, units=plan.units[:-1]) for plan in plan_write(geom, rank, *where))


def _without_dcp(geom: Geometry, rank: int, *where: Any) -> tuple[ObjectPlan, ...]:
    return plan_write(dataclasses.replace(geom, dcp=1), rank, *where)


@pytest.mark.parametrize("writes", [_tokens_of_all, _rows_rotated, _last_unit_lost, _without_dcp])
def test_property_notices_a_wrong_writer(writes: Callable[..., tuple[ObjectPlan, ...]]) -> None:
    case = dataclasses.replace(CASE, source=geometry(tp=2, dcp=2), length=100)
    check(case)
    with pytest.raises(AssertionError):
        check(case, writes=writes)
