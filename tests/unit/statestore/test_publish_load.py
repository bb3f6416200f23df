# SPDX-License-Identifier: Apache-2.0
"""Publisher and loader end to end over a pool in memory: every kind of damage is found, by its kind, before a cache is
written.

Layouts of every kind are tests/property's; here are two: TP 2 to TP 4 with DCP 2, and equal ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from statestore.boundary import BoundaryRecord, Epoch, RankEntry
from statestore.connector import store_ahead, writing
from statestore.connector.cache_view import CacheView
from statestore.connector.checks import VerificationFailed
from statestore.connector.loading import Loader
from statestore.connector.messages import LoadJob, PublishJob, RankReport
from statestore.connector.publishing import Publisher
from statestore.connector.worker_half import failure_kind
from statestore.digest import ML64, XXH3, row_digests, unit_digest
from statestore.geometry import Geometry
from statestore.pool import PoolFull, PoolUnavailable
from statestore.reshard import (
    ROW_DIGEST,
    ObjectPlan,
    Packing,
    plan_write,
    row_bytes,
    stored_row_bytes,
)
from tests.doubles.pool import PoolDouble, Store
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import Case, geometry
from tests.property.reshard_reference import World
from tests.property.reshard_worker import record_of

LENGTH = 100
PAIRS = {
    "tp2 to tp4 dcp2": Case(
        geometry(tp=2, head_v=4),
        geometry(tp=4, head_v=4, dcp=2, interleave=8, block_size=32, conv_layout="DS"),
        LENGTH,
        Packing(2, 8),
    ),
    "equal": Case(geometry(tp=2, head_v=4), geometry(tp=2, head_v=4), LENGTH, Packing()),
}


class Handoff:
    """One boundary between two roles, each rank with caches of its own; `case.base` and `case.link` make it a link."""

    def __init__(
        self, case: Case, seed: int = 1, store: Store | None = None, shows_home: bool = False
    ) -> None:
        self.case = case
        self.store = store or Store()
        self.shows_home = shows_home
        self.pool = PoolDouble(self.store, shows_home=shows_home)
        self.world = World.random(case.source, case.length, seed)
        self.epoch = Epoch(7, seed)
        self.writers = [self._caches(case.source) for _ in range(case.source.tp)]
        self.tables = self.writers[0].tables(case.length, seed)
        for rank, caches in enumerate(self.writers):
            caches.lay_out(self.world, rank, self.tables)
        self.record: BoundaryRecord | None = None

    def _caches(self, g: Geometry) -> RankCaches:
        return RankCaches(g, blocks_for(g, self.case.length))

    def publish_rank(
        self, rank: int, tables: tuple[list[int], ...] | None = None, segment: str = "", final: bool = True
    ) -> RankReport:
        caches, packing = self.writers[rank], self.case.packing
        view = CacheView(caches.caches, caches.config, self.case.source)
        job = PublishJob(
            "k",
            self.epoch,
            self.case.length,
            tables or self.tables,
            segment,
            packing.dcp,
            packing.interleave,
            self.case.base,
            self.case.link,
            final,
        )
        report = RankReport(rank)
        try:
            Publisher(view, self.pool, rank, 1.0).publish(job, report)
        finally:
            self.report = report
        return report

    def publish(self) -> BoundaryRecord:
        ranks = [self.publish_rank(rank).objects for rank in range(self.case.source.tp)]
        self.record = dataclasses.replace(record_of(self.case, ranks), epoch=self.epoch)
        return self.record

    def load(self, rank: int, record: BoundaryRecord, verify: bool = True, **changes: Any) -> RankCaches:
        """The reading rank's caches after its load; `failed` tells in which state a failed load left them."""
        target = dataclasses.replace(self.case.target, **changes.pop("target", {}))
        caches = self._caches(target)
        tables = changes.pop("tables", None) or caches.tables(self.case.length, 5)
        view = CacheView(caches.caches, caches.config, target)
        self.before = caches.memory.copy()
        self.loading = caches
        records = (*changes.pop("parents", ()), record)
        Loader(view, self.pool, rank, 1.0, verify, "none").load(
            LoadJob("k", records, tables, changes.pop("local", 0)),
            RankReport(rank),
            changes.pop("free", lambda: None),
        )
        return caches

    def is_exact(self, rank: int, caches: RankCaches) -> bool:
        expected = self._caches(self.case.target)
        expected.lay_out(self.world, rank, expected.tables(self.case.length, 5))
        return bool((caches.memory == expected.memory).all())

    def damage(self, group: str, change: Callable[[np.ndarray], np.ndarray], rank: int = 0) -> None:
        """Replace the bytes of one stored object."""
        (key,) = [key for key in self.store.objects if key.endswith(f"{self.epoch}/0/{group}/{rank}")]
        stored = self.store.objects[key]
        stored.data = change(stored.data.copy())

    def outcome(self, rank: int, record: BoundaryRecord, **changes: Any) -> str:
        """ "exact", "wrong", or the kind of failure of a load that has left the caches alone."""
        try:
            return "exact" if self.is_exact(rank, self.load(rank, record, **changes)) else "wrong"
        except Exception as error:
            untouched = (self.loading.memory == self.before).all()
            return failure_kind(error) if untouched else "written before it failed"

    def refused(self, kind: str, **arguments: Any) -> str:
        """Rank 0 refuses the load for this reason, and its caches are as they were; returns the words."""
        assert self.record is not None
        record = arguments.pop("record", self.record)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the kind says which
            self.load(0, record, **arguments)
        assert failure_kind(caught.value) == kind, caught.value
        assert (self.loading.memory == self.before).all(), "a failed load has written into the caches"
        return str(caught.value)


@pytest.fixture(autouse=True, params=["one thread", "threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on two cores, and as where there are more: pieces of an object are gathered and written beside each other."""
    many = request.param == "threads"
    monkeypatch.setattr(writing, "LANES", 4 if many else 1)
    monkeypatch.setattr(store_ahead, "WRITERS", 3 if many else 1)
    if many:
        monkeypatch.setattr(writing, "PUT_PIECE", 500)
        monkeypatch.setattr(writing, "DEVICE_PIECE", 1100)
        monkeypatch.setattr(writing, "HEADS_AT_ONCE", 1)
        monkeypatch.setattr(store_ahead, "PUT_PIECE", 500)


@pytest.fixture(params=[(name, home) for name in sorted(PAIRS) for home in (False, True)], ids=str)
def handoff(request: pytest.FixtureRequest) -> Handoff:
    """Read through the pool, and from the reader's own segment."""
    name, home = request.param
    return Handoff(PAIRS[name], shows_home=home)


def test_every_rank_restores_its_share(handoff: Handoff) -> None:
    record = handoff.publish()
    for rank in range(handoff.case.target.tp):
        assert handoff.is_exact(rank, handoff.load(rank, record))
    # Control: the comparison sees one wrong bit.
    caches = handoff.load(0, record)
    caches.memory[np.flatnonzero(caches.memory != handoff.before)[0]] ^= 1
    assert not handoff.is_exact(0, caches)


def test_nothing_is_written_before_the_blocks_are_free(handoff: Handoff) -> None:
    """A device may still use them for whoever had them before."""
    record = handoff.publish()
    untouched: list[bool] = []
    caches = handoff.load(
        0, record, free=lambda: untouched.append(bool((handoff.loading.memory == handoff.before).all()))
    )
    assert untouched == [True]
    assert not (caches.memory == handoff.before).all(), "the control: the load does write"


def test_reports_name_what_was_written(handoff: Handoff) -> None:
    record = handoff.publish()
    state = handoff.case.source.sizes.boundary(LENGTH)
    assert sum(entry.nbytes for entry in record.objects()) == state + LENGTH * ROW_DIGEST
    for entry in record.objects():
        stored = handoff.store.objects[entry.key]
        assert stored.sealed
        assert (entry.nbytes, entry.segment) == (stored.data.nbytes, stored.segment)
    keys = [entry.key for entry in record.objects()]
    assert len(set(keys)) == len(keys) == len(handoff.store.objects)


# ---- damage in the store


@pytest.mark.parametrize("group", ["kda", "mla"])
@pytest.mark.parametrize("at", [0, 300, -1])
def test_a_flipped_bit(handoff: Handoff, group: str, at: int) -> None:
    """Every rank that reads the bit refuses, and the others are right; somebody reads it."""
    record = handoff.publish()

    def flip(data: np.ndarray) -> np.ndarray:
        # Behind the rows lies their table, which nobody reads here: everybody wants whole units.
        g = handoff.case.source
        end = len(data) * row_bytes(g) // stored_row_bytes(g) if group == "mla" else len(data)
        state = data[:end]
        state[at] ^= 0x10
        return data

    handoff.damage(group, flip)
    outcomes = [handoff.outcome(rank, record) for rank in range(handoff.case.target.tp)]
    assert set(outcomes) <= {"exact", "digest"}
    assert "digest" in outcomes


def test_damage_passes_without_verification(handoff: Handoff) -> None:
    """Control: it is the checks that find it."""
    record = handoff.publish()

    def flip(data: np.ndarray) -> np.ndarray:
        data[0] ^= 0x10
        return data

    handoff.damage("kda", flip)
    assert not handoff.is_exact(0, handoff.load(0, record, verify=False))


@pytest.mark.parametrize("group", ["kda", "mla"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.2])
def test_a_truncated_object(handoff: Handoff, group: str, kept: float) -> None:
    handoff.publish()
    handoff.damage(group, lambda data: data[: int(len(data) * kept)])
    assert "bytes are stored" in handoff.refused("size")


def test_an_object_that_grew(handoff: Handoff) -> None:
    """A whole read and one at home notice another size; a read of ranges needs its units only, and checks them."""
    record = handoff.publish()
    handoff.damage("kda", lambda data: np.concatenate((data, data)))
    if handoff.shows_home or handoff.case.source.tp == handoff.case.target.tp:
        handoff.refused("size")
    else:
        assert handoff.is_exact(0, handoff.load(0, record))


@pytest.mark.parametrize("group", ["kda", "mla"])
def test_another_requests_bytes_under_the_key(handoff: Handoff, group: str) -> None:
    """What a store may hand out after a forced removal: right size, right digests of its own, another request's."""
    handoff.publish()
    other = Handoff(handoff.case, seed=2, store=handoff.store)
    other.publish()
    (theirs,) = [key for key in handoff.store.objects if key.endswith(f"{other.epoch}/0/{group}/0")]
    foreign = handoff.store.objects[theirs].data
    handoff.damage(group, lambda data: foreign.copy())
    handoff.refused("digest")


def test_a_swapped_rank(handoff: Handoff) -> None:
    handoff.publish()
    (theirs,) = [key for key in handoff.store.objects if key.endswith("kda/1")]
    foreign = handoff.store.objects[theirs].data
    handoff.damage("kda", lambda data: foreign.copy())
    handoff.refused("digest")


@pytest.mark.parametrize("group", ["kda", "mla"])
def test_a_missing_object(handoff: Handoff, group: str) -> None:
    handoff.publish()
    (key,) = [key for key in handoff.store.objects if key.endswith(f"{group}/0")]
    del handoff.store.objects[key]
    handoff.refused("missing")


def test_a_store_that_is_away(handoff: Handoff) -> None:
    handoff.publish()
    handoff.store.away = True
    handoff.refused("store_unavailable")


# ---- state that was never state: the digest is right, the bytes are not


def _republish(handoff: Handoff, group: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """What a writer without checks would have published: changed bytes with the digests of what they are now."""
    record = handoff.publish()
    handoff.damage(group, change)
    entries = []
    for entry, plan in zip(
        record.ranks[0].objects, plan_write(handoff.case.source, 0, LENGTH, handoff.case.packing), strict=True
    ):
        data = handoff.store.objects[entry.key].data
        entries.append(dataclasses.replace(entry, digests=_take_anew(plan, data)))
    rank = RankEntry(0, "written", tuple(entries))
    handoff.record = dataclasses.replace(record, ranks=(rank, *record.ranks[1:]))


def _take_anew(plan: ObjectPlan, data: np.ndarray, algorithm: str = XXH3) -> tuple[str, ...]:
    """The digests of an object, whose table is written."""
    if plan.group == "kda":
        return tuple(unit_digest(data[u.offset : u.offset + u.nbytes], algorithm) for u in plan.units)
    rows = data[: plan.payload].reshape(-1, plan.payload // len(plan.tokens))
    data[plan.payload :] = row_digests(rows, algorithm).reshape(-1)
    return tuple(unit_digest(data[plan.table_of(unit)], algorithm) for unit in plan.units)


def _zero(data: np.ndarray) -> np.ndarray:
    data[:] = 0
    return data


def _all_ones(data: np.ndarray) -> np.ndarray:
    data[:4] = 0xFF
    return data


@pytest.mark.parametrize(
    ("group", "change", "kind"),
    [("kda", _zero, "null_state"), ("kda", _all_ones, "not_finite"), ("mla", _zero, "null_state")],
)
def test_null_or_not_finite_state_with_a_right_digest(
    handoff: Handoff, group: str, change: Callable[[np.ndarray], np.ndarray], kind: str
) -> None:
    control = Handoff(handoff.case)
    _republish(control, group, lambda data: data)
    assert control.record is not None
    assert control.is_exact(0, control.load(0, control.record)), "the record itself is refused"
    _republish(handoff, group, change)
    handoff.refused(kind)


# ---- the digest's algorithm


def _digests(handoff: Handoff, algorithm: str) -> BoundaryRecord:
    """The record with digests of that algorithm in all ranks' entries."""
    record = handoff.publish()
    ranks = []
    for rank, entry_of in enumerate(record.ranks):
        entries = []
        plans = plan_write(handoff.case.source, rank, LENGTH, handoff.case.packing)
        for entry, plan in zip(entry_of.objects, plans, strict=True):
            data = handoff.store.objects[entry.key].data
            digests = _take_anew(plan, data, algorithm)
            entries.append(dataclasses.replace(entry, digests=digests, digest=algorithm))
        ranks.append(RankEntry(rank, "written", tuple(entries)))
    handoff.record = dataclasses.replace(record, ranks=tuple(ranks))
    return handoff.record


def test_a_host_reads_what_a_gpu_took_digests_of(handoff: Handoff) -> None:
    record = _digests(handoff, ML64)
    for rank in range(handoff.case.target.tp):
        assert handoff.is_exact(rank, handoff.load(rank, record))
    handoff.damage("kda", _all_ones)
    assert "the record says" in handoff.refused("digest")


def test_an_algorithm_that_is_not_known_is_refused_by_name(handoff: Handoff) -> None:
    record = handoff.publish()
    entries = tuple(dataclasses.replace(entry, digest="crc-9000") for entry in record.ranks[0].objects)
    changed = dataclasses.replace(record, ranks=(RankEntry(0, "written", entries), *record.ranks[1:]))
    words = handoff.refused("digest", record=changed)
    assert "'crc-9000' is unknown" in words
    assert "xxh3-128, ml64" in words
    # Control: the same record with its own name is read.
    assert handoff.is_exact(0, handoff.load(0, record))


def test_digests_of_one_algorithm_under_the_other_s_name_are_refused(handoff: Handoff) -> None:
    record = handoff.publish()
    entries = tuple(dataclasses.replace(entry, digest=ML64) for entry in record.ranks[0].objects)
    changed = dataclasses.replace(record, ranks=(RankEntry(0, "written", entries), *record.ranks[1:]))
    handoff.refused("digest", record=changed)


# ---- records that do not fit


def test_a_record_of_another_state_dtype(handoff: Handoff) -> None:
    handoff.publish()
    words = handoff.refused("geometry", target={"recurrent_dtype": "bfloat16"})
    assert "recurrent_dtype" in words
    assert "mamba_ssm_cache_dtype" in words, "the remedy is missing"


def test_a_record_of_another_model(handoff: Handoff) -> None:
    record = handoff.publish()
    other = dataclasses.replace(handoff.case.source, model_digest="e" * 32)
    assert "model_digest" in handoff.refused(
        "geometry", record=dataclasses.replace(record, geometry=other.to_json())
    )


@pytest.mark.parametrize(
    "changes",
    [{"geometry": "{}"}, {"geometry": "no JSON"}, {"length": LENGTH + 1}, {"packing_dcp": 4}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_record_that_lies(handoff: Handoff, changes: dict[str, Any]) -> None:
    record = handoff.publish()
    handoff.refused("record", record=dataclasses.replace(record, **changes))


def test_a_record_of_another_tp_size(handoff: Handoff) -> None:
    record = handoff.publish()
    other = dataclasses.replace(handoff.case.source, tp=4)
    handoff.refused("record", record=dataclasses.replace(record, geometry=other.to_json()))


# ---- blocks


@pytest.mark.parametrize("group", [0, -1])
def test_the_null_block_is_never_loaded_into(handoff: Handoff, group: int) -> None:
    handoff.publish()
    caches = handoff._caches(handoff.case.target)
    tables = [list(table) for table in caches.tables(LENGTH, 5)]
    tables[group][-1] = 0
    handoff.refused("null_block", tables=tuple(tables))


def test_a_table_that_is_too_short_is_refused_before_a_write(handoff: Handoff) -> None:
    handoff.publish()
    caches = handoff._caches(handoff.case.target)
    tables = [list(table) for table in caches.tables(LENGTH, 5)]
    handoff.refused("block_table", tables=(*tables[:-1], tables[-1][:-1]))
    handoff.refused("block_table", tables=(*tables[:-1], [*tables[-1][:-1], caches.blocks]))


@pytest.mark.parametrize("group", [0, -1])
def test_the_null_block_is_never_published(handoff: Handoff, group: int) -> None:
    tables = [list(table) for table in handoff.tables]
    tables[group][0] = 0
    with pytest.raises(VerificationFailed, match="null block") as caught:
        handoff.publish_rank(0, tuple(tables))
    assert caught.value.kind == "null_block"
    assert handoff.store.objects == {}


@pytest.mark.parametrize(
    ("name", "byte", "kind"),
    [
        ("kda", 0x00, "null_state"),
        ("kda", 0xFF, "not_finite"),
        ("attn", 0x00, "null_state"),
        ("attn", 0xFF, "not_finite"),
    ],
)
def test_a_cleared_block_is_never_published(handoff: Handoff, name: str, byte: int, kind: str) -> None:
    """A recycled, cleared or poisoned block in one layer; what the rank had written before is removed again."""
    caches = handoff.writers[0]
    layer = next(key for key in caches.caches if key.endswith(name))
    group = next(n for n, g in enumerate(caches.config.kv_cache_groups) if layer in g.layer_names)
    pages = caches.memory.reshape(caches.slots, caches.blocks, caches.page)
    slot = caches.config.kv_cache_groups[group].layer_names.index(layer)
    pages[slot, handoff.tables[group][0]] = byte
    with pytest.raises(VerificationFailed) as caught:
        handoff.publish_rank(0)
    assert caught.value.kind == kind
    assert handoff.store.objects == {}, "a half-published boundary stays in the store"
    assert handoff.report.objects == []


def test_a_full_store_keeps_nothing(handoff: Handoff) -> None:
    """Room for the first object only."""
    (segment,) = handoff.store.room
    handoff.store.room[segment] = handoff.case.source.sizes.kda_rank + 10
    with pytest.raises(PoolFull) as caught:
        handoff.publish_rank(0)
    assert failure_kind(caught.value) == "store_full"
    assert handoff.store.objects == {}
    assert handoff.report.objects == []


def test_publishing_twice_under_one_epoch_is_refused(handoff: Handoff) -> None:
    """A poisoned or repeated write never replaces, and never passes as done, what is there."""
    record = handoff.publish()
    with pytest.raises(Exception, match="exists"):
        handoff.publish_rank(0)
    assert handoff.is_exact(0, handoff.load(0, record)), "the refused writer removed the first one's objects"


# ---- a prefix that is here already


def test_a_local_prefix_is_left_as_it_is(handoff: Handoff) -> None:
    record = handoff.publish()
    caches = handoff.load(0, record, local=64)
    expected = handoff._caches(handoff.case.target)
    expected.lay_out(handoff.world, 0, expected.tables(LENGTH, 5), first_token=64)
    assert (caches.memory == expected.memory).all()
    assert not handoff.is_exact(0, caches)


# ---- links


class Chain:
    """Two links of one sequence, by publishers of different layouts, into one store."""

    def __init__(self, pair: str) -> None:
        whole = PAIRS[pair]
        first = dataclasses.replace(whole, source=geometry(tp=3, head_v=4), length=48)
        last = dataclasses.replace(whole, base=48, link=1)
        self.last = Handoff(last)
        self.first = Handoff(first, seed=2, store=self.last.store)
        # The rows are those of one sequence; the states are of different lengths.
        self.first.world = dataclasses.replace(self.first.world, rows=self.last.world.rows[:, :48])
        for rank, caches in enumerate(self.first.writers):
            caches.lay_out(self.first.world, rank, self.first.tables)
        self.parent = self.first.publish()
        self.record = self.last.publish()

    def outcome(self, rank: int, *parents: BoundaryRecord, record: BoundaryRecord | None = None) -> str:
        return self.last.outcome(rank, record or self.record, parents=parents)


@pytest.fixture(params=sorted(PAIRS))
def chain(request: pytest.FixtureRequest) -> Chain:
    return Chain(request.param)


def test_a_chain_restores_every_rank(chain: Chain) -> None:
    for rank in range(chain.last.case.target.tp):
        assert chain.outcome(rank, chain.parent) == "exact"


def test_a_link_has_its_own_rows_only(chain: Chain) -> None:
    row = stored_row_bytes(chain.last.case.source)
    rows = {
        record.link: sum(e.nbytes for e in record.objects() if e.group == "mla")
        for record in (chain.parent, chain.record)
    }
    assert rows == {0: 48 * row, 1: (LENGTH - 48) * row}
    lows = [e.token_lo for e in chain.record.objects() if e.group == "mla"]
    assert min(lows) == 48


@pytest.mark.parametrize("group", ["kda", "mla"])
def test_damage_in_a_parent(chain: Chain, group: str) -> None:
    """Its rows are checked like those of the boundary itself; its state is not read."""

    def flip(data: np.ndarray) -> np.ndarray:
        data[0] ^= 0x10
        return data

    chain.first.damage(group, flip, rank=2)
    outcomes = {chain.outcome(rank, chain.parent) for rank in range(chain.last.case.target.tp)}
    assert (
        outcomes == {"exact"} if group == "kda" else outcomes <= {"exact", "digest"} and "digest" in outcomes
    )


def test_a_parent_that_was_evicted(chain: Chain) -> None:
    chain.last.pool.remove([entry.key for entry in chain.parent.objects()])
    assert chain.outcome(0, chain.parent) == "missing"


def test_chains_that_do_not_join(chain: Chain) -> None:
    assert chain.outcome(0) == "record"
    assert chain.outcome(0, chain.parent, chain.parent) == "record"
    gap = dataclasses.replace(chain.record, parents=("another",))
    assert chain.outcome(0, chain.parent, record=gap) == "record"


def test_the_epoch_of_every_record_is_checked(chain: Chain) -> None:
    stale = dataclasses.replace(chain.parent, epoch=Epoch(7, 99))
    assert chain.outcome(0, stale) == "epoch"
    other_link = dataclasses.replace(chain.record, link=2)
    assert chain.outcome(0, chain.parent, record=other_link) == "epoch"


def test_a_parent_of_another_geometry(chain: Chain) -> None:
    other = dataclasses.replace(geometry(tp=3, head_v=4), kv_cache_dtype="float8_e4m3")
    assert chain.outcome(0, dataclasses.replace(chain.parent, geometry=other.to_json())) == "geometry"


def test_where_a_checkpoint_goes() -> None:
    """Its rows to who reads them now; its state, which nobody reads yet, stays with the writer. A final link: all."""
    store = Store()
    writer, reader = PoolDouble(store), PoolDouble(store).segment_name
    for link, final, state in ((0, False, writer.segment_name), (1, True, reader)):
        handoff = Handoff(dataclasses.replace(PAIRS["equal"], link=link), store=store)
        handoff.pool = writer
        report = handoff.publish_rank(1, segment=reader, final=final)
        assert {entry.group: entry.segment for entry in report.objects} == {"kda": state, "mla": reader}


def test_asked_for_no_segment_a_writer_keeps_its_objects() -> None:
    """The store would take any: the end of an answer would lie with a worker that may leave before its owner."""
    store = Store()
    elder, writer = PoolDouble(store), PoolDouble(store)
    handoff = Handoff(PAIRS["equal"], store=store)
    handoff.pool = writer
    assert {entry.segment for entry in handoff.publish_rank(1).objects} == {writer.segment_name}
    writer.reserve("control", 100)
    with elder.staging(100, 1.0) as data:
        assert elder.put("unasked", [data]).segment == elder.segment_name, (
            "the control: the first that there is"
        )


def test_objects_that_cannot_be_removed_are_named(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publish failed, and so did the removal: whoever owns the epoch tries again."""

    def fail(operation: str, key: str) -> None:
        if operation == "seal" and "/mla/" in key:
            raise PoolUnavailable("the store is away")

    handoff.store.before = fail
    monkeypatch.setattr(handoff.pool, "remove", lambda keys: list(keys))
    with pytest.raises(PoolUnavailable):
        handoff.publish_rank(0)
    stored = {key for key in handoff.store.objects if "/kda/" in key}
    assert stored, "the first object had been sealed"
    assert stored <= {entry.key for entry in handoff.report.objects}
    assert handoff.report.nbytes == 0
