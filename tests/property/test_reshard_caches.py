# SPDX-License-Identifier: Apache-2.0
"""From the caches of one geometry through the store into the caches of another, compared byte for byte.

The whole of what a rank writes into its memory is compared, not only the state: padding, speculative columns, other
blocks and the null block must keep the pattern (NaN) that they had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry
from statestore.connector.cache_view import CacheView
from statestore.connector.checks import VerificationFailed
from statestore.connector.loading import Loader
from statestore.connector.messages import LoadJob, PublishJob, RankReport
from statestore.connector.publishing import Publisher
from statestore.reshard import Packing, plan_read_chain
from tests.doubles.pool import PoolDouble, Store
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import Case, cases, chains, geometry
from tests.property.reshard_reference import World
from tests.property.reshard_worker import TALLIES, Tally, record_of


def publish(
    case: Case,
    world: World,
    pool: PoolDouble,
    seed: int,
    block_major: bool,
    seen: dict[str, Any] | None = None,
) -> BoundaryRecord:
    """Every writing rank: from caches filled by loops to sealed objects. `seen`: another geometry for the view."""
    g = case.source
    ranks: list[list[ObjectEntry]] = []
    for rank in range(g.tp):
        rank_caches = RankCaches(g, blocks_for(g, case.length), block_major)
        tables = rank_caches.tables(case.length, seed)
        rank_caches.lay_out(world, rank, tables)
        before = rank_caches.memory.copy()
        view = CacheView(rank_caches.caches, rank_caches.config, dataclasses.replace(g, **(seen or {})))
        packing = case.packing
        job = PublishJob(
            "k",
            Epoch(7, 1 + case.link),
            case.length,
            tables,
            "",
            packing.dcp,
            packing.interleave,
            case.base,
            case.link,
        )
        report = RankReport(rank)
        Publisher(view, pool, rank, 5.0).publish(job, report)
        assert (rank_caches.memory == before).all(), "publishing changed the caches"
        ranks.append(report.objects)
    return record_of(case, ranks)


def load(
    case: Case,
    world: World,
    pool: PoolDouble,
    records: Sequence[BoundaryRecord],
    seed: int,
    block_major: bool,
    seen: dict[str, Any] | None = None,
) -> int:
    """Every reading rank: from the objects to its caches, which must be what loops make of the same state."""
    g = case.target
    moved = 0
    for rank in range(g.tp):
        rank_caches = RankCaches(g, blocks_for(g, case.length), block_major, kda_first=False)
        tables = rank_caches.tables(case.length, seed)
        expected = RankCaches(g, blocks_for(g, case.length), block_major, kda_first=False)
        expected.lay_out(world, rank, tables, case.local_tokens)
        view = CacheView(rank_caches.caches, rank_caches.config, dataclasses.replace(g, **(seen or {})))
        report = RankReport(rank)
        Loader(view, pool, rank, 5.0, True, "none").load(
            LoadJob("k", tuple(records), tables, case.local_tokens), report
        )
        assert (rank_caches.memory == expected.memory).all(), "the caches differ"
        moved += report.nbytes
    return moved


def transfer(
    case: Case,
    seed: int = 1,
    block_major: tuple[bool, bool] = (False, True),
    source_seen: dict[str, Any] | None = None,
    target_seen: dict[str, Any] | None = None,
) -> int:
    """Both halves over a store of its own; returns bytes moved."""
    pool = PoolDouble(Store())
    try:
        world = World.random(case.source, case.length, seed)
        record = publish(case, world, pool, seed, block_major[0], source_seen)
        for entry in record.objects():
            raw = pool.store.objects[entry.key].data.tobytes()
            if entry.group == "kda":
                rank = int(entry.key.rsplit("/", 1)[1])
                heads = case.source.num_heads // case.source.tp
                want = b"".join(world.head(head) for head in range(rank * heads, (rank + 1) * heads))
                assert raw == want, "the object differs"
        return load(case, world, pool, [record], seed + 1, block_major[1], target_seen)
    finally:
        pool.close()


def transfer_chain(links: Sequence[Case], seed: int = 1, states: bool = True) -> int:
    """Every link by ranks of its own, each with a state of its own, then the chain into the target's caches.

    `states` False: all links have the last one's state, so that a wrong one would not show.
    """
    pool = PoolDouble(Store())
    try:
        last = links[-1]
        world = World.random(last.source, last.length, seed)
        records = []
        for link in links:
            state = (
                World.random(last.source, 1, seed + 1 + link.link) if states and link is not last else world
            )
            mine = dataclasses.replace(state, rows=world.rows[:, : link.length])
            records.append(publish(link, mine, pool, seed + link.link, bool(link.link % 2)))
        return load(last, world, pool, records, seed + 9, True)
    finally:
        pool.close()


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(longest=150, small_tp=True), st.integers(0, 99))
def test_any_chain_of_caches(links: tuple[Case, ...], seed: int) -> None:
    moved = transfer_chain(links, seed)
    TALLIES.setdefault("whole caches, chains", Tally()).add(links[-1].target.tp, moved, moved)


@settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(longest=150, small_tp=True), st.integers(0, 99), st.tuples(st.booleans(), st.booleans()))
def test_any_caches(case: Case, seed: int, block_major: tuple[bool, bool]) -> None:
    moved = transfer(case, seed, block_major)
    TALLIES.setdefault("whole caches", Tally()).add(case.target.tp, moved, moved)


LAYOUTS = ("SD", "DS")


@pytest.mark.parametrize("source_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize(("tp", "dcp"), [((8, 3), 1), ((3, 8), 8), ((4, 16), 4)])
def test_conv_layouts_and_speculation(
    tp: tuple[int, int], dcp: int, source_layout: Any, target_layout: Any
) -> None:
    """The history columns move, never the speculative ones, whatever the layout; 3 ranks to 8 and back."""
    shared = {"head_k": 2, "head_v": 4, "num_heads": 24 if 3 in tp else 16, "kda_layers": (0,)}
    source = geometry(**shared, tp=tp[0], conv_layout=source_layout, num_spec=2, block_size=48)
    target = geometry(
        **shared, tp=tp[1], dcp=dcp, conv_layout=target_layout, num_spec=3, block_size=16, interleave=4
    )
    transfer(Case(source, target, 100, Packing.for_reader(target)))


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 127, 128, 129])
def test_lengths_at_the_edges(length: int) -> None:
    source = geometry(tp=2, head_v=4)
    target = geometry(tp=2, head_v=4, dcp=2, interleave=16, block_size=64)
    transfer(Case(source, target, length, Packing.for_reader(target)))


# ---- negative controls

CASE = Case(
    geometry(tp=2, head_v=4, num_spec=2),
    geometry(tp=4, head_v=4, dcp=2, interleave=8, num_spec=1, conv_layout="DS"),
    100,
    Packing(2, 8),
)


@pytest.mark.parametrize(
    "seen",
    [{"conv_layout": "DS"}, {"num_spec": 1, "conv_layout": "DS"}, {"conv_width": 3, "num_spec": 3}],
    ids=str,
)
def test_a_writer_that_sees_its_cache_wrongly_is_noticed(seen: dict[str, Any]) -> None:
    transfer(CASE)
    # The checks of the writer may already meet the pattern, which is NaN; else the object is not the reference's.
    with pytest.raises((AssertionError, VerificationFailed), match=r"differs|finite"):
        transfer(CASE, source_seen=seen)


@pytest.mark.parametrize(
    "seen", [{"conv_layout": "SD"}, {"num_spec": 0}, {"interleave": 4}, {"dcp": 1}, {"dcp": 4}], ids=str
)
def test_a_reader_that_sees_its_cache_wrongly_is_noticed(seen: dict[str, Any]) -> None:
    # Without DCP the table is too short for the reader; it says so before it writes.
    error, match = (
        (VerificationFailed, "needs 7 blocks") if seen == {"dcp": 1} else (AssertionError, "caches differ")
    )
    with pytest.raises(error, match=match):
        transfer(CASE, target_seen=seen)


def test_wrong_tables_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """State in the right blocks in the wrong order."""
    world = World.random(CASE.source, CASE.length)
    pool = PoolDouble(Store())
    record = publish(CASE, world, pool, 1, False)
    load(CASE, world, pool, [record], 2, True)
    lay_out = RankCaches.lay_out

    def swapped(self: RankCaches, world: World, rank: int, tables: Any, first_token: int = 0) -> None:
        lay_out(self, world, rank, tuple(table[::-1] for table in tables), first_token)

    monkeypatch.setattr(RankCaches, "lay_out", swapped)
    with pytest.raises(AssertionError, match="caches differ"):
        load(CASE, world, pool, [record], 2, True)
    pool.close()


CHAIN = (
    Case(geometry(tp=2, head_v=4), CASE.target, 48, Packing()),
    dataclasses.replace(CASE, base=48, link=1),
)


def _state_of_the_first(records: Sequence[BoundaryRecord], *where: Any) -> Any:
    right = plan_read_chain(records, *where)
    first = plan_read_chain(records[:1], *where[:2], 0)
    states = {p.head: p for p in first.pieces if p.tokens is None}
    pieces = [dataclasses.replace(states[p.head], at=p.at) if p.tokens is None else p for p in right.pieces]
    return dataclasses.replace(right, pieces=tuple(pieces))


def _rows_of_the_last(records: Sequence[BoundaryRecord], *where: Any) -> Any:
    right = plan_read_chain(records, *where)
    kept = [p for p in right.pieces if p.tokens is None or "/1/mla/" in p.entry.key]
    at = [0]
    for piece in kept:
        at.append(at[-1] + piece.unit.nbytes)
    return dataclasses.replace(
        right, pieces=tuple(dataclasses.replace(p, at=a) for p, a in zip(kept, at, strict=False))
    )


@pytest.mark.parametrize("plan", [_state_of_the_first, _rows_of_the_last])
def test_a_chain_read_wrongly_is_noticed(plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    transfer_chain(CHAIN)
    monkeypatch.setattr("statestore.connector.loading.plan_read_chain", plan)
    with pytest.raises(AssertionError, match="caches differ"):
        transfer_chain(CHAIN)


def test_equal_states_would_hide_a_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why every link of the property has a state of its own."""
    monkeypatch.setattr("statestore.connector.loading.plan_read_chain", _state_of_the_first)
    transfer_chain(CHAIN, states=False)
