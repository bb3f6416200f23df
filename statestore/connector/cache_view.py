# SPDX-License-Identifier: Apache-2.0
"""One rank's caches, seen as the bytes of stored objects: gather into staging, scatter from it.

vLLM's caches on a rank: a KDA layer has pages of bytes [blocks, 1, 1, page], in each the convolution state [columns,
channels] (SD) or [channels, columns] (DS), channels = q | k | v parts of the rank's heads, then the recurrent state
[heads, V, K], then padding; an MLA layer has rows [blocks, 1, block_size, latent width]. Layers of different groups
share memory: a block id means something only with its group. The objects' order is `statestore.reshard`'s.

Staging is host memory. Caches in host memory are copied by `statestore.connector.host_copies`, those on a device by
`statestore.connector.device_copies`; the copies release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from statestore.connector.describe import split_groups
from statestore.connector.device_copies import DeviceCopies, kernels_for, torch_dtype
from statestore.connector.host_copies import HostCopies
from statestore.geometry import Geometry
from statestore.gpu.found import Found
from statestore.reshard import locate

Bytes = npt.NDArray[np.uint8]


class CacheView:
    """The caches of one rank. Block ids are those of the layer's KV cache group."""

    def __init__(self, kv_caches: dict[str, Any], kv_cache_config: Any, geometry: Geometry) -> None:
        """Raises ValueError naming the layer when a tensor's shape is not what `geometry` says."""
        self.geometry = geometry
        kda, mla = split_groups(kv_cache_config)
        self._kda = [(group, *self._states(name, kv_caches[name])) for name, group in kda.values()]
        self._mla = [(group, _rows(kv_caches[name], geometry.block_size)) for name, group in mla.values()]
        for (name, _), (_, rows) in zip(mla.values(), self._mla, strict=True):
            if rows.shape[1:] != (geometry.block_size, geometry.latent_width):
                raise ValueError(
                    f"cache of {name} has shape {tuple(rows.shape)}; "
                    f"expected blocks of {(geometry.block_size, geometry.latent_width)}"
                )
        kernels = kernels_for(geometry, self._kda, self._mla)
        self._device = DeviceCopies(geometry, self._kda, self._mla, kernels)
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
        conv = pages[:, :conv_bytes].view(torch_dtype(g.conv_dtype)).unflatten(1, conv_shape)
        recurrent = pages[:, conv_bytes:end].view(torch_dtype(g.recurrent_dtype))
        return conv, recurrent.unflatten(1, (g.heads_per_rank, g.head_v, g.head_k))

    @property
    def block_count(self) -> int:
        """Blocks of the smallest layer; ids are below it."""
        return min(cache.shape[0] for cache in (*(c for _, c, _ in self._kda), *(c for _, c in self._mla)))

    @property
    def device(self) -> torch.device:
        """Where the caches are."""
        return self._mla[0][1].device

    @property
    def on_host(self) -> bool:
        """Whether the caches are host memory."""
        return self._host is not None

    @property
    def proves(self) -> bool:
        """Whether the device takes digests (`ml64`) and looks at state while it copies."""
        return self._host is None and self._device.kernels is not None

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
        return lambda layers: self._device.gather_heads(blocks, mine, layers, out)

    def prove_heads(
        self, blocks: tuple[list[int], ...], out: Bytes, first: int, layers: range | None = None
    ) -> Found:
        """`gather_heads` of as many as `out` has room for, with what the device found; needs `proves`.

        `layers`: of these only, by their place in `geometry.kda_layers`, as [heads, layers, bytes].
        """
        return self._device.prove_heads(blocks, first, out, layers)

    def check_heads(self, source: Bytes) -> tuple[Found, torch.Tensor]:
        """What the device finds in staged heads, and its copy of them for `scatter_heads`; needs `proves`."""
        return self._device.check_heads(source)

    def scatter_heads(
        self, blocks: tuple[list[int], ...], first: int, heads: int, source: Bytes | torch.Tensor
    ) -> None:
        """Heads [first, first + heads) of this rank from `source` into each group's running-state block.

        Speculative convolution columns are left as they are: they hold nothing before the first verified step.
        """
        mine = slice(first, first + heads)
        if self._host is not None:
            assert isinstance(source, np.ndarray)
            self._host.scatter_heads(blocks, mine, self._host.staged(source, heads))
        else:
            self._device.scatter_heads(blocks, mine, source)

    # ---- MLA

    def gather_rows(self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64], out: Bytes) -> None:
        """Latent rows of `tokens` (all owned by this rank), all MLA layers, token by token into `out`."""
        (self._host or self._device).gather_rows(self._places(blocks, tokens), out)

    def prove_rows(
        self,
        blocks: tuple[list[int], ...],
        tokens: npt.NDArray[np.int64],
        out: Bytes,
        units: npt.NDArray[np.int64],
    ) -> Found:
        """`gather_rows` with what the device found; `units` [2, rows]: each row's unit and its number there."""
        return self._device.prove_rows(self._places(blocks, tokens), out, units)

    def check_rows(
        self, source: Bytes, units: npt.NDArray[np.int64] | None = None
    ) -> tuple[Found, torch.Tensor]:
        """What the device finds in staged rows, and its copy of them; needs `proves`. `units` as `prove_rows` has it,
        by default all are one unit's."""
        return self._device.check_rows(source, units)

    def scatter_rows(
        self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64], source: Bytes | torch.Tensor
    ) -> None:
        """Inverse of `gather_rows`."""
        places = self._places(blocks, tokens)
        if self._host is not None:
            assert isinstance(source, np.ndarray)
            self._host.scatter_rows(places, source)
        else:
            self._device.scatter_rows(places, source)

    def _places(
        self, blocks: tuple[list[int], ...], tokens: npt.NDArray[np.int64]
    ) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(block id, row in it) of each token, one pair a layer; layers of one group share it."""
        by_group = {
            group: locate(self.geometry, tokens, blocks[group]) for group in {g for g, _ in self._mla}
        }
        return [by_group[group] for group, _ in self._mla]

    def fence(self, sleeps: bool = False) -> Any:
        """A point in the device's work after which the caches hold what is in its queue now; None on the CPU.

        `sleeps`: who waits for it for long does not keep a core busy.
        """
        if self._kda[0][1].is_cuda:
            event = torch.cuda.Event(blocking=sleeps)
            event.record()
            return event
        return None


def _rows(cache: torch.Tensor, block_size: int) -> torch.Tensor:
    """Latent rows [blocks, block_size, width] of an MLA layer, without the axis of its one head.

    An attention kernel may want smaller blocks than the cache manager's: there are as many more of them then, one
    after the other in a block's page.
    """
    rows = cache.squeeze(1) if cache.dim() == 4 else cache
    parts, rest = divmod(block_size, rows.shape[1])
    if rest or parts < 2 or rows.shape[0] % parts:
        return rows
    return rows.view(-1, block_size, rows.shape[2])
