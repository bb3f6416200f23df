# SPDX-License-Identifier: Apache-2.0
"""Copies between one rank's caches and staging where both are host memory.

A copy of numpy's is one loop on the calling thread with the interpreter lock released. torch's own copies divide
themselves over the engine's threads, a few hundred times a boundary: where engines keep the cores busy that took 3 to
15 times as long as the bytes need. Everything is bytes here, so dtypes do not show; only the DS convolution layout has
its channels apart and is copied number by number.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from statestore.geometry import Geometry

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.unsignedinteger]

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

    def staged(self, state: Bytes) -> tuple[Bytes, list[Numbers]]:
        """The layer's part of staged heads, [heads, bytes]: recurrent [heads, bytes], conv as `conv` has it."""
        at = self.recurrent.shape[2]
        parts: list[Numbers] = []
        for part in self.conv:
            _, _, columns, channels = part.shape
            nbytes = columns * channels * self._kind.itemsize
            parts.append(_split(state[:, at : at + nbytes].view(self._kind), (columns, channels)))
            at += nbytes
        return state[:, : self.recurrent.shape[2]], parts


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

    def gather_heads(
        self, blocks: tuple[list[int], ...], first: int, heads: int, layers: range, out: Bytes
    ) -> None:
        """Heads [first, first + heads) of the KDA layers numbered `layers` into their places in `out`."""
        by_layer = out.reshape(heads, len(self._states), -1)
        for layer in layers:
            group, cache = self._states[layer]
            block = blocks[group][0]
            recurrent, conv = cache.staged(by_layer[:, layer])
            np.copyto(recurrent, cache.recurrent[block, first : first + heads])
            for target, part in zip(conv, cache.conv, strict=True):
                np.copyto(target, part[block, first : first + heads])

    def scatter_heads(self, blocks: tuple[list[int], ...], first: int, heads: int, source: Bytes) -> None:
        """Inverse of `gather_heads`."""
        by_layer = source.reshape(heads, len(self._states), -1)
        for layer, (group, cache) in enumerate(self._states):
            block = blocks[group][0]
            recurrent, conv = cache.staged(by_layer[:, layer])
            np.copyto(cache.recurrent[block, first : first + heads], recurrent)
            for origin, part in zip(conv, cache.conv, strict=True):
                np.copyto(part[block, first : first + heads], origin)

    def gather_rows(
        self,
        tables: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
        out: Bytes,
    ) -> None:
        """Rows at `tables` [(block ids, rows in them)] a layer, token by token into `out`."""
        by_layer = out.reshape(len(tables[0][0]), len(self._rows), -1)
        for layer, ((_, cache), (ids, rows)) in enumerate(zip(self._rows, tables, strict=True)):
            runs = _runs(ids, rows)
            if len(runs) * _FEW_RUNS > len(ids):
                by_layer[:, layer] = cache[ids, rows]
                continue
            for low, high in runs:
                row = rows[low]
                np.copyto(by_layer[low:high, layer], cache[ids[low], row : row + high - low])

    def scatter_rows(
        self,
        tables: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
        source: Bytes,
    ) -> None:
        """Inverse of `gather_rows`."""
        by_layer = source.reshape(len(tables[0][0]), len(self._rows), -1)
        for layer, ((_, cache), (ids, rows)) in enumerate(zip(self._rows, tables, strict=True)):
            runs = _runs(ids, rows)
            if len(runs) * _FEW_RUNS > len(ids):
                cache[ids, rows] = by_layer[:, layer]
                continue
            for low, high in runs:
                row = rows[low]
                np.copyto(cache[ids[low], row : row + high - low], by_layer[low:high, layer])


def _runs(ids: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """[low, high) of indices whose rows follow one another in one block."""
    if len(ids) == 0:
        return []
    breaks = np.flatnonzero((np.diff(ids) != 0) | (np.diff(rows) != 1)) + 1
    edges = [0, *breaks.tolist(), len(ids)]
    return list(pairwise(edges))


def _split(data: npt.NDArray[np.unsignedinteger], shape: tuple[int, ...]) -> npt.NDArray[np.unsignedinteger]:
    """The last axis as several, always as a view: a copy would swallow what is written into it."""
    split = data.reshape(*data.shape[:-1], *shape)
    if split.size and not np.may_share_memory(split, data):
        raise ValueError(f"memory of strides {data.strides} has no view of shape {split.shape}")
    return split
