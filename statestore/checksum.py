# SPDX-License-Identifier: Apache-2.0
"""`ml64`: a digest of state that a GPU computes while it copies, and a CPU too, bit for bit.

XXH3 goes over its input in order, so one unit of some megabytes would keep one warp of a GPU busy and leave the others
idle. `ml64` is a sum: every word's part depends on the word and its position alone, so any number of threads adds
parts in any order. Of `n` bytes, padded with zero bytes to words w_0, w_1, ... of 64 bits, little-endian::

    key(m)   = odd(mix(m)),  mix(m): t = (m+1)·0x9E3779B97F4A7C15; t ^= t>>32; t *= 0xD6E8FEB86659FD93; t ^= t>>32
    x(w)     = w ^ (w >> 33)
    sum      = Σ_i x(w_i) · key(i mod 1024) · key(1024 + i div 1024)     mod 2^64
    digest   = fmix(sum + n·0x9E3779B97F4A7C15), 16 hexadecimal digits, fmix the finish of MurmurHash3

It is a multilinear hash with fixed keys (Lemire and Kaser, "Strongly universal string hashing is fast", 2014): it finds
damage and mix-ups, not malice. Keys are odd and x is a bijection, so a change inside one word is always found. Words
that trade places, or several changes that have nothing to do with each other, are missed once in about 2^31 times where
they touch only the highest bit of their words, and once in 2^64 where they touch the lowest. x brings high bits down to
where they meet the key's: without it two flipped signs would always cancel.

On a CPU it takes a shift, an exclusive or and a dot product: 5 GB/s a core in the core's cache and 3.4 cold
(docs/performance.md), where XXH3-128 takes 44 and 12: that stays the digest of state that lies in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

NAME = "ml64"
"""The algorithm's name in a record."""

TILE = 1024
"""Words after which the keys of the words begin again, and the key of the tile changes."""

SHIFT = 33
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1

_TILES = 32
"""Tiles that are taken at once: 256 KiB, what a core's cache holds beside the results."""


def keys(low: int, high: int) -> Words:
    """key(low) ... key(high - 1)."""
    with np.errstate(over="ignore"):
        t = (np.arange(low, high, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
        t ^= t >> np.uint64(32)
        t *= np.uint64(MULTIPLIER)
        t ^= t >> np.uint64(32)
        return t | np.uint64(1)


def finish(total: int, nbytes: int) -> str:
    """The digest of `nbytes` bytes whose words' sum is `total`; any integer that is congruent mod 2^64 will do."""
    h = (total + nbytes * GOLDEN) & _MASK
    h = ((h ^ h >> 33) * 0xFF51AFD7ED558CCD) & _MASK
    h = ((h ^ h >> 33) * 0xC4CEB9FE1A85EC53) & _MASK
    return f"{h ^ h >> 33:016x}"


def finish_all(totals: Sequence[int], nbytes: int) -> Words:
    """`finish` of many parts of `nbytes` bytes each, as numbers: a table of rows has thousands, and a call for each
    would hold the interpreter for as long as a decode step takes."""
    h = np.fromiter((total & _MASK for total in totals), np.uint64, len(totals))
    h += np.uint64(nbytes * GOLDEN & _MASK)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        h ^= h >> np.uint64(33)
        h *= np.uint64(factor)
    return h ^ h >> np.uint64(33)


_WORD_KEYS = keys(0, TILE)
_TILE_KEYS = keys(TILE, TILE + 4096)
_scratch = threading.local()


class Checksum:
    """A digest in progress, with the interface of a hash: `update` as often as needed, then `hexdigest`."""

    def __init__(self) -> None:
        self._sum = self._words = self._nbytes = 0
        self._rest = b""
        """Bytes since the last whole word."""

    def update(self, buffer: object) -> None:
        """The next bytes. Raises TypeError without the buffer protocol, ValueError when it is not contiguous."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        if not view.c_contiguous:
            raise ValueError("buffer is not contiguous; copy it into one that is before taking its digest")
        data: NDArray[np.uint8] = np.frombuffer(view.cast("B"), np.uint8)
        self._nbytes += len(data)
        if self._rest:
            missing = 8 - len(self._rest)
            self._rest += data[:missing].tobytes()
            data = data[missing:]
            if len(self._rest) < 8:
                return
            self._add(np.frombuffer(self._rest, np.dtype("<u8")))
        whole = len(data) // 8 * 8
        self._rest = data[whole:].tobytes()
        self._add(data[:whole].view(np.dtype("<u8")))

    def hexdigest(self) -> str:
        """The digest of what has been taken."""
        total = self._sum
        if self._rest:
            last = Checksum()
            last._words = self._words
            last._add(np.frombuffer(self._rest.ljust(8, b"\0"), np.dtype("<u8")))
            total += last._sum
        return finish(total, self._nbytes)

    def _add(self, words: Words) -> None:
        at = 0
        while at < len(words):
            tile, first = divmod(self._words, TILE)
            if first or len(words) - at < TILE:
                count = min(TILE - first, len(words) - at)
                mixed = _mixed(words[at : at + count])
                part = int(np.dot(mixed, _WORD_KEYS[first : first + count]))
                self._sum += part * int(_tile_keys(tile, 1)[0])
            else:
                tiles = min(_TILES, (len(words) - at) // TILE)
                count = tiles * TILE
                mixed = _mixed(words[at : at + count]).reshape(tiles, TILE)
                self._sum += int(np.dot(np.dot(mixed, _WORD_KEYS), _tile_keys(tile, tiles)))
            self._sum &= _MASK
            self._words += count
            at += count


def checksum(buffer: object) -> str:
    """`ml64` of a contiguous buffer's bytes; raises as `Checksum.update` does."""
    running = Checksum()
    running.update(buffer)
    return running.hexdigest()


def _mixed(words: Words) -> Words:
    """x of every word, in memory that this thread's next call uses again."""
    room: Any = getattr(_scratch, "room", None)
    if room is None:
        room = _scratch.room = np.empty(_TILES * TILE, np.uint64)
    mixed: Words = room[: len(words)]
    np.right_shift(words, np.uint64(SHIFT), out=mixed)
    np.bitwise_xor(mixed, words, out=mixed)
    return mixed


def _tile_keys(tile: int, tiles: int) -> Words:
    if tile + tiles <= len(_TILE_KEYS):
        return _TILE_KEYS[tile : tile + tiles]
    return keys(TILE + tile, TILE + tile + tiles)
