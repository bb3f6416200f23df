# SPDX-License-Identifier: Apache-2.0
"""Copies between one rank's caches and staging where both are host memory.

A copy of numpy's is one loop on the calling thread with the interpreter lock released. torch's own copies divide
themselves over the engine's threads, a few hundred times a boundary: where engines keep the cores busy that took 3 to
15 times as long as the bytes need. Everything is bytes here, so dtypes do not show; only the DS convolution layout has
its channels apart and is copied number by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from statestore.geometry import Geometry

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.unsignedinteger]
Ints = npt.NDArray[np.int64]
Table = tuple[Ints, Ints]
"""Block ids, and rows in them."""
Run = tuple[int, int, int, int]
"""First index, one past the last, block id and first row in it."""

_FEW_RUNS = 4
"""Rows are copied run by run while runs have at least this many rows on average, else through an index."""


class HostStates:
    """One KDA layer: views of its pages."""

    def __init__(self, pages: torch.Tensor, geometry: Geometry) -> None:
        """`pages`: bytes [blocks, page]."""
        g = geometry
        data = pages.numpy()
        columns, heads = g.conv_columns + g.num_spec, g.heads_per_rank
        conv_bytes = columns * g.conv_channels * g.conv_bytes
        end = conv_bytes + g.recurrent_rank_bytes
        self.recurrent: Bytes = _split(data[:, conv_bytes:end], (heads, -1))
        self._kind = np.dtype(f"u{g.conv_bytes}") if g.conv_layout == "DS" else np.dtype(np.uint8)
        conv = data[:, :conv_bytes]
        if g.conv_layout == "DS":
            by_column = _split(conv.view(self._kind), (g.conv_channels, columns)).swapaxes(1, 2)
        else:
            by_column = _split(conv, (columns, -1))
        history = by_column[:, : g.conv_columns]
        unit = history.shape[2] // g.conv_channels
        self.conv: list[Numbers] = []
        """q, k and v parts: [blocks, heads, columns, channels], in bytes (SD) or numbers (DS)."""
        at = 0
        for width in (g.head_k, g.head_k, g.head_v):
            part = history[:, :, at * unit : (at + heads * width) * unit]
            self.conv.append(_split(part, (heads, -1)).swapaxes(1, 2))
            at += heads * width


@dataclass(frozen=True)
class StagedHeads:
    """Views of staged heads by part, every layer's bytes of that part in one array. Made once, used layer by layer:
    making them takes longer than copying a layer's state of one head."""

    recurrent: Bytes
    """[heads, layers, bytes]"""
    conv: tuple[Numbers, ...]
    """q, k and v parts: [heads, layers, columns, channels], as `HostStates.conv` has them."""


class HostCopies:
    """All layers of a rank; KDA and MLA layers with their KV cache groups, in the model's order."""

    def __init__(
        self,
        geometry: Geometry,
        states: list[tuple[int, torch.Tensor]],
        rows: list[tuple[int, torch.Tensor]],
    ) -> None:
        """`states`: bytes [blocks, page] a KDA layer; `rows`: [blocks, block_size, width] an MLA layer."""
        self._states = [(group, HostStates(pages, geometry)) for group, pages in states]
        self._rows: list[tuple[int, Bytes]] = [(group, row.view(torch.uint8).numpy()) for group, row in rows]

    def staged(self, data: Bytes, heads: int) -> StagedHeads:
        """Views of `heads` staged heads, all KDA layers."""
        by_layer = data.reshape(heads, len(self._states), -1)
        like = self._states[0][1]
        at = like.recurrent.shape[2]
        recurrent, parts = by_layer[..., :at], []
        for part in like.conv:
            _, _, columns, channels = part.shape
            nbytes = columns * channels * part.itemsize
            parts.append(_split(by_layer[..., at : at + nbytes].view(part.dtype), (columns, channels)))
            at += nbytes
        return StagedHeads(recurrent, tuple(parts))

    def gather_heads(
        self, blocks: tuple[list[int], ...], mine: slice, layers: range, staged: StagedHeads
    ) -> None:
        """The rank's heads `mine` of the KDA layers numbered `layers` into their places in `staged`."""
        for layer in layers:
            group, cache = self._states[layer]
            block = blocks[group][0]
            np.copyto(staged.recurrent[:, layer], cache.recurrent[block, mine])
            for target, part in zip(staged.conv, cache.conv, strict=True):
                np.copyto(target[:, layer], part[block, mine])

    def scatter_heads(self, blocks: tuple[list[int], ...], mine: slice, staged: StagedHeads) -> None:
        """Inverse of `gather_heads`, for all KDA layers."""
        for layer, (group, cache) in enumerate(self._states):
            block = blocks[group][0]
            np.copyto(cache.recurrent[block, mine], staged.recurrent[:, layer])
            for origin, part in zip(staged.conv, cache.conv, strict=True):
                np.copyto(part[block, mine], origin[:, layer])

    def gather_rows(
        self,
        tables: list[Table],
        out: Bytes,
    ) -> None:
        """Rows at `tables` [(block ids, rows in them)] a layer, token by token into `out`."""
        by_layer = out.reshape(len(tables[0][0]), len(self._rows), -1)
        for layer, (cache, ids, rows, runs) in enumerate(self._with_runs(tables)):
            if runs is None:
                by_layer[:, layer] = cache[ids, rows]
                continue
            for low, high, block, row in runs:
                np.copyto(by_layer[low:high, layer], cache[block, row : row + high - low])

    def scatter_rows(
        self,
        tables: list[Table],
        source: Bytes,
    ) -> None:
        """Inverse of `gather_rows`."""
        by_layer = source.reshape(len(tables[0][0]), len(self._rows), -1)
        for layer, (cache, ids, rows, runs) in enumerate(self._with_runs(tables)):
            if runs is None:
                cache[ids, rows] = by_layer[:, layer]
                continue
            for low, high, block, row in runs:
                np.copyto(cache[block, row : row + high - low], by_layer[low:high, layer])

    def _with_runs(self, tables: list[Table]) -> Iterator[tuple[Bytes, Ints, Ints, list[Run] | None]]:
        """Every layer's cache with its table, and the table's runs, None where they are too short. Layers of a group
        have one table, whose runs are looked for once."""
        last, runs = None, None
        for (_, cache), table in zip(self._rows, tables, strict=True):
            if table is not last:
                last, found = table, _runs(*table)
                runs = found if len(found) * _FEW_RUNS <= len(table[0]) else None
            yield cache, *table, runs


def _runs(ids: Ints, rows: Ints) -> list[Run]:
    """Runs of indices whose rows follow one another in one block."""
    if len(ids) == 0:
        return []
    breaks = np.flatnonzero((np.diff(ids) != 0) | (np.diff(rows) != 1)) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    return [(low, high, int(ids[low]), int(rows[low])) for low, high in pairwise(edges)]


def _split(data: npt.NDArray[np.unsignedinteger], shape: tuple[int, ...]) -> npt.NDArray[np.unsignedinteger]:
    """The last axis as several, always as a view: a copy would swallow what is written into it."""
    split = data.reshape(*data.shape[:-1], *shape)
    if split.size and not np.may_share_memory(split, data):
        raise ValueError(f"memory of strides {data.strides} has no view of shape {split.shape}")
    return split
