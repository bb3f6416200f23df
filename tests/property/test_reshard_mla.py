# SPDX-License-Identifier: Apache-2.0
"""MLA rows land where dealing tokens out one at a time puts them, between any two layouts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reshard_cases import DCP_SIZES, TP_SIZES, geometry, mla_cases
from reshard_reference import block_table, deal
from reshard_worker import check_mla

from statestore.geometry import Geometry
from statestore.reshard import (
    MlaSourceRead,
    Packing,
    local_index,
    local_length,
    mla_ranges,
    mla_read,
    mla_shard,
    owned_tokens,
    owner,
    place,
    plan_read,
    slots,
)


@settings(max_examples=600, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(mla_cases())
def test_any_case(case: dict[str, Any]) -> None:
    check_mla(**case, tally="MLA random")


@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_every_tp_and_dcp(dcp: int) -> None:
    """All prefill sizes with all decode sizes that this DCP divides; the writer knows its reader."""
    for index, (a, b) in enumerate(itertools.product(TP_SIZES, (b for b in TP_SIZES if b % dcp == 0))):
        interleave = (1, 2, 4, 8, 16)[index % 5]
        src = geometry(tp=a, block_size=48)
        dst = geometry(tp=b, dcp=dcp, block_size=16, interleave=interleave)
        check_mla(
            src,
            dst,
            start=0,
            stop=(7, 130, 161)[index % 3],
            packing=Packing.for_reader(dst),
            cell_rows=32,
            tally="MLA every TP and DCP",
        )


@settings(max_examples=200, deadline=None, database=None)
@given(
    dcp=st.sampled_from(DCP_SIZES),
    interleave=st.integers(1, 16),
    blocks=st.integers(1, 4),
    n=st.integers(0, 400),
)
def test_ownership_formulas(dcp: int, interleave: int, blocks: int, n: int) -> None:
    """owner, local, local_len, slot and their inverse against tokens dealt out one at a time."""
    geom = geometry(tp=8, dcp=dcp, interleave=interleave, block_size=interleave * blocks)
    table = block_table(geom, n, 3)
    dealt = deal(n, dcp, interleave, geom.block_size)
    tokens = np.arange(n)
    block, row = place(geom, tokens)
    owners, local = owner(tokens, dcp, interleave), local_index(tokens, dcp, interleave)
    assert list(zip(owners, block, row, strict=True)) == dealt
    assert slots(geom, tokens, table).tolist() == [table[b] * geom.block_size + r for _, b, r in dealt]
    for rank in range(dcp):
        mine = [t for t, (who, _, _) in enumerate(dealt) if who == rank]
        assert local_length(n, rank, dcp, interleave) == len(mine)
        assert owned_tokens(0, len(mine), rank, dcp, interleave).tolist() == mine
        assert local[mine].tolist() == list(range(len(mine)))


@given(a=st.sampled_from(TP_SIZES), start=st.integers(0, 5000), count=st.integers(0, 5000))
@settings(max_examples=200, deadline=None, database=None)
def test_split_is_contiguous_balanced_and_aligned(a: int, start: int, count: int) -> None:
    shards = [mla_shard(geometry(tp=a), rank, start, start + count).tokens for rank in range(a)]
    assert np.concatenate(shards).tolist() == list(range(start, start + count))
    filled = [len(shard) for shard in shards if len(shard)]
    assert all(size % 16 == 0 for size in filled[:-1])
    assert max(map(len, shards)) - min(map(len, shards)) <= 32


def test_readers_spread_over_writers() -> None:
    src, dst = geometry(tp=8), geometry(tp=8)
    firsts = [mla_read(src, dst, rank, 0, 800)[0].src_rank for rank in range(8)]
    assert firsts == list(range(8))


def test_rank_that_owns_nothing_reads_nothing() -> None:
    src, dst = geometry(tp=2), geometry(tp=8, dcp=8, interleave=16)
    plans = [mla_read(src, dst, rank, 0, 17, Packing.for_reader(dst)) for rank in range(8)]
    assert [sum(len(read.tokens) for read in plan) for plan in plans] == [16, 1, 0, 0, 0, 0, 0, 0]


def test_packing_turns_small_pieces_into_one_run() -> None:
    """Interleave 1 under DCP8: one run a source and layer when packed, one piece a token when not."""
    src, dst = geometry(tp=4), geometry(tp=8, dcp=8, interleave=1)
    packed = mla_read(src, dst, 3, 0, 1600, Packing.for_reader(dst))
    plain = mla_read(src, dst, 3, 0, 1600, cell_rows=None)
    assert [len(read.ranges) for read in packed] == [2] * 4
    assert sum(len(read.ranges) for read in plain) == 2 * 200
    gaps = mla_read(src, dst, 3, 0, 1600, cell_rows=None, max_gap=7)
    assert [len(read.ranges) for read in gaps] == [2] * 4
    assert sum(read.nbytes for read in gaps) > 7 * sum(read.bytes_needed for read in gaps)


def test_whole_plan_counts_its_bytes() -> None:
    src, dst = geometry(tp=3), geometry(tp=8, dcp=4, interleave=4)
    plans = [plan_read(src, dst, rank, 0, 500, Packing.for_reader(dst)) for rank in range(8)]
    assert all(plan.nbytes == plan.bytes_needed for plan in plans)
    # Two replica groups of four DCP ranks each hold every token once.
    assert sum(plan.nbytes for plan in plans) == src.sizes.kda + 2 * 500 * src.sizes.mla_token


@given(st.sets(st.integers(0, 60)), st.integers(0, 6))
def test_ranges_cover_rows(rows: set[int], max_gap: int) -> None:
    runs = mla_ranges(np.array(sorted(rows), dtype=np.int64), max_gap).tolist()
    covered = [row for low, high in runs for row in range(low, high)]
    assert rows <= set(covered)
    assert len(set(covered)) == len(covered)
    assert all(low in rows and high - 1 in rows for low, high in runs)
    assert all(later[0] - earlier[1] > max_gap for earlier, later in itertools.pairwise(runs))


def test_slots_refuses_a_short_table() -> None:
    with pytest.raises(IndexError, match="block table has 1 blocks"):
        slots(geometry(tp=1), [16], [5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"want": (5, 200)}, "wanted tokens"),
        ({"max_gap": -1}, "max_gap"),
        ({"cell_rows": 0}, "cell_rows"),
    ],
)
def test_impossible_reads_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_read(geometry(tp=1), geometry(tp=1), 0, 0, 100, **arguments)


def test_impossible_packings_are_refused() -> None:
    with pytest.raises(ValueError, match="interleave=0"):
        Packing(2, 0)
    with pytest.raises(ValueError, match="exactly dcp and interleave"):
        Packing.from_dict({"dcp": 2})
    assert Packing.from_dict(Packing(4, 16).to_dict()) == Packing(4, 16)
    assert Packing(1, 64) == Packing()


def _next_row(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(read, row=(read.row + 1) % 16)


def _next_staged_row(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(read, staged_row=np.roll(read.staged_row, 1))


def _shifted_run(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(read, runs=read.runs - 1 if read.runs[0, 0] else read.runs + 1)


def _lost_token(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(
        read, staged_row=read.staged_row[1:], block=read.block[1:], row=read.row[1:], tokens=read.tokens[1:]
    )


def _token_twice(read: MlaSourceRead) -> MlaSourceRead:
    columns = {name: getattr(read, name) for name in ("staged_row", "block", "row", "tokens")}
    return dataclasses.replace(read, **{name: np.append(c, c[-1]) for name, c in columns.items()})


def _run_twice(read: MlaSourceRead) -> MlaSourceRead:
    layout = dataclasses.replace(read.layout, rows=read.layout.rows * 2)
    return dataclasses.replace(read, runs=np.concatenate((read.runs, read.runs)), layout=layout)


def _neighbour_source(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(read, src_rank=(read.src_rank + 1) % 2)


def _wrong_cell(read: MlaSourceRead) -> MlaSourceRead:
    return dataclasses.replace(read, cell_index=read.cell_index[::-1])


@pytest.mark.parametrize(
    "tamper",
    [
        _next_row,
        _next_staged_row,
        _shifted_run,
        _lost_token,
        _token_twice,
        _run_twice,
        _neighbour_source,
        _wrong_cell,
    ],
)
def test_property_notices_a_wrong_map(tamper: Callable[[MlaSourceRead], MlaSourceRead]) -> None:
    """Negative controls: the property holds for this case, and fails for every damaged map."""
    src, dst = geometry(tp=2, block_size=32), geometry(tp=4, dcp=2, interleave=8)
    case = {"start": 0, "stop": 128, "packing": Packing(2, 8), "cell_rows": 16}
    check_mla(src, dst, **case)
    with pytest.raises(AssertionError):
        check_mla(src, dst, **case, tamper=tamper)


@pytest.mark.parametrize("wrong", [{"interleave": 4}, {"dcp": 4}, {"block_size": 8}])
def test_property_notices_another_geometry(wrong: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading with another interleave, DCP or block size than the cache has does not pass."""
    src, dst = geometry(tp=2), geometry(tp=4, dcp=2, interleave=8)

    def other(source: Geometry, target: Geometry, *args: Any, **kwargs: Any) -> object:
        return mla_read(source, dataclasses.replace(target, **wrong), *args, **kwargs)

    monkeypatch.setattr("reshard_worker.mla_read", other)
    with pytest.raises((AssertionError, IndexError)):
        check_mla(src, dst, start=0, stop=128, packing=Packing())


@pytest.mark.parametrize("wrong", [Packing(), Packing(2, 4), Packing(4, 8)])
def test_property_notices_a_wrong_packing(wrong: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an object by another packing than it was written with does not pass."""
    src, dst = geometry(tp=2), geometry(tp=4, dcp=2, interleave=8)

    def other(
        source: Geometry, target: Geometry, rank: int, start: int, stop: int, *_: Any, **kwargs: Any
    ) -> object:
        return mla_read(source, target, rank, start, stop, wrong, **kwargs)

    monkeypatch.setattr("reshard_worker.mla_read", other)
    with pytest.raises(AssertionError):
        check_mla(src, dst, start=0, stop=128, packing=Packing(2, 8))


def test_property_notices_a_wrong_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that takes the next row of its cache does not pass."""
    src, dst = geometry(tp=2), geometry(tp=4, dcp=2, interleave=8)

    def other(*args: Any) -> object:
        shard = mla_shard(*args)
        return dataclasses.replace(shard, row=(shard.row + 1) % src.block_size)

    monkeypatch.setattr("reshard_worker.mla_shard", other)
    with pytest.raises(AssertionError, match="MLA rows differ"):
        check_mla(src, dst, start=0, stop=128, packing=Packing(2, 8))
