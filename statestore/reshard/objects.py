# SPDX-License-Identifier: Apache-2.0
"""What a stored object holds, byte by byte; the layout is in the package's docstring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from statestore.geometry import Geometry
from statestore.reshard.ownership import Ints, local_length, owned_tokens, owner

CHUNK = 128
"""Rows of the largest MLA unit: 0.6 MB for two fp32 layers, 3.5 MB for K3's 24 bf16 layers. A unit is a digest in the
record, 35 bytes of it, and its table is what a reader of some of its rows reads beside them, 1 KiB."""

ROW_DIGEST = 8
"""Bytes of a row's digest in its object's table."""

SPLIT_TOKENS = 16
"""Writing ranks divide the tokens they hold in multiples of it."""


@dataclass(frozen=True)
class Packing:
    """For which reader the rows of MLA objects are grouped: by (t // interleave) % dcp. (1, 1) is plain token order.

    A writer that knows its reader takes the reader's DCP and interleave. Raises ValueError unless both are at least 1.
    """

    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("dcp", "interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"packing field {name}={value!r} is not an integer of at least 1; correct it"
                )
        if self.dcp == 1 and self.interleave != 1:
            # One owner makes every interleave the same order; one name for it keeps records comparable.
            object.__setattr__(self, "interleave", 1)

    @classmethod
    def for_reader(cls, reader: Geometry) -> Packing:
        """The packing with which every rank of `reader` takes one run of every object."""
        return cls(reader.dcp, reader.interleave)


@dataclass(frozen=True)
class Unit:
    """A run of bytes with a digest in the record. Of a unit of rows, some rows can be read and checked by the table."""

    offset: int
    """Byte at which it starts in its object."""
    nbytes: int
    first: int
    """kda: head (model-wide); mla: index of the unit's first row in the object."""
    count: int
    """kda: 1; mla: rows."""
    owner: int
    """mla: DCP rank of the packing that owns the rows; kda: 0."""


def head_bytes(geometry: Geometry) -> int:
    """Bytes of one head's state in all KDA layers."""
    return geometry.sizes.kda_rank // geometry.heads_per_rank


def row_bytes(geometry: Geometry) -> int:
    """Bytes of one token's latent rows in all MLA layers."""
    return geometry.sizes.mla_token


def stored_row_bytes(geometry: Geometry) -> int:
    """Bytes that one token takes in the store: its rows, and their digest in the table; 0 without MLA layers."""
    size = row_bytes(geometry)
    return size + ROW_DIGEST if size else 0


def heads_of(geometry: Geometry, rank: int) -> range:
    """Model-wide heads that TP rank `rank` holds; DCP does not divide heads. Raises ValueError outside [0, tp)."""
    if not 0 <= rank < geometry.tp:
        raise ValueError(f"rank {rank} is outside [0, {geometry.tp})")
    per_rank = geometry.heads_per_rank
    return range(rank * per_rank, (rank + 1) * per_rank)


def written_tokens(geometry: Geometry, length: int, rank: int, base: int = 0) -> Ints:
    """Tokens of [base, length) that TP rank `rank` stores, ascending; none is a valid answer.

    A token lies on every rank of one DCP owner (on every rank without DCP), and those divide what they hold into
    contiguous, balanced shares: every token is stored once. Raises ValueError for a rank outside [0, tp).
    """
    dcp, interleave = geometry.dcp, geometry.interleave
    dcp_rank = geometry.dcp_rank(rank)
    first = local_length(base, dcp_rank, dcp, interleave)
    held = local_length(length, dcp_rank, dcp, interleave) - first
    low, high = _share(held, rank // dcp, geometry.tp // dcp)
    return owned_tokens(first + low, first + high, dcp_rank, dcp, interleave)


def row_tokens(tokens: ArrayLike, packing: Packing) -> Ints:
    """Token of each row of the object that holds `tokens` (ascending): grouped by owner, in token order inside."""
    array = np.asarray(tokens, dtype=np.int64)
    if packing.dcp == 1:
        return array
    return array[np.argsort(owner(array, packing.dcp, packing.interleave), kind="stable")]


def kda_units(geometry: Geometry, rank: int) -> tuple[Unit, ...]:
    """Units of the kda object of TP rank `rank`: one a head; none without KDA layers."""
    size = head_bytes(geometry)
    if size == 0:
        return ()
    return tuple(Unit(i * size, size, head, 1, 0) for i, head in enumerate(heads_of(geometry, rank)))


def mla_units(geometry: Geometry, tokens: ArrayLike, packing: Packing) -> tuple[Unit, ...]:
    """Units of the mla object that holds `tokens`: runs of one owner, at most `CHUNK` rows each."""
    size = row_bytes(geometry)
    if size == 0:
        return ()
    owners = owner(tokens, packing.dcp, packing.interleave)
    units = []
    start = 0
    for who, rows in enumerate(np.bincount(owners, minlength=packing.dcp).tolist()):
        for first in range(start, start + rows, CHUNK):
            count = min(CHUNK, start + rows - first)
            units.append(Unit(first * size, count * size, first, count, who))
        start += rows
    return tuple(units)


def _share(count: int, part: int, parts: int) -> tuple[int, int]:
    """[low, high) of `count` items that the part gets: balanced, in multiples of SPLIT_TOKENS but for the last."""
    steps = -(-count // SPLIT_TOKENS)
    low, high = part * steps // parts, (part + 1) * steps // parts
    return min(low * SPLIT_TOKENS, count), min(high * SPLIT_TOKENS, count)
