# SPDX-License-Identifier: Apache-2.0
"""KDA state: heads of a prefill rank to heads of a decode rank.

Decode rank d of b owns heads [d·H/b, (d+1)·H/b); head x lies at prefill rank x // (H/a), as its head x % (H/a). Any
divisors a and b of H work, 3 and 8 too. DCP does not divide heads. The object's layout is in the package's
docstring; `KdaLayout` is the one place that computes an offset in it.

A reader stages what it reads from one source as a `KdaLayout` of its own, with only the heads it needs; so the
worker unpacks whatever it read with the same code that packs an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from statestore.geometry import Geometry
from statestore.reshard.ranges import Cell, Ints, Ranges


class Part(IntEnum):
    """The parts of one layer's state, in the order in which an object holds them."""

    RECURRENT = 0
    CONV_Q = 1
    CONV_K = 2
    CONV_V = 3


CONV_PARTS = (Part.CONV_Q, Part.CONV_K, Part.CONV_V)


@dataclass(frozen=True)
class KdaLayout:
    """Offsets in an object (or staged region) that holds `heads` heads of `layers` KDA layers; bytes throughout."""

    layers: int
    heads: int
    head_bytes: tuple[int, int, int, int]
    """Bytes a head of each part, in the order of `Part`."""

    @classmethod
    def of(cls, geometry: Geometry, heads: int | None = None) -> KdaLayout:
        """Layout of one rank's object, or of a region with another number of heads."""
        conv = geometry.conv_columns * geometry.conv_bytes
        recurrent = geometry.head_v * geometry.head_k * geometry.recurrent_bytes
        return cls(
            layers=len(geometry.kda_layers),
            heads=geometry.heads_per_rank if heads is None else heads,
            head_bytes=(recurrent, conv * geometry.head_k, conv * geometry.head_k, conv * geometry.head_v),
        )

    @property
    def layer_bytes(self) -> int:
        return self.heads * sum(self.head_bytes)

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def offset(self, layer: int, part: Part, head: int = 0) -> int:
        """Where head `head` of `part` begins; `layer` counts the KDA layers, not the model's."""
        before = self.heads * sum(self.head_bytes[:part])
        return layer * self.layer_bytes + before + head * self.head_bytes[part]

    def head_ranges(self, head_lo: int, heads: int) -> tuple[Ints, Ints]:
        """(offsets, nbytes) of heads [head_lo, head_lo + heads) of every layer and part, in the object's order."""
        head = np.asarray(self.head_bytes, dtype=np.int64)
        part_starts = self.heads * np.concatenate(([0], np.cumsum(head)[:-1])) + head_lo * head
        layer_starts = np.arange(self.layers, dtype=np.int64) * self.layer_bytes
        offsets = (layer_starts[:, None] + part_starts[None, :]).reshape(-1)
        return offsets, np.tile(heads * head, self.layers)

    def cells(self, first_index: int = 0) -> list[Cell]:
        """One cell a head, over all layers and parts; `first_index` is the head's number at the writer."""
        return [Cell(first_index + head, *self.head_ranges(head, 1)) for head in range(self.heads)]


class ConvView(NamedTuple):
    """Some heads of one part, as a strided view of one block's convolution tensor in the cache.

    In elements, ready for `as_strided`; the axes are (head, column, channel) as in the object. `offset` counts from
    the first element of the block's own convolution tensor.
    """

    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]


def conv_view(
    geometry: Geometry, part: Part, head_lo: int = 0, heads: int | None = None, history: int = 0
) -> ConvView:
    """View of heads [head_lo, head_lo + heads) of a convolution part in the cache of a rank.

    `history` is the cache column where the W-1 columns of state begin: 0 after a prefill; after a speculative step
    that accepted n tokens the engine leaves them at n - 1. Raises ValueError when they would not fit.
    """
    if part is Part.RECURRENT:
        raise ValueError("the recurrent part has no convolution view; its heads are contiguous in the cache")
    if not 0 <= history <= geometry.num_spec:
        raise ValueError(
            f"history={history} is outside [0, num_spec={geometry.num_spec}]: the cache has no such columns"
        )
    local = geometry.heads_per_rank
    count = local - head_lo if heads is None else heads
    if head_lo < 0 or count < 0 or head_lo + count > local:
        raise ValueError(f"heads [{head_lo}, {head_lo + count}) are outside the rank's [0, {local})")
    width = geometry.head_v if part is Part.CONV_V else geometry.head_k
    channel = local * geometry.head_k * (part - Part.CONV_Q) + head_lo * width
    shape = (count, geometry.conv_columns, width)
    if geometry.conv_layout == "SD":
        row = geometry.conv_channels
        return ConvView(history * row + channel, shape, (width, row, 1))
    row = geometry.conv_columns + geometry.num_spec
    return ConvView(channel * row + history, shape, (width * row, 1, row))


@dataclass(frozen=True)
class KdaWrite:
    """What a prefill rank puts into its object; the same for every rank, since each writes all its heads."""

    layout: KdaLayout
    conv: tuple[ConvView, ConvView, ConvView]
    """Views q, k, v of the rank's cache; the recurrent part is the cache's tensor as it is."""

    def cells(self) -> list[Cell]:
        """Cells of the object; index = the head's number on this rank."""
        return self.layout.cells()


def kda_write(geometry: Geometry, history: int = 0) -> KdaWrite:
    """Write plan of any rank of `geometry`; `history` as in `conv_view`."""
    q, k, v = (conv_view(geometry, part, history=history) for part in CONV_PARTS)
    return KdaWrite(KdaLayout.of(geometry), (q, k, v))


class KdaRead(NamedTuple):
    """One contiguous piece of a source object: heads [head_lo, head_hi) of the reader, of one layer's part."""

    src_rank: int
    byte_offset: int
    nbytes: int
    layer: int
    part: Part
    head_lo: int
    head_hi: int


@dataclass(frozen=True)
class KdaSourceRead:
    """What one decode rank reads from one prefill rank's object."""

    src_rank: int
    src_head: int
    """First head, as the source rank counts its own."""
    dst_head: int
    """First head, as the reading rank counts its own."""
    heads: int
    layout: KdaLayout
    """How the bytes lie once staged: an object with `heads` heads."""
    source_layout: KdaLayout
    ranges: Ranges
    """Coalesced; targets are offsets in the staged region."""

    @property
    def nbytes(self) -> int:
        """Bytes of the staged region; all of them are needed."""
        return self.layout.nbytes

    def cells(self) -> list[Cell]:
        """Cells to check, at their staged offsets; index = the head's number at the source."""
        return self.layout.cells(self.src_head)

    def pieces(self) -> Iterator[KdaRead]:
        """Every piece on its own, before coalescing."""
        head_hi = self.dst_head + self.heads
        for layer in range(self.layout.layers):
            for part in Part:
                yield KdaRead(
                    self.src_rank,
                    self.source_layout.offset(layer, part, self.src_head),
                    self.heads * self.layout.head_bytes[part],
                    layer,
                    part,
                    self.dst_head,
                    head_hi,
                )

    def conv_views(self, geometry: Geometry, history: int = 0) -> tuple[ConvView, ConvView, ConvView]:
        """Where q, k, v go in the cache of the reading role's `geometry`."""
        q, k, v = (conv_view(geometry, part, self.dst_head, self.heads, history) for part in CONV_PARTS)
        return q, k, v


def kda_read(src: Geometry, dst: Geometry, rank: int) -> tuple[KdaSourceRead, ...]:
    """Read plan of decode rank `rank`, one entry a source rank; empty without KDA layers.

    Raises ValueError when `rank` is outside [0, dst.tp). The caller has asked `compatible` before.
    """
    if not 0 <= rank < dst.tp:
        raise ValueError(f"rank {rank} is outside [0, {dst.tp})")
    if not src.kda_layers:
        return ()
    theirs, ours = src.heads_per_rank, dst.heads_per_rank
    first, last = rank * ours, (rank + 1) * ours
    source_layout = KdaLayout.of(src)
    reads = []
    for source in range(first // theirs, (last - 1) // theirs + 1):
        low, high = max(first, source * theirs), min(last, (source + 1) * theirs)
        layout = KdaLayout.of(src, high - low)
        src_head = low - source * theirs
        offsets, nbytes = source_layout.head_ranges(src_head, high - low)
        targets, _ = layout.head_ranges(0, high - low)
        reads.append(
            KdaSourceRead(
                src_rank=source,
                src_head=src_head,
                dst_head=low - first,
                heads=high - low,
                layout=layout,
                source_layout=source_layout,
                ranges=Ranges(offsets, targets, nbytes).coalesced(),
            )
        )
    return tuple(reads)
