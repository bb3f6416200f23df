# SPDX-License-Identifier: Apache-2.0
"""What a stored object holds, byte by byte. One object a layer group and writing rank; plain arithmetic.

    kda   head-major   [heads of the rank][KDA layers] x ( recurrent [V, K] | conv [q|k|v part][W-1 columns][channels] )
          one head of all layers is one run of bytes, so a reader with another TP size takes whole runs: the unit of
          reading and of digests is one head. Never the speculative convolution columns.
    mla   token-major  [tokens of the slice][MLA layers] x latent row
          MLA rows are the same on every TP rank, so the handed-over tokens are divided among the writing ranks
          (`token_slice`). Inside an object the rows lie grouped by the DCP rank that will own them, in token order
          (`packing`): a decode rank reads one run. The unit of digests is a run of at most `CHUNK` rows of one owner.

Both orders make the unit of reading contiguous, so bytes moved equal bytes needed whenever the packing is the reader's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from statestore.geometry import Geometry

CHUNK = 1024
"""Rows of the largest MLA unit: 4.7 MB for two fp32 layers, 27 MB for K3's 24 bf16 layers."""

UNIT_ALIGN = 16
"""Token slices of the writing ranks start at multiples of it, so that slices do not cut a DCP interleave of 16."""


@dataclass(frozen=True)
class Packing:
    """For which reader the rows of MLA objects were grouped."""

    dcp: int = 1
    interleave: int = 1


@dataclass(frozen=True)
class Unit:
    """The smallest run of bytes that is read and checked by itself."""

    offset: int
    """Byte at which it starts in its object."""
    nbytes: int
    first: int
    """kda: head (model-wide); mla: index of the unit's first row in the object."""
    count: int
    """kda: 1; mla: rows."""
    owner: int
    """mla: DCP rank that owns the rows; kda: 0."""


def head_bytes(geometry: Geometry) -> int:
    """Bytes of one head's state in all KDA layers."""
    recurrent = geometry.head_v * geometry.head_k * geometry.recurrent_bytes
    conv = geometry.conv_columns * (2 * geometry.head_k + geometry.head_v) * geometry.conv_bytes
    return len(geometry.kda_layers) * (recurrent + conv)


def row_bytes(geometry: Geometry) -> int:
    """Bytes of one token's latent rows in all MLA layers."""
    return geometry.sizes.mla_token


def heads_of(geometry: Geometry, rank: int) -> range:
    """Model-wide heads that TP rank `rank` holds."""
    per_rank = geometry.heads_per_rank
    return range(rank * per_rank, (rank + 1) * per_rank)


def token_slice(length: int, writers: int, rank: int) -> range:
    """Tokens of [0, length) that writing rank `rank` of `writers` stores: equal shares, starts at UNIT_ALIGN."""
    share = -(-length // writers)
    share = -(-share // UNIT_ALIGN) * UNIT_ALIGN
    return range(min(rank * share, length), min((rank + 1) * share, length))


def owners(tokens: npt.NDArray[np.int64], packing: Packing) -> npt.NDArray[np.int64]:
    """DCP rank that owns each token (STATE, index maps: owner(t) = (t // I) % c)."""
    return (tokens // packing.interleave) % packing.dcp


def row_tokens(tokens: range, packing: Packing) -> npt.NDArray[np.int64]:
    """Token of each row of the object that holds `tokens`: grouped by owner, in token order inside a group."""
    array = np.arange(tokens.start, tokens.stop, dtype=np.int64)
    return array[np.argsort(owners(array, packing), kind="stable")]


def kda_units(geometry: Geometry, rank: int) -> list[Unit]:
    """Units of the kda object of TP rank `rank`: one a head."""
    size = head_bytes(geometry)
    return [Unit(i * size, size, head, 1, 0) for i, head in enumerate(heads_of(geometry, rank))]


def mla_units(geometry: Geometry, tokens: range, packing: Packing) -> list[Unit]:
    """Units of the mla object that holds `tokens`: runs of one owner, at most CHUNK rows each."""
    size = row_bytes(geometry)
    owner_of_row = owners(row_tokens(tokens, packing), packing)
    units = []
    start = 0
    while start < len(owner_of_row):
        owner = int(owner_of_row[start])
        run_end = int(np.searchsorted(owner_of_row, owner, side="right"))
        stop = min(run_end, start + CHUNK)
        units.append(Unit(start * size, (stop - start) * size, start, stop - start, owner))
        start = stop
    return units


def local_slots(
    tokens: npt.NDArray[np.int64], geometry: Geometry
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(index in the block table, row in the block) of tokens that this rank owns.

    STATE, index maps: slot(t) = table[t // (bs·c)]·bs + (o // (I·c))·I + o % I with o = t % (bs·c).
    """
    block, dcp, interleave = geometry.block_size, geometry.dcp, geometry.interleave
    offset = tokens % (block * dcp)
    return tokens // (block * dcp), offset // (interleave * dcp) * interleave + offset % interleave
