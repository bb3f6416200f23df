# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start and the ring inside an engine that keeps states in blocks: its requests' records between two steps.

An engine calls ``plan`` once a step before its layers run, ``advance`` in every layer (capturable: the plan lies in
buffers that stay where they are), and ``commit`` after sampling. Records belong to a request (its row in the engine's
tables), not to a block: a request that starts anew calls ``forget``, whatever lies in its rows and blocks.

What ``commit`` leaves pending is folded by the request's next window, or, in the ring, by the window that finds
``flush_at`` records; until then every window takes it into account. It is folded at once where somebody reads the
state before that: the request has reached the end of a block (the prefix cache keeps the state there), its next window
may reach one (the engine then copies the state into the next block first), or the caller says so (``flush_now``).

Everything that depends on accepted counts is computed on the device, without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from decode_worker.replay_ssm import gpu_path
from decode_worker.replay_ssm.records import WindowPlan, WindowRecords

FLUSH_ROWS = 32
"""Rows of V that a program of the flush works on at once."""


@dataclass(frozen=True)
class LayerTensors:
    """One layer as the engine holds it: fp32 parameters, ``state`` [slots, H, V, K], ``conv`` [slots, C, 2 + T]."""

    conv_weight: Tensor
    """[C, 4] stored tap by tap."""
    a_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    state: Tensor
    conv: Tensor
    records: WindowRecords


def _same(layers: Mapping[str, LayerTensors]) -> LayerTensors:
    """Return one of the layers. Raise ``ValueError`` unless one launch can serve them all."""
    if not layers:
        raise ValueError("layers: at least one is needed")

    def shape(layer: LayerTensors) -> tuple[object, ...]:
        tensors = (layer.state, layer.conv, layer.records.u, layer.records.key_gate)
        return (layer.lower_bound, *((t.dtype, tuple(t.shape[1:]), t.stride()) for t in tensors))

    first = next(iter(layers.values()))
    for name, layer in layers.items():
        if shape(layer) != shape(first):
            raise ValueError(f"layer {name} is laid out as {shape(layer)}, the first one as {shape(first)}")
    if first.records.u.shape[0] % 2:
        raise ValueError(f"records hold {first.records.u.shape[0]} rows: two are needed a request")
    return first


class EngineRecords:
    """The pending records of up to ``max_requests`` requests in a group of layers that share a block table."""

    def __init__(
        self,
        layers: Mapping[str, LayerTensors],
        window: int,
        *,
        flush_at: int = 1,
        config: gpu_path.KernelConfig | None = None,
    ) -> None:
        """``window`` is T, the most tokens of a window; ``flush_at`` above 1 is the ring, whose rows hold
        ``window`` + ``flush_at`` - 1 records; two record rows a request say how many requests there are; ``config``
        None is what ``gpu_path.choose`` says, without programmatic dependent launch: among an engine's other
        kernels there is nothing to gain from it.

        Raise ``ValueError`` for layers that differ, or a window that the kernels or the caches do not take.
        """
        first = _same(layers)
        _, heads, value_dim, key_dim = first.state.shape
        capacity = first.records.u.shape[2]
        if window > gpu_path.TILE or window + flush_at - 1 > capacity:
            raise ValueError(
                f"window={window}, flush_at={flush_at}: the kernels take {gpu_path.TILE} positions, a row holds "
                f"{capacity} records of window + flush_at - 1; set num_speculative_tokens below {gpu_path.TILE}"
            )
        if first.conv.shape[2] != window + 2:
            raise ValueError(
                f"conv has {first.conv.shape[2]} columns, a window of {window} needs {window + 2}"
            )
        if key_dim % FLUSH_ROWS or value_dim % FLUSH_ROWS:
            raise ValueError(f"state is [.., {value_dim}, {key_dim}]: both must be multiples of {FLUSH_ROWS}")
        self.layers = dict(layers)
        everyone = list(layers.values())
        self.window = window
        self.flush_at = flush_at
        self.capacity = capacity
        self.config = config
        self.max_requests = first.records.u.shape[0] // 2
        device = first.state.device
        self.workspace = None
        if self._cut(1).kernel == "portable":
            self.workspace = gpu_path.Workspace(
                self.max_requests, heads, capacity, dtype=first.records.key_gate.dtype, device=device
            )

        def zeros(size: int = self.max_requests) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._pending = zeros()
        """A request's accepted tokens of its last window."""
        self._base = zeros()
        """Its records of the windows before that one (the ring)."""
        self._parity = zeros()
        self._requests = zeros()
        self._slots, self._read_rows, self._write_rows = zeros(), zeros(), zeros()
        self._step_pending, self._write_at, self._conv_first = zeros(), zeros(), zeros()
        self._cu = zeros(self.max_requests + 1)
        self._flush_all = False
        self._views: dict[int, WindowPlan] = {}

        def table(tensors: Sequence[Tensor]) -> Tensor:
            return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

        self._tables = (
            table([layer.state for layer in everyone]),
            table([layer.conv for layer in everyone]),
            table([layer.records.u for layer in everyone]),
            table([layer.records.key_gate for layer in everyone]),
        )
        self._a_log = torch.stack([layer.a_log.reshape(-1) for layer in everyone]).float().contiguous()
        self._dt_bias = torch.stack([layer.dt_bias.reshape(-1) for layer in everyone]).float().contiguous()

    def _cut(self, windows: int) -> gpu_path.KernelConfig:
        """How the kernels are cut for a step of ``windows``."""
        heads = next(iter(self.layers.values())).state.shape[1]
        return self.config or replace(gpu_path.choose(self.capacity, windows * heads), overlap=False)

    def warm_up(self, *, align: bool) -> None:
        """Have every kernel compiled that a step may need, so that no served step waits for a compiler.

        Runs each on padding, before there are requests: no slot, no row and no pending count changes. ``align`` says
        whether ``commit`` will be told where blocks end.
        """
        first = next(iter(self.layers.values()))
        _, heads, value_dim, _ = first.state.shape
        channels, device, dtype = first.conv.shape[1], first.state.device, first.records.key_gate.dtype
        begin = torch.zeros(2, dtype=torch.int32, device=device)
        nobody = torch.zeros(1, dtype=torch.int32, device=device)
        for mapping in (nobody, nobody.long()):
            for request_indices in (None, nobody):
                self.plan(mapping, nobody, begin, windows=0, request_indices=request_indices)
        x = torch.zeros(1, channels, dtype=dtype, device=device)
        raw_g = torch.zeros(1, 1, heads, channels // 3 // heads, dtype=dtype, device=device)
        out = torch.zeros(1, 1, heads, value_dim, dtype=dtype, device=device)
        wide = torch.zeros(1, 1, 16 * heads, dtype=dtype, device=device)[..., :heads]
        name = next(iter(self.layers))
        # Betas are a part of a wide projection, or were gathered: rows that are multiples of 16, or of the heads alone.
        for raw_beta in (wide, torch.zeros(1, 1, heads, dtype=dtype, device=device)):
            for cut in {self._cut(1), self._cut(self.max_requests)}:
                self._launch(name, x, raw_g, raw_beta, out, 1, cut)
        blocks: dict[str, Any] = {}
        if align:
            blocks = {
                "block_table": nobody[None],
                "num_computed_tokens": nobody,
                "mamba_block_size": self.window,
            }
        for flush_now in (False, True):
            for request_indices in (None, nobody):
                self._flush_all = flush_now
                self.commit(nobody, nobody, begin, request_indices=request_indices, **blocks)
        self._flush_all = False

    def forget(self, request: int) -> None:
        """A request begins in this row: nothing is pending, whatever its predecessor left."""
        # Not by an assignment, which copies the number from the host and waits for the device.
        self._pending[request : request + 1].zero_()
        if self.flush_at > 1:
            self._base[request : request + 1].zero_()

    def plan(
        self,
        idx_mapping: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        *,
        windows: int,
        request_indices: Tensor | None = None,
        flush_now: bool = False,
    ) -> WindowPlan:
        """The step's windows. Afterwards nothing is pending but what this step's layers do not fold (the ring).

        ``idx_mapping`` gives a batch row's request, ``request_indices`` [windows] a window's batch row (None: the
        same), ``state_indices`` [>= windows] its slot (0: padding), ``query_start_loc`` [windows + 1] its tokens.
        ``flush_now``: somebody reads these states after the step. The plan has a row for every request, so a
        graph captured with more rows than this step has windows finds padding there.
        """
        from decode_worker.replay_ssm import gpu_engine_kernels

        if windows > self.max_requests:
            raise ValueError(f"{windows} windows: the records were made for {self.max_requests} requests")
        self._flush_all = flush_now
        block = 128
        gpu_engine_kernels.plan_step[(self.max_requests // block + 1,)](
            idx_mapping, request_indices, state_indices, query_start_loc, self._pending, self._base,
            self._parity, self._slots, self._cu, self._requests, self._read_rows, self._write_rows,
            self._step_pending, self._write_at, self._conv_first,
            windows, self.max_requests, self.flush_at, state_indices.stride(0),
            MAPPED=request_indices is not None, BLOCK=block,
        )  # fmt: skip
        return self.rows(windows)

    def rows(self, windows: int) -> WindowPlan:
        """The plan's first ``windows`` rows; what a layer's launch takes. Views of buffers that stay where they are."""
        if windows not in self._views:
            self._views[windows] = WindowPlan(
                self._cu[: windows + 1],
                self._slots[:windows],
                self._read_rows[:windows],
                self._write_rows[:windows],
                self._step_pending[:windows],
                self._write_at[:windows],
                self._conv_first[:windows],
                self.flush_at,
                self.window,
            )
        return self._views[windows]

    def advance(
        self, name: str, x: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor, windows: int
    ) -> None:
        """A layer's part of the step, for the plan's first ``windows`` rows; as ``gpu_path.advance_window``."""
        self._launch(name, x, raw_g, raw_beta, out, windows, self._cut(windows))

    def _launch(
        self,
        name: str,
        x: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        out: Tensor,
        windows: int,
        cut: gpu_path.KernelConfig,
    ) -> None:
        layer = self.layers[name]
        gpu_path.advance_window(
            x,
            layer.conv_weight,
            layer.conv,
            raw_g,
            raw_beta,
            a_log=layer.a_log,
            dt_bias=layer.dt_bias,
            lower_bound=layer.lower_bound,
            state=layer.state,
            records=layer.records,
            plan=self.rows(windows),
            out=out,
            workspace=self.workspace,
            config=cut,
        )

    def commit(
        self,
        num_accepted_tokens: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        request_indices: Tensor | None = None,
        block_table: Tensor | None = None,
        num_computed_tokens: Tensor | None = None,
        mamba_block_size: int | None = None,
    ) -> None:
        """After sampling: keep ``num_accepted_tokens`` [batch rows] tokens of every window of the last plan.

        The last three say where blocks end, for an engine that keeps states there: ``block_table`` [batch rows,
        blocks] slots, ``num_computed_tokens`` [batch rows] before the step, ``mamba_block_size`` tokens. Raise
        ``ValueError`` when a block is shorter than a window.
        """
        from decode_worker.replay_ssm import gpu_engine_kernels

        windows = state_indices.shape[0]
        if windows == 0:
            return
        align = block_table is not None
        if align and (mamba_block_size is None or mamba_block_size < self.window):
            raise ValueError(
                f"mamba_block_size={mamba_block_size}: a block must hold a window of {self.window}"
            )
        if not align and not self._flush_all:
            gpu_engine_kernels.commit_step[(windows,)](
                num_accepted_tokens, request_indices, self._requests, self._slots, self._cu, self._pending,
                MAPPED=request_indices is not None, num_warps=1,
            )  # fmt: skip
            return
        first = next(iter(self.layers.values()))
        _, heads, value_dim, key_dim = first.state.shape
        states, convs, us, key_gates = self._tables
        table = (1, 0, 0) if block_table is None else (block_table.shape[1], *block_table.stride())
        bounded = first.lower_bound is not None
        gpu_engine_kernels.commit_layers[(windows, len(self.layers), heads)](
            num_accepted_tokens, request_indices, self._requests, self._slots, self._cu,
            block_table, num_computed_tokens, self._pending, self._base, self._write_at,
            first.state, states, first.conv, convs, first.records.u, us, first.records.key_gate, key_gates,
            self._a_log, self._dt_bias, self._write_rows, first.lower_bound if bounded else 0.0,
            int(self._flush_all), mamba_block_size or 1, *table,
            first.state.stride(0), first.conv.stride(0), first.conv.stride(2), first.conv.stride(1),
            first.records.u.stride(0), first.records.u.stride(1),
            first.records.key_gate.stride(0), first.records.key_gate.stride(1),
            heads,
            K=key_dim, V=value_dim, BV=FLUSH_ROWS, WIDTH=4, BOUNDED=bounded,
            MAPPED=request_indices is not None, ALIGN=align, WINDOW=self.window, num_warps=4,
        )  # fmt: skip
