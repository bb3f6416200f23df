# SPDX-License-Identifier: Apache-2.0
"""Where every byte must land, decided without the index maps: plain loops over heads, columns, channels and tokens.

A world holds random state as the model knows it, by layer and head or by layer and token. `*_cache` lays it out
in the cache of one rank with loops of their own; cells of the cache that hold no state keep a pattern, so that a
stray write shows. The owner of a token is found by dealing tokens out one at a time, not by the closed formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from statestore.geometry import Geometry

PATTERN = 0xA5
"""Every byte of a cache before anything is written."""


@dataclass
class KdaWorld:
    """Random KDA state of one sequence; elements are raw bits (recurrent 32, convolution 16)."""

    recurrent: NDArray[np.uint32]
    """[layers, heads, V, K]"""
    conv: tuple[NDArray[np.uint16], ...]
    """q, k, v: each [layers, heads, W-1, channels of a head]"""

    @classmethod
    def random(cls, geometry: Geometry, seed: int) -> KdaWorld:
        rng = np.random.default_rng(seed)
        layers, heads = len(geometry.kda_layers), geometry.num_heads
        recurrent = rng.integers(0, 2**32, (layers, heads, geometry.head_v, geometry.head_k), dtype=np.uint32)
        conv = tuple(
            rng.integers(0, 2**16, (layers, heads, geometry.conv_width - 1, width), dtype=np.uint16)
            for width in (geometry.head_k, geometry.head_k, geometry.head_v)
        )
        return cls(recurrent, conv)


@dataclass
class KdaCache:
    """One block of a rank's cache, layer by layer."""

    recurrent: NDArray[np.uint32]
    """[layers, heads of the rank, V, K]"""
    conv: NDArray[np.uint16]
    """[layers, columns · channels], flat in the role's own layout"""


def empty_kda_cache(geometry: Geometry) -> KdaCache:
    layers, heads = len(geometry.kda_layers), geometry.num_heads // geometry.tp
    channels = heads * (2 * geometry.head_k + geometry.head_v)
    columns = geometry.conv_width - 1 + geometry.num_spec
    return KdaCache(
        np.full((layers, heads, geometry.head_v, geometry.head_k), 0x01010101 * PATTERN, np.uint32),
        np.full((layers, columns * channels), 0x0101 * PATTERN, np.uint16),
    )


def kda_cache(
    world: KdaWorld, geometry: Geometry, rank: int, history: int
) -> tuple[KdaCache, NDArray[np.int64], NDArray[np.int64]]:
    """The cache that rank `rank` must have, and how often each element of it is state (0 or 1)."""
    cache = empty_kda_cache(geometry)
    recurrent_count = np.zeros(cache.recurrent.shape, np.int64)
    conv_count = np.zeros(cache.conv.shape, np.int64)
    local = geometry.num_heads // geometry.tp
    channels = local * (2 * geometry.head_k + geometry.head_v)
    columns = geometry.conv_width - 1 + geometry.num_spec
    for layer in range(len(geometry.kda_layers)):
        for mine in range(local):
            head = rank * local + mine
            for value in range(geometry.head_v):
                for key in range(geometry.head_k):
                    cache.recurrent[layer, mine, value, key] = world.recurrent[layer, head, value, key]
                    recurrent_count[layer, mine, value, key] += 1
        channel = 0
        for part in range(3):
            width = (geometry.head_k, geometry.head_k, geometry.head_v)[part]
            for mine in range(local):
                for offset in range(width):
                    for column in range(geometry.conv_width - 1):
                        at = (
                            (history + column) * channels + channel
                            if geometry.conv_layout == "SD"
                            else channel * columns + history + column
                        )
                        head = rank * local + mine
                        cache.conv[layer, at] = world.conv[part][layer, head, column, offset]
                        conv_count[layer, at] += 1
                    channel += 1
    return cache, recurrent_count, conv_count


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


def mla_world(geometry: Geometry, tokens: int, seed: int) -> NDArray[np.uint8]:
    """Random rows [layers, tokens, row bytes]."""
    rng = np.random.default_rng(seed)
    shape = (len(geometry.mla_layers), tokens, geometry.latent_row_bytes)
    return rng.integers(0, 256, shape, dtype=np.uint8)


def block_table(geometry: Geometry, tokens: int, seed: int) -> NDArray[np.int64]:
    """Shuffled block ids for a request of `tokens` tokens; block 0 is the null block and is never used."""
    blocks = -(-tokens // (geometry.block_size * geometry.dcp))
    rng = np.random.default_rng(seed)
    return rng.permutation(np.arange(1, blocks + 2, dtype=np.int64))[:blocks]


def empty_mla_cache(geometry: Geometry, table: NDArray[np.int64]) -> NDArray[np.uint8]:
    """[layers, block ids, block_size, row bytes], all pattern."""
    shape = (len(geometry.mla_layers), len(table) + 2, geometry.block_size, geometry.latent_row_bytes)
    return np.full(shape, PATTERN, np.uint8)


def mla_cache(
    world: NDArray[np.uint8],
    geometry: Geometry,
    rank: int,
    table: NDArray[np.int64],
    low: int,
    high: int,
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The cache that rank `rank` must have after tokens [low, high), and how often each row is state (0 or 1)."""
    cache = empty_mla_cache(geometry, table)
    count = np.zeros(cache.shape[1:3], np.int64)
    mine = rank % geometry.dcp
    for token, (owner, block, row) in enumerate(
        deal(high, geometry.dcp, geometry.interleave, geometry.block_size)
    ):
        if token < low or owner != mine:
            continue
        for layer in range(cache.shape[0]):
            cache[layer, table[block], row] = world[layer, token]
        count[table[block], row] += 1
    return cache, count
