# SPDX-License-Identifier: Apache-2.0
"""The plans of one rank: what it stores of a boundary, and what it takes from one, or from a chain of them.

A chain (docs/checkpoints.md) is read like one boundary: the KDA state of its last record, and from every record the
latent rows of [base, length).

A rank reads the heads it owns, from whichever rank wrote them, and the latent rows of the tokens it owns under its own
DCP layout. When rows were packed for another layout, or it holds a prefix already, a unit may hold rows that it does
not want. Then it reads those that it wants and the unit's part of the table, or all rows, whichever is less.
`ReadPlan.bytes_needed` is what the rank uses, so that the excess is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from statestore.boundary import BoundaryInvalid, BoundaryRecord, Group, ObjectEntry
from statestore.checkpoints.chain import check_chain
from statestore.geometry import Geometry
from statestore.reshard.compat import compatible
from statestore.reshard.objects import (
    ROW_DIGEST,
    Packing,
    Unit,
    heads_of,
    kda_units,
    mla_units,
    row_bytes,
    row_tokens,
    written_tokens,
)
from statestore.reshard.ownership import Ints, owner


class RecordIncomplete(ValueError):
    """A committed record that does not name every object, names one of another layout, or does not fit its chain."""


@dataclass(frozen=True)
class ObjectPlan:
    """One object that a rank stores."""

    group: Group
    units: tuple[Unit, ...]
    """In the object's order; they cover it without a gap, up to the table."""
    tokens: Ints
    """mla: the token of each row; kda: empty, its heads are the rank's in order."""
    token_lo: int
    token_hi: int

    @property
    def payload(self) -> int:
        """Bytes of state; behind them lies the table of the rows' digests."""
        return self.units[-1].offset + self.units[-1].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return self.payload + ROW_DIGEST * len(self.tokens)

    def table_of(self, unit: Unit) -> slice:
        """Bytes of the object that hold the digests of the rows of one of its units of rows."""
        at = self.payload + ROW_DIGEST * unit.first
        return slice(at, at + ROW_DIGEST * unit.count)


def plan_write(
    geometry: Geometry, rank: int, length: int, packing: Packing | None = None, base: int = 0
) -> tuple[ObjectPlan, ...]:
    """Objects that TP rank `rank` stores of a boundary of `length` tokens: kda, then mla; an empty one is left out.

    kda is the state after `length` tokens; mla has rows of the tokens [base, length) only. Raises ValueError for a
    rank, a length or a base that does not exist.
    """
    if length < 1:
        raise ValueError(f"length {length} is no boundary; it needs at least one token")
    if not 0 <= base < length:
        raise ValueError(f"base={base} is outside [0, {length}): the boundary would have no rows")
    packing = packing or Packing()
    plans = []
    heads = kda_units(geometry, rank)
    if heads:
        plans.append(ObjectPlan("kda", heads, np.empty(0, dtype=np.int64), 0, length))
    tokens = written_tokens(geometry, length, rank, base)
    rows = mla_units(geometry, tokens, packing)
    if rows:
        lo, hi = int(tokens[0]), int(tokens[-1]) + 1
        plans.append(ObjectPlan("mla", rows, row_tokens(tokens, packing), lo, hi))
    return tuple(plans)


@dataclass(frozen=True)
class Piece:
    """One unit to read, and its place in the caches."""

    entry: ObjectEntry
    unit: Unit
    digest: str
    at: int
    """Byte at which it is staged."""
    head: int = -1
    """kda: index on the reading rank."""
    tokens: Ints | None = None
    """mla: the token of each row that is read."""
    wanted: NDArray[np.bool_] | None = None
    """mla: which of those this rank owns and does not hold yet."""
    rows: Ints | None = None
    """mla: which rows of the unit are read, when not all of them are; the unit's table is staged behind them."""
    table: int = 0
    """mla: byte of the object at which the unit's table begins."""

    @property
    def row_bytes(self) -> int:
        """mla: bytes of one row."""
        return self.unit.nbytes // self.unit.count

    @property
    def nbytes(self) -> int:
        """Bytes that are read, and staged."""
        if self.rows is None:
            return self.unit.nbytes
        return len(self.rows) * self.row_bytes + ROW_DIGEST * self.unit.count

    def ranges(self) -> list[tuple[int, int, int]]:
        """(byte in the object, byte in the staging region, bytes) of what is read."""
        if self.rows is None:
            return [(self.unit.offset, self.at, self.unit.nbytes)]
        size, at = self.row_bytes, self.at
        ranges = []
        for run in np.split(self.rows, np.flatnonzero(np.diff(self.rows) != 1) + 1):
            ranges.append((self.unit.offset + int(run[0]) * size, at, len(run) * size))
            at += len(run) * size
        return [*ranges, (self.table, at, ROW_DIGEST * self.unit.count)]


@dataclass(frozen=True)
class ObjectRead:
    """The ranges to read of one object."""

    entry: ObjectEntry
    ranges: tuple[tuple[int, int, int], ...]
    """(byte in the object, byte in the staging region, bytes); neighbouring pieces are one range."""

    @property
    def whole(self) -> bool:
        """Whether all of the object is read, as one range."""
        return len(self.ranges) == 1 and self.ranges[0][2] == self.entry.nbytes


@dataclass(frozen=True)
class ReadPlan:
    """What a rank takes. `pieces` of one object are neighbours, in its order."""

    pieces: tuple[Piece, ...]
    bytes_needed: int
    """Bytes that end in the rank's caches."""

    @property
    def nbytes(self) -> int:
        """Bytes that cross the wire, which is also the staging room that the rank needs."""
        return sum(piece.nbytes for piece in self.pieces)

    def reads(self) -> tuple[ObjectRead, ...]:
        """The same bytes as few ranges."""
        reads = []
        for _, of_object in groupby(self.pieces, key=lambda piece: piece.entry.key):
            ranges: list[tuple[int, int, int]] = []
            for piece in of_object:
                for at, to, nbytes in piece.ranges():
                    if ranges and ranges[-1][0] + ranges[-1][2] == at:
                        first, target, before = ranges[-1]
                        ranges[-1] = (first, target, before + nbytes)
                    else:
                        ranges.append((at, to, nbytes))
            reads.append(ObjectRead(piece.entry, tuple(ranges)))
        return tuple(reads)


def plan_read(
    record: BoundaryRecord, source: Geometry, target: Geometry, rank: int, local_tokens: int = 0
) -> ReadPlan:
    """What TP rank `rank` of `target` reads of a boundary without parents that `source` wrote.

    Rows of tokens below `local_tokens` are not read, except where that is less than the table of their unit.
    Raises GeometryMismatch when the geometries do not map, RecordIncomplete naming what the record lacks, ValueError
    for a rank or a number of local tokens that does not exist.
    """
    return _plan([(record, source)], target, rank, local_tokens)


def plan_read_chain(
    records: Sequence[BoundaryRecord], target: Geometry, rank: int, local_tokens: int = 0
) -> ReadPlan:
    """What TP rank `rank` of `target` reads of a chain, oldest record first, the boundary itself last.

    Every record is read in the layout of its own geometry and packing. Raises as `plan_read` does, and GeometryError
    for a record whose geometry cannot be read.
    """
    return _plan(
        [(record, Geometry.from_json(record.geometry)) for record in records], target, rank, local_tokens
    )


def _plan(
    chain: Sequence[tuple[BoundaryRecord, Geometry]], target: Geometry, rank: int, local_tokens: int
) -> ReadPlan:
    try:
        check_chain([record for record, _ in chain])
    except BoundaryInvalid as error:
        raise RecordIncomplete(str(error)) from error
    last = chain[-1][0]
    for record, source in chain:
        compatible(source, target)
        if len(record.ranks) != source.tp:
            raise RecordIncomplete(
                f"boundary {record.id} has entries of {len(record.ranks)} ranks; its geometry says tp={source.tp}"
            )
    if not 0 <= local_tokens <= last.length:
        raise ValueError(f"local_tokens={local_tokens} is outside [0, {last.length}]")
    pieces: list[Piece] = []
    needed = 0
    for record, source in chain:
        if record is not last and record.length <= local_tokens:
            continue
        at = pieces[-1].at + pieces[-1].nbytes if pieces else 0
        for piece, used in _pieces(record, source, target, rank, local_tokens, record is last, at):
            pieces.append(piece)
            needed += used
    return ReadPlan(tuple(pieces), needed)


def _pieces(
    record: BoundaryRecord,
    source: Geometry,
    target: Geometry,
    rank: int,
    local_tokens: int,
    state: bool,
    at: int,
) -> Iterable[tuple[Piece, int]]:
    """Units of one record that the rank reads, each with how many of its bytes the rank uses.

    `state`: KDA units too, not only rows. `at`: byte at which the first one is staged.
    """
    mine = heads_of(target, rank)
    dcp_rank = target.dcp_rank(rank)
    packing = Packing(record.packing_dcp, record.packing_interleave)
    # Every reader begins at another writer, so that readers spread over the writers.
    for step in range(source.tp):
        writer = (rank * source.tp // target.tp + step) % source.tp
        for plan in plan_write(source, writer, record.length, packing, record.base):
            if plan.group == "mla" and plan.token_hi <= local_tokens:
                continue
            if plan.group == "kda" and not (state and _overlap(heads_of(source, writer), mine)):
                continue
            for entry, unit, digest in _written(record, writer, plan):
                if plan.group == "kda":
                    if unit.first in mine:
                        yield Piece(entry, unit, digest, at, head=unit.first - mine.start), unit.nbytes
                        at += unit.nbytes
                    continue
                tokens = plan.tokens[unit.first : unit.first + unit.count]
                wanted = owner(tokens, target.dcp, target.interleave) == dcp_rank
                wanted &= tokens >= local_tokens
                if wanted.any():
                    piece = _rows_piece(entry, unit, digest, at, tokens, wanted, plan.table_of(unit).start)
                    yield piece, int(wanted.sum()) * row_bytes(target)
                    at += piece.nbytes


def _rows_piece(
    entry: ObjectEntry,
    unit: Unit,
    digest: str,
    at: int,
    tokens: Ints,
    wanted: NDArray[np.bool_],
    table: int,
) -> Piece:
    """What is least to read of a unit of which some rows are wanted: those with the table, or all rows."""
    rows = np.flatnonzero(wanted)
    some = Piece(entry, unit, digest, at, -1, tokens[rows], wanted[rows], rows, table)
    return some if some.nbytes < unit.nbytes else Piece(entry, unit, digest, at, -1, tokens, wanted)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _written(
    record: BoundaryRecord, writer: int, plan: ObjectPlan
) -> Iterable[tuple[ObjectEntry, Unit, str]]:
    """Units of one object with their digests."""
    for entry in record.ranks[writer].objects:
        if entry.group != plan.group:
            continue
        if (
            len(entry.digests) != len(plan.units)
            or entry.nbytes != plan.nbytes
            or (entry.token_lo, entry.token_hi) != (plan.token_lo, plan.token_hi)
        ):
            raise RecordIncomplete(
                f"object {entry.key}: {len(entry.digests)} digests, {entry.nbytes} bytes and tokens "
                f"[{entry.token_lo}, {entry.token_hi}) for {len(plan.units)} units of {plan.nbytes} bytes and tokens "
                f"[{plan.token_lo}, {plan.token_hi}); it was written in another layout"
            )
        return [(entry, unit, digest) for unit, digest in zip(plan.units, entry.digests, strict=True)]
    raise RecordIncomplete(f"boundary {record.id}: rank {writer} has no {plan.group} object")
