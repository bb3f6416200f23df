# SPDX-License-Identifier: Apache-2.0
"""Carries out plans on bytes, and checks the result against the reference.

`check` raises AssertionError when a head or a row is wrong, missing, stored twice, read twice, or read for nothing.
`tamper` changes each read plan before it is carried out, `writes` replaces the writer's plan: the negative controls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

import tests.property.reshard_reference as reference
from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry, object_key
from statestore.digest import row_digests, unit_digest
from statestore.reshard import (
    CHUNK,
    ROW_DIGEST,
    ObjectPlan,
    Piece,
    ReadPlan,
    plan_read,
    plan_read_chain,
    plan_write,
    row_bytes,
)
from tests.property.reshard_cases import Case

Bytes = NDArray[np.uint8]

STAGED_PATTERN = 0x5A


@dataclass
class Tally:
    """What the checks have covered, for the terminal summary."""

    cases: int = 0
    ranks: int = 0
    moved: int = 0
    needed: int = 0
    worst: float = 0.0
    """The largest ratio of one rank, where it is looked at."""

    def add(self, ranks: int, moved: int, needed: int, worst: float = 0.0) -> None:
        self.worst = max(self.worst, worst)
        self.cases += 1
        self.ranks += ranks
        self.moved += moved
        self.needed += needed


TALLIES: dict[str, Tally] = {}


def record_of(case: Case, ranks: list[list[ObjectEntry]]) -> BoundaryRecord:
    """A committed record with these objects; its parents are the links before it."""
    return BoundaryRecord(
        id=f"b{case.link}",
        model_digest=case.source.model_digest,
        prefix_hash="ab",
        length=case.length,
        epoch=Epoch(7, 1 + case.link),
        owner=f"p{case.link}",
        geometry=case.source.to_json(),
        packing_dcp=case.packing.dcp,
        packing_interleave=case.packing.interleave,
        state="committed",
        ranks=tuple(RankEntry(n, "written", tuple(objects)) for n, objects in enumerate(ranks)),
        base=case.base,
        parents=tuple(f"b{link}" for link in range(case.link)),
        link=case.link,
        reusable=True,
    )


def publish(
    case: Case,
    world: reference.World,
    writes: Callable[..., tuple[ObjectPlan, ...]] = plan_write,
) -> tuple[BoundaryRecord, dict[str, Bytes]]:
    """What the writing ranks put into the store; together they store every head and every token once."""
    source = case.source
    owners = reference.owners(case.length, source.dcp, source.interleave)
    readers = reference.owners(case.length, case.packing.dcp, case.packing.interleave)
    objects: dict[str, Bytes] = {}
    ranks: list[list[ObjectEntry]] = []
    heads: list[int] = []
    tokens: list[int] = []
    per_rank = source.num_heads // source.tp
    for rank in range(source.tp):
        entries = []
        for plan in writes(source, rank, case.length, case.packing, case.base):
            if plan.group == "kda":
                mine = [unit.first for unit in plan.units]
                assert mine == list(range(rank * per_rank, (rank + 1) * per_rank)), "not the rank's heads"
                heads += mine
                raw = b"".join(world.head(head) for head in mine)
            else:
                assert (owners[plan.tokens] == rank % source.dcp).all(), (
                    "stores a token that it does not hold"
                )
                assert (plan.token_lo, plan.token_hi - 1) == (plan.tokens.min(), plan.tokens.max())
                tokens += plan.tokens.tolist()
                raw = np.ascontiguousarray(world.rows[:, plan.tokens].swapaxes(0, 1)).tobytes()
                of_rows = np.frombuffer(raw, dtype=np.uint8).reshape(len(plan.tokens), -1)
                raw += row_digests(of_rows).tobytes()
                for unit in plan.units:
                    of_unit = plan.tokens[unit.first : unit.first + unit.count]
                    assert 0 < unit.count <= CHUNK
                    assert unit.nbytes == unit.count * row_bytes(source)
                    assert (np.diff(of_unit) > 0).all(), "tokens out of order in a unit"
                    assert (readers[of_unit] == unit.owner).all(), "rows of another owner in a unit"
            data = np.frombuffer(raw, dtype=np.uint8)
            at = 0
            for unit in plan.units:
                assert unit.offset == at, "units leave a gap or overlap"
                at += unit.nbytes
            assert at == plan.payload, "units do not cover the object's state"
            assert plan.nbytes == len(data) == at + ROW_DIGEST * len(plan.tokens), (
                "the table has another size"
            )
            key = object_key(source.model_digest, Epoch(7, 1 + case.link), plan.group, rank, case.link)
            objects[key] = data
            digests = tuple(
                unit_digest(data[plan.table_of(u)] if plan.group == "mla" else data[u.offset :][: u.nbytes])
                for u in plan.units
            )
            entries.append(
                ObjectEntry(key, plan.group, len(data), digests, plan.token_lo, plan.token_hi, null_free=True)
            )
        ranks.append(entries)
    assert heads == list(range(source.num_heads)), "a head is stored twice or never"
    assert sorted(tokens) == list(range(case.base, case.length)), "a token is stored twice or never"
    return record_of(case, ranks), objects


def carry_out(plan: ReadPlan, objects: dict[str, Bytes]) -> Bytes:
    """Read the ranges; no byte is read twice, and every byte of the staging region is written once."""
    region = np.full(plan.nbytes, STAGED_PATTERN, np.uint8)
    written = np.zeros(plan.nbytes, np.int64)
    for read in plan.reads():
        source = objects[read.entry.key]
        seen = np.zeros(len(source), np.int64)
        for at, to, size in read.ranges:
            assert 0 <= at < at + size <= len(source), "a range leaves the object"
            assert 0 <= to < to + size <= plan.nbytes, "a range leaves the staging region"
            region[to : to + size] = source[at : at + size]
            seen[at : at + size] += 1
            written[to : to + size] += 1
        assert seen.max() <= 1, "a byte is read twice"
        assert read.whole == bool(seen.all() and len(read.ranges) == 1)
    assert (written == 1).all(), "a staged byte is written twice or never"
    return region


def check(
    case: Case,
    *,
    tamper: Callable[[ReadPlan], ReadPlan] = lambda plan: plan,
    writes: Callable[..., tuple[ObjectPlan, ...]] = plan_write,
    tally: str = "",
    most: float | None = None,
) -> None:
    """Every reading rank, from the objects to what goes into its caches; `most`: bytes moved for a needed one."""
    check_links([case], tamper=tamper, writes=writes, tally=tally, most=most)


def publish_links(
    links: Sequence[Case], writes: Callable[..., tuple[ObjectPlan, ...]] = plan_write
) -> tuple[list[BoundaryRecord], dict[str, Bytes], reference.World]:
    """Every boundary of a chain, each with KDA state of its own; the world is what its reader must find."""
    last = links[-1]
    world = reference.World.random(last.source, last.length)
    records = []
    objects: dict[str, Bytes] = {}
    for link in links:
        state = world
        if link is not last:
            state = replace(reference.World.random(last.source, 1, 1 + link.link), rows=world.rows)
        record, stored = publish(link, state, writes)
        assert not objects.keys() & stored.keys(), "two links share a key"
        objects |= stored
        records.append(record)
    return records, objects, world


def check_links(
    links: Sequence[Case],
    *,
    tamper: Callable[[ReadPlan], ReadPlan] = lambda plan: plan,
    writes: Callable[..., tuple[ObjectPlan, ...]] = plan_write,
    tally: str = "",
    most: float | None = None,
) -> None:
    """`check` of a chain: state of the last link, rows of all of them."""
    case = links[-1]
    source, target = case.source, case.target
    records, objects, world = publish_links(links, writes)

    def read(rank: int) -> ReadPlan:
        if len(links) == 1:
            return plan_read(records[0], source, target, rank, case.local_tokens)
        return plan_read_chain(records, target, rank, case.local_tokens)

    owners = reference.owners(case.length, target.dcp, target.interleave)
    per_rank = target.num_heads // target.tp
    head_size = len(world.head(0))
    row_size = len(world.token(0))
    total_moved = total_needed = 0
    for rank in range(target.tp):
        plan = tamper(read(rank))
        region = carry_out(plan, objects)
        heads: dict[int, bytes] = {}
        rows: Counter[int] = Counter()
        for piece in plan.pieces:
            data = _checked(piece, region[piece.at : piece.at + piece.nbytes])
            if piece.tokens is None or piece.wanted is None:
                assert piece.head not in heads, "a head is read twice"
                heads[piece.head] = data.tobytes()
                continue
            assert piece.wanted.any(), "a unit is read for nothing"
            got = data.reshape(len(piece.tokens), row_size)[piece.wanted]
            tokens = piece.tokens[piece.wanted]
            rows.update(tokens.tolist())
            want = world.rows[:, tokens].swapaxes(0, 1).reshape(len(tokens), row_size)
            assert (got == want).all(), "a row is another token's"
        assert sorted(heads) == list(range(per_rank)), "a head is missing, or not the rank's"
        for mine, raw in heads.items():
            assert raw == world.head(rank * per_rank + mine), "a head is another's"
        mine_tokens = np.flatnonzero(owners == rank % target.dcp)
        mine_tokens = mine_tokens[mine_tokens >= case.local_tokens]
        assert sorted(rows.elements()) == mine_tokens.tolist(), "a row is missing, twice or not the rank's"
        needed = per_rank * head_size + len(mine_tokens) * row_size
        assert plan.bytes_needed == needed, "counts its bytes wrong"
        _check_excess(links, plan, needed)
        total_moved += plan.nbytes
        total_needed += needed
    if most is not None:
        assert total_moved <= most * total_needed, f"moved {total_moved} bytes for {total_needed}"
    if tally:
        kind = "packed for the reader" if all(link.matching for link in links) else "packed for another"
        kind += ", local prefix" if case.local_tokens else ""
        TALLIES.setdefault(f"{tally} ({kind})", Tally()).add(target.tp, total_moved, total_needed)


def _checked(piece: Piece, data: Bytes) -> Bytes:
    """The state in a piece's bytes, checked by the record's digest; some rows of a unit by its table."""
    if piece.tokens is None:
        assert unit_digest(data) == piece.digest, "a unit's digest differs"
        return data
    end = len(piece.tokens) * (piece.unit.nbytes // piece.unit.count)
    rows = data[:end].reshape(len(piece.tokens), -1)
    if piece.rows is None:
        assert unit_digest(row_digests(rows)) == piece.digest, "a unit's digest differs"
    else:
        assert unit_digest(data[end:]) == piece.digest, "a table's digest differs"
        assert (row_digests(rows) == data[end:].reshape(-1, ROW_DIGEST)[piece.rows]).all(), "a row's differs"
    return data[:end]


def _check_excess(links: Sequence[Case], plan: ReadPlan, needed: int) -> None:
    """Nothing but what is needed, and the tables of units that are read in part; without those, one range an object."""
    case = links[-1]
    assert plan.nbytes >= needed, "bytes come from nowhere"
    excess = 0
    for piece in plan.pieces:
        if piece.tokens is None or piece.wanted is None:
            continue
        size, count = piece.unit.nbytes // piece.unit.count, piece.unit.count
        unwanted = (count - int(piece.wanted.sum())) * size
        excess += min(unwanted, ROW_DIGEST * count)
        assert case.local_tokens == 0 or piece.tokens[-1] >= case.local_tokens, (
            "a unit below the prefix is read"
        )
    assert plan.nbytes == needed + excess, f"moved {plan.nbytes} bytes for {needed}, {excess} more would do"
    if all(link.matching for link in links) and case.local_tokens == 0:
        assert excess == 0, f"moved {plan.nbytes} bytes for {needed}"
        assert all(len(read.ranges) == 1 for read in plan.reads()), "packed rows need more than one range"
