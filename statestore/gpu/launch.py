# SPDX-License-Identifier: Apache-2.0
"""Calls of the kernels for one rank's caches: addresses, grids, and what they found.

Calls go into the current stream and return at once, but for `Found`, which waits for its numbers. Staging is a tensor
of 64-bit words on the device, in the stored object's order (`statestore.reshard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from statestore.checksum import TILE, keys
from statestore.geometry import Geometry
from statestore.gpu.found import Found
from statestore.gpu.kernels import CHECK, GATHER, SCATTER, rows_kernel, states_kernel
from statestore.reshard import CHUNK, head_bytes, row_bytes

Ints = npt.NDArray[np.int64]
Table = tuple[Ints, Ints]

_EXPONENTS: dict[str, tuple[int, int]] = {
    "float32": (32, 0x7F800000),
    "float16": (16, 0x7C00),
    "bfloat16": (16, 0x7F80),
    "float8_e4m3": (8, 0x7F),
    "float8_e5m2": (8, 0x7C),
}
"""Bits of a number, and those that are all ones where it is not finite."""

_NONE = 0x7FFFFFFF

AHEAD = 2 * TILE
"""Words' keys that follow one another in memory: a run of `TILE` words may begin anywhere in a tile."""


@dataclass(frozen=True)
class Tuning:
    """Sizes of programs; what benchmarks/copies found fastest on H200."""

    block: int = 1024
    """Words of recurrent state of one program, `TILE` at most."""
    rows: int = 8
    """Latent rows of one program."""
    state_warps: int = 4
    row_warps: int = 4


def refusal(
    geometry: Geometry, states: Sequence[tuple[int, Any, Any]], rows: Sequence[tuple[int, Any]]
) -> str:
    """Why the kernels cannot copy these caches; empty when they can: everything must be whole words of 64 bits."""
    g = geometry
    if g.conv_bytes not in (2, 4):
        return f"convolution state of {g.conv_dtype}"
    parts = {
        "a head's recurrent state": g.head_v * g.head_k * g.recurrent_bytes,
        "a head's key channels": g.head_k * g.conv_bytes,
        "a head's value channels": g.head_v * g.conv_bytes,
        "a latent row": g.latent_row_bytes,
    }
    for _, conv, recurrent in states:
        for what, tensor in (("convolution state", conv), ("recurrent state", recurrent)):
            parts[f"the address of {what}"] = tensor.data_ptr()
            parts[f"the page of {what}"] = tensor.stride(0) * tensor.element_size()
    for _, cache in rows:
        parts["the address of latent rows"] = cache.data_ptr()
        parts["the page of latent rows"] = cache.stride(0) * cache.element_size()
        if cache.stride(2) != 1:
            return "latent rows that are not contiguous"
    words = g.conv_columns * (2 * g.head_k + g.head_v) * g.conv_bytes // 8
    if max(words, g.latent_row_bytes // 8) > TILE:
        return f"rows or convolution states of more than {TILE} words"
    return next((f"{what} ({size} bytes)" for what, size in parts.items() if size % 8), "")


class ShardKernels:
    """The kernels of one rank; `refusal` must have been empty."""

    def __init__(
        self,
        geometry: Geometry,
        states: Sequence[tuple[int, torch.Tensor, torch.Tensor]],
        rows: Sequence[tuple[int, torch.Tensor]],
        tuning: Tuning | None = None,
    ) -> None:
        """`states` and `rows` as `statestore.connector.device_copies.DeviceCopies` has them."""
        self.geometry, self._tuning = geometry, tuning or Tuning()
        self._device = rows[0][1].device
        self._origin = torch.empty(2, dtype=torch.int64, device=self._device)
        """What every offset counts from: caches may lie in several allocations."""
        self._state_groups = [group for group, _, _ in states]
        self._pages = np.array([[self._words(conv), self._words(state)] for _, conv, state in states])
        self._page_strides = np.array([[_stride(conv, 0), _stride(state, 0)] for _, conv, state in states])
        groups = list(dict.fromkeys(group for group, _ in rows))
        self._tables = [next(n for n, (one, _) in enumerate(rows) if one == group) for group in groups]
        """A layer of each group: its table is the group's."""
        caches = [
            (self._words(cache), _stride(cache, 0), _stride(cache, 1), groups.index(group))
            for group, cache in rows
        ]
        self._caches = torch.tensor(caches, dtype=torch.int64, device=self._device)
        tiles = max(head_bytes(geometry), CHUNK * row_bytes(geometry)) // (8 * TILE) + 3
        numbers = np.concatenate((np.resize(keys(0, TILE), AHEAD), keys(TILE, TILE + tiles)))
        self._keys = torch.from_numpy(numbers.view(np.int64)).to(self._device)
        self._row = geometry.latent_row_bytes // 8
        self._low = 1 << (self._row.bit_length() - 1)
        self._high = 1 << max(self._row - self._low - 1, 0).bit_length()
        offsets = (*self._pages.flat, *self._page_strides.flat, *(n for layer in caches for n in layer[:3]))
        self._even = not any(int(words) % 2 for words in offsets) and not self._row % 2
        g = geometry
        self._even = self._even and not (g.head_v * g.head_k * g.recurrent_bytes) % 16
        self._even = self._even and not (head_bytes(g) // len(g.kda_layers)) % 16

    # ---- KDA

    def gather_heads(
        self, blocks: tuple[list[int], ...], first: int, staging: torch.Tensor, layers: range | None = None
    ) -> Found:
        """Heads from `first` of every layer's block into `staging`, as many as it has room for.

        `layers`: of these layers only, numbered as the geometry has them, [heads, layers, words]; the sums of a head's
        groups add up, and parts are counted within the group.
        """
        return self._states(GATHER, blocks, first, staging, layers)

    def scatter_heads(self, blocks: tuple[list[int], ...], first: int, staging: torch.Tensor) -> None:
        """Inverse of `gather_heads`; speculative convolution columns are left as they are."""
        self._states(SCATTER, blocks, first, staging)

    def check_heads(self, staging: torch.Tensor) -> Found:
        """What `gather_heads` would have found of what is in `staging`."""
        return self._states(CHECK, None, 0, staging)

    def _states(
        self,
        mode: int,
        blocks: tuple[list[int], ...] | None,
        first: int,
        staging: torch.Tensor,
        some: range | None = None,
    ) -> Found:
        some = range(len(self._state_groups)) if some is None else some
        layers = len(some)
        heads = staging.numel() // self._head_words(layers)
        pages = self.pages(blocks, some) if blocks is not None else self._put(self._pages)
        # One allocation: one call clears it, and one copy brings it to the host.
        found = torch.zeros(heads + -(-heads * layers // 2), dtype=torch.int64, device=self._device)
        self.launch_states(mode, pages, first, staging, found, some.start)
        if mode == SCATTER:
            return Found([])
        numbers = found.cpu().numpy()
        flags = numbers[heads:].view(np.int32)[: heads * layers]
        return Found(
            numbers[:heads].tolist(), _first(flags & 1 == 0), _first(flags & 2 != 0), _first(flags & 4 != 0)
        )

    def pages(self, blocks: tuple[list[int], ...], layers: range | None = None) -> torch.Tensor:
        """Where the block of each layer (of each of `layers`) lies, on the device: what `launch_states` takes."""
        some = slice(None) if layers is None else slice(layers.start, layers.stop)
        ids = np.array([blocks[group][0] for group in self._state_groups[some]])
        return self._put(self._pages[some] + ids[:, None] * self._page_strides[some])

    def launch_states(
        self,
        mode: int,
        pages: torch.Tensor,
        first: int,
        staging: torch.Tensor,
        found: torch.Tensor,
        low: int = 0,
    ) -> None:
        """One launch; `pages` and `found` (zeros: sums, then flags) are on the device; `low`: the first layer of
        `pages`."""
        grid, arguments, options = self._states_call(mode, pages, first, staging, found, low)
        states_kernel[grid](*arguments, **options)

    def _head_words(self, layers: int) -> int:
        """Words of one head's state of so many layers."""
        return layers * (head_bytes(self.geometry) // len(self._state_groups)) // 8

    def _states_call(
        self,
        mode: int,
        pages: torch.Tensor,
        first: int,
        staging: torch.Tensor,
        found: torch.Tensor,
        low: int = 0,
    ) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
        g = self.geometry
        layers = len(pages)
        heads = staging.numel() // self._head_words(layers)
        words = g.head_v * g.head_k * g.recurrent_bytes // 8
        key, value = g.head_k * g.conv_bytes // 8, g.head_v * g.conv_bytes // 8
        columns = g.conv_columns + g.num_spec
        conv = g.conv_columns * (2 * key + value)
        block = min(self._tuning.block, _power(words))
        arguments = (
            self._origin,
            pages,
            staging,
            self._keys,
            found,
            found[heads:].view(torch.int32),
            first,
            g.heads_per_rank,
            low,
            layers,
            columns,
            *_masks(g.recurrent_dtype),
            *_masks(g.conv_dtype),
        )
        options = {
            "WORDS": words,
            "HISTORY": g.conv_columns,
            "KEY": key,
            "VALUE": value,
            "PER_WORD": 8 // g.conv_bytes,
            "DS": g.conv_layout == "DS",
            "EVEN": self._even,
            "MODE": mode,
            "AHEAD": AHEAD,
            "BLOCK": block,
            "CONV_BLOCK": _power(conv),
            "num_warps": self._tuning.state_warps,
        }
        return (heads * layers * (-(-words // block) + 1),), arguments, options

    # ---- MLA

    def gather_rows(self, tables: Sequence[Table], staging: torch.Tensor, units: Ints | None = None) -> Found:
        """Rows at `tables` (one a layer, layers of a group have the same) into `staging`, token by token.

        `units`: [2, rows], each row's unit, from 0, and its number in the unit; by default all are one unit's.
        """
        return self._copy_rows(GATHER, tables, staging, units)

    def scatter_rows(self, tables: Sequence[Table], staging: torch.Tensor) -> None:
        """Inverse of `gather_rows`."""
        self._copy_rows(SCATTER, tables, staging, None)

    def check_rows(self, staging: torch.Tensor, units: Ints | None = None) -> Found:
        """What `gather_rows` would have found of what is in `staging`."""
        return self._copy_rows(CHECK, None, staging, units)

    def _copy_rows(
        self, mode: int, tables: Sequence[Table] | None, staging: torch.Tensor, units: Ints | None
    ) -> Found:
        rows = staging.numel() * 8 // row_bytes(self.geometry)
        if units is None and mode == SCATTER:
            units = np.zeros((2, rows), np.int64)  # nobody asks for what it finds
        if units is None and rows > CHUNK:
            raise ValueError(f"{rows} rows are more than one unit's {CHUNK}; say which unit each belongs to")
        if units is None:
            units = np.stack([np.zeros(rows, np.int64), np.arange(rows)])
        count = int(units[0].max()) + 1
        found = torch.zeros(count + 1, dtype=torch.int64, device=self._device)
        found[count:].view(torch.int32).fill_(_NONE)
        self.launch_rows(mode, self.places(units, tables), staging, found)
        if mode == SCATTER:
            return Found([])
        numbers = found.cpu().numpy()
        null, bad = (None if one == _NONE else int(one) for one in numbers[count:].view(np.int32))
        return Found(numbers[:count].tolist(), null, bad)

    def places(self, units: Ints, tables: Sequence[Table] | None) -> torch.Tensor:
        """Where each row belongs and lies, on the device: what `launch_rows` takes."""
        parts = [] if tables is None else [part for n in self._tables for part in tables[n]]
        return self._put(np.stack([*units, *parts]).astype(np.int32))

    def launch_rows(
        self, mode: int, tables: torch.Tensor, staging: torch.Tensor, found: torch.Tensor
    ) -> None:
        """One launch; `tables` int32 [2 + 2 · tables, rows]: units, then places; `found`: sums, then the two worst."""
        grid, arguments, options = self._rows_call(mode, tables, staging, found)
        rows_kernel[grid](*arguments, **options)

    def _rows_call(
        self, mode: int, tables: torch.Tensor, staging: torch.Tensor, found: torch.Tensor
    ) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
        rows, layers = tables.shape[1], len(self._caches)
        arguments = (
            self._origin,
            self._caches,
            tables[2:] if mode != CHECK else tables,
            tables,
            staging,
            self._keys,
            found,
            found[-1:].view(torch.int32),
            rows,
            layers,
            *_masks(self.geometry.kv_cache_dtype),
        )
        options = {
            "WORDS": self._row,
            "LOW": self._low,
            "HIGH": self._high,
            "EVEN": self._even,
            "MODE": mode,
            "AHEAD": AHEAD,
            "ROWS": self._tuning.rows,
            "num_warps": self._tuning.row_warps,
        }
        return (-(-rows // self._tuning.rows) * layers,), arguments, options

    # ---- both

    def compile(self) -> None:
        """Compile every kernel, so that no request waits for it. Does nothing where kernels are interpreted."""
        pages = self._put(self._pages)
        heads = torch.empty(head_bytes(self.geometry) // 8, dtype=torch.int64, device=self._device)
        rows = torch.empty(row_bytes(self.geometry) // 8, dtype=torch.int64, device=self._device)
        tables = torch.zeros(2 + 2 * len(self._tables), 1, dtype=torch.int32, device=self._device)
        found = torch.zeros(2 + len(self._state_groups), dtype=torch.int64, device=self._device)
        for mode in (GATHER, SCATTER, CHECK):
            for kernel, (grid, arguments, options) in (
                (states_kernel, self._states_call(mode, pages, 0, heads, found)),
                (rows_kernel, self._rows_call(mode, tables, rows, found)),
            ):
                if hasattr(kernel, "device_caches"):
                    kernel.warmup(*arguments, grid=grid, **options)

    def _words(self, tensor: torch.Tensor) -> int:
        return (tensor.data_ptr() - self._origin.data_ptr()) // 8

    def _put(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device, non_blocking=True)


def _masks(dtype: str) -> tuple[int, int, int]:
    """Of every number of a word: exponent, all bits but the sign, and the sign, as int64."""
    bits, exponent = _EXPONENTS[dtype]
    ones = sum(1 << at for at in range(0, 64, bits))
    sign = ones << (bits - 1)
    return exponent * ones, ones * ((1 << (bits - 1)) - 1), sign - (1 << 64)


def _stride(tensor: torch.Tensor, axis: int) -> int:
    """Words of 64 bits from one index to the next."""
    return tensor.stride(axis) * tensor.element_size() // 8


def _power(number: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _first(flags: npt.NDArray[np.bool_]) -> int | None:
    at = int(flags.argmax())
    return at if flags[at] else None
