# SPDX-License-Identifier: Apache-2.0
"""Copies between one rank's caches and staging where the caches are a device's memory.

A piece is put together on the device, in the order of the stored object, and crosses to the host as one run of bytes;
restoring goes the other way. Many small copies between device and host would each cost more than their bytes. On a GPU
one kernel (`statestore.gpu`) puts a piece together and takes its digests and looks at its numbers meanwhile; where
there is none, torch copies layer by layer and the host does the rest.

Every call has a stream of its own, so that copies run beside the engine's kernels; a call returns when its copies have
ended, because what it has gathered is read, and what it has restored is scheduled, right after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from statestore.geometry import Geometry
from statestore.gpu.found import Found
from statestore.reshard import head_bytes, row_bytes

if TYPE_CHECKING:
    from statestore.gpu.launch import ShardKernels

log = logging.getLogger(__name__)

KERNELS_VARIABLE = "DELTASERVE_STATE_KERNELS"
"""0: torch copies, and the host takes digests. 1 or nothing: kernels do both, where the caches are a GPU's."""

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Table = tuple[Ints, Ints]
"""Block ids, and rows in them."""

State = tuple[int, torch.Tensor, torch.Tensor]
"""KV cache group, convolution and recurrent state of every block."""


_T = TypeVar("_T")


class Spares(Generic[_T]):
    """Things that are made when all others are in use, and used again: as many as there ever were users at once.

    Streams are shared by threads this way, not made a thread: torch keeps the memory that was used on a stream for that
    stream, and the threads that check a load live no longer than it.
    """

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make = make
        self._idle: list[_T] = []

    @contextlib.contextmanager
    def one(self) -> Iterator[_T]:
        """One for the block's time; safe from any thread."""
        try:
            mine = self._idle.pop()
        except IndexError:
            mine = self._make()
        try:
            yield mine
        finally:
            self._idle.append(mine)


class DeviceCopies:
    """All layers of a rank; KDA and MLA layers with their KV cache groups, in the model's order.

    Works on any device of torch's; on the CPU for tests.
    """

    def __init__(
        self,
        geometry: Geometry,
        states: list[State],
        rows: list[tuple[int, torch.Tensor]],
        kernels: ShardKernels | None = None,
    ) -> None:
        """`states`: [blocks, columns, channels] (or transposed) and [blocks, heads, V, K] a KDA layer; `rows`:
        [blocks, block_size, width] an MLA layer; `kernels`: those of the same caches (`kernels_for`)."""
        self.kernels = kernels
        self.geometry = geometry
        self._states, self._rows = states, rows
        self._device = rows[0][1].device
        self._row_dtype = torch_dtype(geometry.kv_cache_dtype)
        if rows[0][1].dtype == torch.uint8:
            self._row_dtype = torch.uint8
        # Ahead of the engine's kernels: a copy takes microseconds of the device, and waits for as long as theirs else.
        self._streams: Spares[Any] = Spares(lambda: torch.cuda.Stream(self._device, priority=-1))

    def gather_heads(self, blocks: tuple[list[int], ...], mine: slice, layers: range, out: Bytes) -> None:
        """The rank's heads `mine` of the KDA layers numbered `layers` into their places in `out`, which holds these
        heads of all layers."""
        heads = mine.stop - mine.start
        size = self._layer_bytes
        target = torch.from_numpy(out).view(heads, -1)[:, layers.start * size : layers.stop * size]
        with self._stream():
            piece = torch.empty(target.shape, dtype=torch.uint8, device=self._device)
            for layer, (recurrent, conv) in zip(layers, self._head_views(piece, len(layers)), strict=True):
                group, conv_cache, recurrent_cache = self._states[layer]
                block = blocks[group][0]
                recurrent.copy_(recurrent_cache[block, mine])
                for part, source in zip(conv, self._conv_parts(conv_cache[block]), strict=True):
                    part.copy_(source[mine])
            target.copy_(piece, non_blocking=True)

    def prove_heads(
        self, blocks: tuple[list[int], ...], first: int, out: Bytes, layers: range | None = None
    ) -> Found:
        """Heads from `first` by the kernels, of all layers or [heads, layers, bytes] of some, with what they found on
        the way."""
        assert self.kernels is not None
        with self._stream():
            piece = torch.empty(out.nbytes // 8, dtype=torch.int64, device=self._device)
            found = self.kernels.gather_heads(blocks, first, piece, layers)
            torch.from_numpy(out).copy_(piece.view(torch.uint8), non_blocking=True)
        return found

    def check_heads(self, source: Bytes) -> tuple[Found, torch.Tensor]:
        """What the kernels find in staged heads, and a copy of those on the device, for `scatter_heads`."""
        assert self.kernels is not None
        with self._stream():
            piece = self._words(source)
            return self.kernels.check_heads(piece), piece

    def scatter_heads(self, blocks: tuple[list[int], ...], mine: slice, source: Bytes | torch.Tensor) -> None:
        """Inverse of `gather_heads`, for all KDA layers. Speculative convolution columns are left as they are."""
        heads = mine.stop - mine.start
        with self._stream():
            if self.kernels is not None:
                self.kernels.scatter_heads(blocks, mine.start, self._words(source))
                return
            assert isinstance(source, np.ndarray)
            piece = torch.from_numpy(source).view(heads, -1).to(self._device, non_blocking=True)
            views = self._head_views(piece, len(self._states))
            for (recurrent, conv), (group, conv_cache, recurrent_cache) in zip(
                views, self._states, strict=True
            ):
                block = blocks[group][0]
                recurrent_cache[block, mine].copy_(recurrent)
                for part, target in zip(conv, self._conv_parts(conv_cache[block]), strict=True):
                    target[mine].copy_(part)

    def gather_rows(self, tables: list[Table], out: Bytes) -> None:
        """Rows at `tables` a layer, token by token into `out`."""
        count = len(tables[0][0])
        with self._stream():
            piece = torch.empty(count, row_bytes(self.geometry), dtype=torch.uint8, device=self._device)
            for view, (_, cache), (ids, rows) in zip(
                self._row_views(piece), self._rows, self._on_device(tables), strict=True
            ):
                view.copy_(cache[ids, rows])
            torch.from_numpy(out).view(count, -1).copy_(piece, non_blocking=True)

    def prove_rows(self, tables: list[Table], out: Bytes, units: Ints) -> Found:
        """`gather_rows` by the kernels, with what they found; `units` as `ShardKernels.gather_rows` has it."""
        assert self.kernels is not None
        with self._stream():
            piece = torch.empty(out.nbytes // 8, dtype=torch.int64, device=self._device)
            found = self.kernels.gather_rows(tables, piece, units)
            torch.from_numpy(out).copy_(piece.view(torch.uint8), non_blocking=True)
        return found

    def check_rows(self, source: Bytes, units: Ints | None = None) -> tuple[Found, torch.Tensor]:
        """What the kernels find in staged rows, and a copy of those on the device; `units` as `prove_rows` has it."""
        assert self.kernels is not None
        with self._stream():
            piece = self._words(source)
            return self.kernels.check_rows(piece, units), piece

    def scatter_rows(self, tables: list[Table], source: Bytes | torch.Tensor) -> None:
        """Inverse of `gather_rows`."""
        count = len(tables[0][0])
        with self._stream():
            if self.kernels is not None:
                self.kernels.scatter_rows(tables, self._words(source))
                return
            assert isinstance(source, np.ndarray)
            piece = torch.from_numpy(source).view(count, -1).to(self._device, non_blocking=True)
            for view, (_, cache), (ids, rows) in zip(
                self._row_views(piece), self._rows, self._on_device(tables), strict=True
            ):
                cache[ids, rows] = view

    def _words(self, source: Bytes | torch.Tensor) -> torch.Tensor:
        """Staged bytes as words on the device; what is there already is not copied."""
        if isinstance(source, torch.Tensor):
            return source
        return torch.from_numpy(source).to(self._device, non_blocking=True).view(torch.int64)

    @property
    def _layer_bytes(self) -> int:
        """Bytes of one head of one layer."""
        return head_bytes(self.geometry) // len(self.geometry.kda_layers)

    def _head_views(
        self, data: torch.Tensor, layers: int
    ) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Per layer (recurrent [heads, V, K], convolution parts q, k, v [heads, columns, channels]) over `data`,
        bytes [heads, layers x bytes of a layer]."""
        g = self.geometry
        recurrent_bytes = g.head_v * g.head_k * g.recurrent_bytes
        at = 0
        for _ in range(layers):
            recurrent = data[:, at : at + recurrent_bytes].view(torch_dtype(g.recurrent_dtype))
            at += recurrent_bytes
            parts = []
            for channels in (g.head_k, g.head_k, g.head_v):
                nbytes = g.conv_columns * channels * g.conv_bytes
                part = data[:, at : at + nbytes].view(torch_dtype(g.conv_dtype))
                parts.append(part.unflatten(1, (g.conv_columns, channels)))
                at += nbytes
            yield recurrent.unflatten(1, (g.head_v, g.head_k)), parts

    def _conv_parts(self, conv: torch.Tensor) -> list[torch.Tensor]:
        """Views [heads, history columns, channels] of the q, k and v parts of one block's convolution state."""
        g = self.geometry
        columns = conv.t() if g.conv_layout == "DS" else conv
        history = columns[: g.conv_columns]
        heads = g.heads_per_rank
        sizes = [heads * g.head_k, heads * g.head_k, heads * g.head_v]
        return [part.unflatten(1, (heads, -1)).transpose(0, 1) for part in history.split(sizes, dim=1)]

    def _row_views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Per MLA layer its part [rows, latent width] of `data`, bytes [rows, bytes of a row]."""
        width = self.geometry.latent_row_bytes
        return [
            data[:, layer * width : (layer + 1) * width].view(self._row_dtype)
            for layer in range(len(self._rows))
        ]

    def _on_device(self, tables: list[Table]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Layers of a group have one table, which crosses once."""
        last: Table | None = None
        for table in tables:
            if table is not last:
                last = table
                ids, rows = (torch.from_numpy(part).to(self._device, non_blocking=True) for part in table)
            yield ids, rows

    @contextlib.contextmanager
    def _stream(self) -> Iterator[None]:
        """A stream that nobody else uses now; its work has ended when the block has."""
        if self._device.type != "cuda":
            yield
            return
        with (
            self._streams.one() as stream,
            torch.cuda.device(self._device),
            torch.cuda.stream(stream),
        ):
            try:
                yield
            finally:
                # Also when one copy failed: those before it must not write any more once this has been reported.
                stream.synchronize()


def kernels_for(
    geometry: Geometry, states: list[State], rows: list[tuple[int, torch.Tensor]]
) -> ShardKernels | None:
    """The kernels for caches on a GPU, compiled, unless the environment refuses them (`KERNELS_VARIABLE`).

    None otherwise, and, with a line in the log, where they cannot copy these caches.
    Raises ValueError for a value of the variable that says neither yes nor no.
    """
    chosen = os.environ.get(KERNELS_VARIABLE, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"{KERNELS_VARIABLE}={chosen!r}: 1 or nothing copies by kernels, 0 by torch")
    device = rows[0][1].device
    if device.type != "cuda" or chosen == "0":
        return None
    why = ""
    try:
        from statestore.gpu.launch import ShardKernels, refusal

        why = refusal(geometry, states, rows)
        if not why:
            with torch.cuda.device(device):
                kernels = ShardKernels(geometry, states, rows)
                kernels.compile()
            log.info("state is copied and its digests are taken by kernels on %s", device)
            return kernels
    except Exception as error:  # no Triton, no compiler: torch's copies do the same, slower
        why = f"{type(error).__name__}: {error}"
    log.warning("no kernels for copies of state (%s); torch copies it, the host takes its digests", why)
    return None


def pin(device: torch.device, memory: Bytes) -> Callable[[], None]:
    """Lock host memory for the device's copies at full speed; returns what undoes it, before the memory goes.

    Raises RuntimeError naming the limit that refused.
    """
    runtime = torch.cuda.cudart()
    address = memory.ctypes.data
    # On another device the call would make a context there, which takes some hundred MB of its memory.
    with torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if code != 0:
        raise RuntimeError(
            f"cudaHostRegister of {memory.nbytes} bytes of staging failed with code {code}; "
            "raise the limit of locked memory (ulimit -l), or lower max_model_len"
        )
    return lambda: runtime.cudaHostUnregister(address)


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a geometry's."""
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float8_e4m3": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }[name]
