# SPDX-License-Identifier: Apache-2.0
"""What one rank must read of a boundary: which runs of which objects, and where they go. Plain arithmetic.

A rank reads the heads it owns, from whichever rank wrote them, and the latent rows of the tokens it owns under its own
DCP layout. When rows were packed for another layout, a unit may hold rows of other ranks too; they are read with it
(digests cover whole units) and not used. `bytes_needed` is what the rank owns, so that the excess can be counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from statestore.boundary import BoundaryRecord, ObjectEntry
from statestore.geometry import Geometry
from statestore.objects import (
    Packing,
    Unit,
    heads_of,
    kda_units,
    mla_units,
    owners,
    row_bytes,
    row_tokens,
    token_slice,
)

Tokens = npt.NDArray[np.int64]


class RecordIncomplete(ValueError):
    """A committed record that does not name every object, or every unit's digest."""


@dataclass(frozen=True)
class Piece:
    """One unit to read, and its place in the caches."""

    entry: ObjectEntry
    unit: Unit
    digest: str
    head: int = -1
    """kda: index on the reading rank."""
    tokens: Tokens | None = None
    """mla: the token of each row."""
    wanted: npt.NDArray[np.bool_] | None = None
    """mla: which rows this rank owns and does not hold yet."""


def plan(
    record: BoundaryRecord, source: Geometry, target: Geometry, rank: int, local_tokens: int
) -> list[Piece]:
    """Pieces that TP rank `rank` of `target` reads; rows of tokens below `local_tokens` are not read.

    Raises RecordIncomplete naming what the record lacks.
    """
    return [
        *_heads(record, source, target, rank),
        *_rows(record, source, target, rank, local_tokens),
    ]


def bytes_needed(pieces: list[Piece], geometry: Geometry) -> int:
    """Bytes among `pieces` that the rank uses."""
    rows = sum(int(piece.wanted.sum()) for piece in pieces if piece.wanted is not None)
    heads = sum(piece.unit.nbytes for piece in pieces if piece.wanted is None)
    return heads + rows * row_bytes(geometry)


def _heads(record: BoundaryRecord, source: Geometry, target: Geometry, rank: int) -> list[Piece]:
    mine = heads_of(target, rank)
    pieces = []
    for writer in range(mine.start // source.heads_per_rank, (mine.stop - 1) // source.heads_per_rank + 1):
        for entry, unit, digest in _units(record, writer, "kda", kda_units(source, writer)):
            if unit.first in mine:
                pieces.append(Piece(entry, unit, digest, head=unit.first - mine.start))
    return pieces


def _rows(
    record: BoundaryRecord, source: Geometry, target: Geometry, rank: int, local_tokens: int
) -> list[Piece]:
    layout = Packing(target.dcp, target.interleave)
    packing = Packing(record.packing_dcp, record.packing_interleave)
    pieces = []
    for writer in range(source.tp):
        written = token_slice(record.length, source.tp, writer)
        if not written or written.stop <= local_tokens:
            continue
        order = row_tokens(written, packing)
        for entry, unit, digest in _units(record, writer, "mla", mla_units(source, written, packing)):
            tokens = order[unit.first : unit.first + unit.count]
            wanted = (owners(tokens, layout) == target.dcp_rank(rank)) & (tokens >= local_tokens)
            if wanted.any():
                pieces.append(Piece(entry, unit, digest, tokens=tokens, wanted=wanted))
    return pieces


def _units(
    record: BoundaryRecord, writer: int, group: str, units: list[Unit]
) -> list[tuple[ObjectEntry, Unit, str]]:
    """Units of one object with their digests."""
    for rank_entry in record.ranks:
        if rank_entry.rank == writer:
            for entry in rank_entry.objects:
                if entry.group == group:
                    if len(entry.digests) != len(units) or entry.nbytes != sum(unit.nbytes for unit in units):
                        raise RecordIncomplete(
                            f"object {entry.key}: {len(entry.digests)} digests and {entry.nbytes} bytes for "
                            f"{len(units)} units; it was written in another layout"
                        )
                    return [(entry, unit, d) for unit, d in zip(units, entry.digests, strict=True)]
    raise RecordIncomplete(f"boundary {record.id}: rank {writer} has no {group} object")
