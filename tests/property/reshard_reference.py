# SPDX-License-Identifier: Apache-2.0
"""Where every byte must land, decided without the index maps: plain loops over heads, columns, channels and tokens.

A world holds random state as the model knows it, by layer and head or by layer and token. `lay_out` puts it into the
memory of one rank with loops of its own; memory that holds no state keeps a pattern, so that a stray write shows. The
owner of a token is found by dealing tokens out one at a time, not by the closed formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statestore.geometry import DTYPE_BYTES, Geometry

Bytes = NDArray[np.uint8]

PATTERN = 0xFF
"""Every byte of a cache before anything is written: NaN in every dtype that has one in all ones."""


def deal(length: int, dcp: int, interleave: int, block_size: int) -> list[tuple[int, int, int]]:
    """(owner, block-table index, row) of every token [0, length), by dealing tokens out one at a time."""
    places = []
    have = [0] * dcp
    turn = 0
    left = interleave
    for _ in range(length):
        places.append((turn, have[turn] // block_size, have[turn] % block_size))
        have[turn] += 1
        left -= 1
        if left == 0:
            turn = (turn + 1) % dcp
            left = interleave
    return places


def owners(length: int, dcp: int, interleave: int) -> NDArray[np.int64]:
    """Owner of every token [0, length), dealt out `interleave` at a time."""
    hands: list[int] = []
    turn = 0
    while len(hands) < length:
        hands += [turn] * interleave
        turn = (turn + 1) % dcp
    return np.array(hands[:length], dtype=np.int64)


@dataclass
class World:
    """Random state of one sequence, in raw bytes; no part of it is null and no number is not finite."""

    recurrent: Bytes
    """[KDA layers, heads, V, K, element bytes]"""
    conv: tuple[Bytes, Bytes, Bytes]
    """q, k, v: each [KDA layers, heads, W-1, channels of a head, element bytes]"""
    rows: Bytes
    """[MLA layers, tokens, latent width, element bytes]"""

    @classmethod
    def random(cls, geometry: Geometry, length: int, seed: int = 0) -> World:
        g = geometry
        rng = np.random.default_rng(seed)

        def state(dtype: str, *shape: int) -> Bytes:
            # Every byte in [1, 0x3F]: never zero, and the exponent never all ones.
            return rng.integers(1, 0x40, (*shape, DTYPE_BYTES[dtype]), dtype=np.uint8)

        layers, heads, columns = len(g.kda_layers), g.num_heads, g.conv_width - 1
        q, k, v = (
            state(g.conv_dtype, layers, heads, columns, width) for width in (g.head_k, g.head_k, g.head_v)
        )
        return cls(
            state(g.recurrent_dtype, layers, heads, g.head_v, g.head_k),
            (q, k, v),
            state(g.kv_cache_dtype, len(g.mla_layers), length, g.latent_width),
        )

    def head(self, head: int) -> bytes:
        """What an object holds of one head."""
        layers = []
        for layer in range(self.recurrent.shape[0]):
            layers.append(self.recurrent[layer, head].tobytes())
            layers += [part[layer, head].tobytes() for part in self.conv]
        return b"".join(layers)

    def token(self, token: int) -> bytes:
        """What an object holds of one token."""
        return self.rows[:, token].tobytes()
