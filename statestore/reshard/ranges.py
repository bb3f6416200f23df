# SPDX-License-Identifier: Apache-2.0
"""Contiguous byte ranges as numpy columns: the form in which a plan reaches a store's range reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
"""One-dimensional 64-bit indices or byte counts."""


@dataclass(frozen=True)
class Ranges:
    """`nbytes[i]` bytes from `source[i]` of one object go to `target[i]` of the reader's region for that object."""

    source: Ints
    target: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.nbytes)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(source, target, nbytes) of each range, as plain integers."""
        return zip(self.source.tolist(), self.target.tolist(), self.nbytes.tolist(), strict=True)

    @property
    def total(self) -> int:
        """Bytes that the ranges move."""
        return int(self.nbytes.sum())

    def coalesced(self) -> Ranges:
        """The same bytes in as few ranges as possible: neighbours that touch on both sides become one.

        The order is kept; empty ranges are dropped.
        """
        keep = self.nbytes > 0
        source, target, nbytes = self.source[keep], self.target[keep], self.nbytes[keep]
        if len(nbytes) == 0:
            return Ranges(source, target, nbytes)
        ends_touch = (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
        first = np.flatnonzero(np.concatenate(([True], ~ends_touch)))
        return Ranges(source[first], target[first], np.add.reduceat(nbytes, first))


@dataclass(frozen=True)
class Cell:
    """The smallest part of an object that has a digest of its own.

    `index` counts the cells of the written object. The digest is taken over the pieces (`offsets[i]`, `nbytes[i]`)
    in order. Writer and reader hold the same pieces at different offsets: the writer in its object, the reader in
    the region where it staged what it read.
    """

    index: int
    offsets: Ints
    nbytes: Ints

    @property
    def total(self) -> int:
        """Bytes that the digest covers."""
        return int(self.nbytes.sum())
