# SPDX-License-Identifier: Apache-2.0
"""Which DCP rank owns a token, and where on that rank it lies.

With c = DCP size, I = interleave, bs = block size of one rank (tokens)::

    owner(t)        = (t // I) % c
    local(t)        = t // (I·c) · I + t % I                 index among the tokens of its owner
    local_len(n, r) = n // (I·c) · I + clip(n % (I·c) − r·I, 0, I)     tokens of [0, n) that rank r owns
    block(t)        = t // (bs·c)                            index in the request's block table
    row(t)          = (o // (I·c)) · I + o % I,  o = t % (bs·c)        row in that block
    slot(t)         = table[block(t)] · bs + row(t)                  `locate` gives table[block(t)] and row(t)

The block table is the same on all ranks of a role. All functions work on arrays of absolute token positions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from statestore.geometry import Geometry

Ints = NDArray[np.int64]
"""One-dimensional 64-bit indices or byte counts."""


def owner(tokens: ArrayLike, dcp: int, interleave: int) -> Ints:
    """DCP rank that owns each token position."""
    return np.asarray(tokens, dtype=np.int64) // interleave % dcp


def local_index(tokens: ArrayLike, dcp: int, interleave: int) -> Ints:
    """Index of each token among the tokens that its owner owns."""
    position = np.asarray(tokens, dtype=np.int64)
    return position // (interleave * dcp) * interleave + position % interleave


def local_length(length: int, rank: int, dcp: int, interleave: int) -> int:
    """How many of the tokens [0, length) DCP rank `rank` owns; 0 is a valid answer."""
    whole, rest = divmod(length, interleave * dcp)
    return whole * interleave + min(max(rest - rank * interleave, 0), interleave)


def owned_tokens(first: int, last: int, rank: int, dcp: int, interleave: int) -> Ints:
    """Absolute positions of the tokens with local index in [first, last) on DCP rank `rank`, ascending."""
    local = np.arange(first, last, dtype=np.int64)
    return local // interleave * (interleave * dcp) + rank * interleave + local % interleave


def place(geometry: Geometry, tokens: ArrayLike) -> tuple[Ints, Ints]:
    """(block-table index, row in the block) of each token on the rank that owns it."""
    position = np.asarray(tokens, dtype=np.int64)
    span = geometry.block_size * geometry.dcp
    return position // span, local_index(position % span, geometry.dcp, geometry.interleave)


def locate(geometry: Geometry, tokens: ArrayLike, table: ArrayLike) -> tuple[Ints, Ints]:
    """(block id, row in the block) of each token on its owner, through the request's block table.

    Raises IndexError when the table is too short for a token: a wrapped index would name another request's block.
    """
    block, row = place(geometry, tokens)
    ids = np.asarray(table, dtype=np.int64)
    if len(block) and (int(block.max()) >= len(ids) or int(block.min()) < 0):
        raise IndexError(
            f"block table has {len(ids)} blocks, tokens need indices {int(block.min())} to {int(block.max())}"
        )
    return ids[block], row
