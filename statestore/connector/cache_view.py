# SPDX-License-Identifier: Apache-2.0
"""One rank's caches, seen as the bytes of stored objects: gather into staging, scatter from it.

vLLM's caches on a rank: a KDA layer has pages of bytes [blocks, 1, 1, page], in each the convolution state [columns,
channels] (SD) or [channels, columns] (DS), channels = q | k | v parts of the rank's heads, then the recurrent state
[heads, V, K], then padding; an MLA layer has rows [blocks, 1, block_size, latent width]. Layers of different groups
share memory: a block id means something only with its group. The objects' order is `statestore.reshard`'s.

Staging is host memory. Caches in host memory are copied by `statestore.connector.host_copies`, those on a device by
torch, on whole tensors; the copies release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from statestore.connector.describe import split_groups
from statestore.connector.host_copies import HostCopies
from statestore.geometry import Geometry
from statestore.reshard import head_bytes, locate, row_bytes

Bytes = npt.NDArray[np.uint8]


class CacheView:
    """The caches of one rank. Block ids are those of the layer's KV cache group."""

    def __init__(self, kv_caches: dict[str, Any], kv_cache_config: Any, geometry: Geometry) -> None:
        """Raises ValueError naming the layer when a tensor's shape is not what `geometry` says."""
        self.geometry = geometry
        kda, mla = split_groups(kv_cache_config)
        self._kda = [(group, *self._states(name, kv_caches[name])) for name, group in kda.values()]
        self._mla = [(group, _rows(kv_caches[name])) for name, group in mla.values()]
        for (name, _), (_, rows) in zip(mla.values(), self._mla, strict=True):
            if rows.shape[1:] != (geometry.block_size, geometry.latent_width):
                raise ValueError(
                    f"cache of {name} has shape {tuple(rows.shape)}; "
                    f"expected blocks of {(geometry.block_size, geometry.latent_width)}"
                )
        self._host: HostCopies | None = None
        if self._kda[0][1].device.type == "cpu":
            pages = [(group, kv_caches[name].flatten(1).view(torch.uint8)) for name, group in kda.values()]
            self._host = HostCopies(geometry, pages, self._mla)

    def _states(self, name: str, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution and recurrent state of every block of a KDA layer, as views of its pages."""
        g = self.geometry
        pages = cache.flatten(1).view(torch.uint8)
        columns = g.conv_columns + g.num_spec
        conv_shape = (g.conv_channels, columns) if g.conv_layout == "DS" else (columns, g.conv_channels)
        conv_bytes = columns * g.conv_channels * g.conv_bytes
        end = conv_bytes + g.recurrent_rank_bytes
        if pages.shape[1] < end:
            raise ValueError(
                f"cache of {name} has pages of {pages.shape[1]} bytes, smaller than its state of {end}"
            )
        conv = pages[:, :conv_bytes].view(_torch_dtype(g.conv_dtype)).unflatten(1, conv_shape)
        recurrent = pages[:, conv_bytes:end].view(_torch_dtype(g.recurrent_dtype))
        return conv, recurrent.unflatten(1, (g.heads_per_rank, g.head_v, g.head_k))

    @property
    def block_count(self) -> int:
        """Blocks of the smallest layer; ids are below it."""
        return min(cache.shape[0] for cache in (*(c for _, c, _ in self._kda), *(c for _, c in self._mla)))

    @property
    def on_host(self) -> bool:
        """Whether the caches are host memory."""
        return self._host is not None

    def blocks_needed(self, length: int) -> dict[int, int]:
        """How many blocks of each KV cache group hold the state after `length` tokens."""
        g = self.geometry
        rows = -(-length // (g.block_size * g.dcp))
        return {group: 1 for group, _, _ in self._kda} | {group: rows for group, _ in self._mla}

    # ---- KDA

    def gather_heads(
        self,
        blocks: tuple[list[int], ...],
        out: Bytes,
        first: int = 0,
        heads: int | None = None,
    ) -> None:
        """Heads [first, first + heads) of this rank, by default all, from each group's state block into `out`."""
        heads = self.geometry.heads_per_rank if heads is None else heads
        self.gatherer(blocks, out, first, heads)(range(len(self._kda)))

    def gatherer(
        self, blocks: tuple[list[int], ...], out: Bytes, first: int, heads: int
    ) -> Callable[[range], None]:
        """`gather_heads` in steps: a call with some KDA layers, by their place in `geometry.kda_layers`, gathers those.

        What a call needs to know of `out` is found out once.
        """
        mine = slice(first, first + heads)
        if (host := self._host) is not None:
            staged = host.staged(out, heads)
            return lambda layers: host.gather_heads(blocks, mine, layers, staged)
        views = self._head_views(out, heads)

        def gather(layers: range) -> None:
            for layer in layers:
                (recurrent, conv), (group, conv_cache, recurrent_cache) = views[layer], self._kda[layer]
                block = blocks[group][0]
                recurrent.copy_(recurrent_cache[block, mine])
                for part, source in zip(conv, self._conv_parts(conv_cache[block]), strict=True):
                    part.copy_(source[mine])

        return gather

    def scatter_heads(self, blocks: tuple[list[int], ...], first: int, heads: int, source: Bytes) -> None:
        """Heads [first, first + heads) of this rank from `source` into each group's running-state block.

        Speculative convolution columns are left as they are: they hold nothing before the first verified step.
        """
        mine = slice(first, first + heads)
        if self._host is not None:
            self._host.scatter_heads(blocks, mine, self._host.staged(source, heads))
            return
        for (recurrent, conv), (group, conv_cache, recurrent_cache) in zip(
            self._head_views(source, heads), self._kda, strict=True
        ):
            block = blocks[group][0]
            recurrent_cache[block, mine].copy_(recurrent)
            for part, target in zip(conv, self._conv_parts(conv_cache[block]), strict=True):
                target[mine].copy_(part)

    def _head_views(self, data: Bytes, heads: int) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Per KDA layer (recurrent [heads, V, K], convolution parts q, k, v [heads, columns, channels]) over `data`."""
        g = self.geometry
        per_head = torch.from_numpy(data).view(heads, head_bytes(g))
        recurrent_bytes = g.head_v * g.head_k * g.recurrent_bytes
        views = []
        at = 0
        for _ in g.kda_layers:
            recurrent = per_head[:, at : at + recurrent_bytes].view(_torch_dtype(g.recurrent_dtype))
            at += recurrent_bytes
            parts = []
            for channels in (g.head_k, g.head_k, g.head_v):
                nbytes = g.conv_columns * channels * g.conv_bytes
                part = per_head[:, at : at + nbytes].view(_torch_dtype(g.conv_dtype))
                parts.append(part.unflatten(1, (g.conv_columns, channels)))
                at += nbytes
            views.append((recurrent.unflatten(1, (g.head_v, g.head_k)), parts))
        return views

    def _conv_parts(self, conv: torch.Tensor) -> list[torch.Tensor]:
        """Views [heads, history columns, channels] of the q, k and v parts of one block's convolution state."""
        g = self.geometry
        columns = conv.t() if g.conv_layout == "DS" else conv
        history = columns[: g.conv_columns]
        heads = g.heads_per_rank
        sizes = [heads * g.head_k, heads * g.head_k, heads * g.head_v]
        return [part.unflatten(1, (heads, -1)).transpose(0, 1) for part in history.split(sizes, dim=1)]

    # ---- MLA

    def gather_rows(self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64], out: Bytes) -> None:
        """Latent rows of `tokens` (all owned by this rank), all MLA layers, token by token into `out`."""
        if self._host is not None:
            self._host.gather_rows(self._places(blocks, tokens), out)
            return
        views = self._row_views(out, len(tokens))
        for view, (group, cache) in zip(views, self._mla, strict=True):
            view.copy_(cache[self._index(blocks[group], tokens)])

    def scatter_rows(
        self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64], source: Bytes
    ) -> None:
        """Inverse of `gather_rows`."""
        if self._host is not None:
            self._host.scatter_rows(self._places(blocks, tokens), source)
            return
        views = self._row_views(source, len(tokens))
        for view, (group, cache) in zip(views, self._mla, strict=True):
            cache[self._index(blocks[group], tokens)] = view.to(cache.device)

    def _row_views(self, data: Bytes, rows: int) -> list[torch.Tensor]:
        g = self.geometry
        per_row = torch.from_numpy(data).view(rows, row_bytes(g))
        width = g.latent_row_bytes
        dtype = _torch_dtype(g.kv_cache_dtype) if self._mla[0][1].dtype != torch.uint8 else torch.uint8
        return [per_row[:, i * width : (i + 1) * width].view(dtype) for i in range(len(g.mla_layers))]

    def _places(
        self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(block id, row in it) of each token, one pair a layer; layers of one group share it."""
        by_group = {
            group: locate(self.geometry, tokens, blocks[group]) for group in {g for g, _ in self._mla}
        }
        return [by_group[group] for group, _ in self._mla]

    def _index(self, table: list[int], tokens: npt.NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, row = locate(self.geometry, tokens, table)
        return torch.from_numpy(ids), torch.from_numpy(row)

    def fence(self) -> Any:
        """A point in the device's work after which the caches hold this step's state; None on the CPU."""
        if self._kda[0][1].is_cuda:
            event = torch.cuda.Event()
            event.record()
            return event
        return None


def _rows(cache: torch.Tensor) -> torch.Tensor:
    """Latent rows [blocks, block_size, width] of an MLA layer, without the axis of its one head."""
    return cache.squeeze(1) if cache.dim() == 4 else cache


def _torch_dtype(name: str) -> torch.dtype:
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8_e4m3": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }[name]
