# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start and the ring on a Hopper GPU: checks the arguments and launches the kernels.

Either is one launch a step and layer, for record rows of at most ``RING_RECORDS``. The portable kernels take longer
ones: two launches, the preparation of the windows, which touches no state, and the pass over the state; between them
the windows' vectors lie in a ``Workspace`` that all layers share. The reasons for the cut are measurements, in
docs/replay_ssm.md.

Triton is imported when a kernel is first launched, so a CPU installation works without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from decode_worker.replay_ssm.records import WindowPlan, WindowRecords

TILE = 8
"""Positions that a window is padded to; twice that is one tile of the tensor cores."""

RING_RECORDS = 3 * TILE
"""Most records a row of the Hopper kernel's ring: 16 accepted tokens and a window of 8 need 23."""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

HEAD_DIM = 128
"""K and V of K3 and of Kimi-Linear; the kernels' layouts are made for it."""


@dataclass(frozen=True)
class KernelConfig:
    """How the kernels are cut."""

    kernel: Literal["fused", "portable"] = "fused"
    """"fused": Gluon, one launch, at most ``RING_RECORDS`` a row; "portable": Triton, any number."""
    warps: int = 8
    """Warps a program; "fused" has 16 rows of V in the registers of each at a time."""
    registers: int | None = 128
    """Upper bound of registers a thread, or None for the compiler's choice. 128 lets two programs of 8 warps fit."""
    value_tile: int = 32
    """"portable": rows of V a program works on."""
    dot: Literal["tf32x3", "ieee"] = "tf32x3"
    """"portable": precision of the products."""
    first_out: bool = True
    """"fused": mark what nobody reads again soon to leave the L2 cache first."""
    stream: bool = False
    """"fused": hold no more rows of the state in shared memory than the warps work on; with 4 warps and 168 registers,
    three programs fit on a multiprocessor."""
    overlap: bool = True
    """Programmatic dependent launch: a kernel's programs are placed while those of the one before it end."""


def choose(capacity: int, programs: int) -> KernelConfig:
    """The cut for record rows that hold ``capacity`` records and ``programs`` = requests times heads.

    Few programs are done soonest with more warps each. More of them than two a multiprocessor want a third beside them:
    four warps and half of the state at a time leave room for it. The ring's records leave none that pays.
    """
    if capacity > RING_RECORDS:
        return KernelConfig(kernel="portable", warps=2, registers=None)
    if capacity <= TILE and programs > 2 * MULTIPROCESSORS:
        return KernelConfig(warps=4, registers=168, stream=True)
    return KernelConfig()


class Workspace:
    """Prepared windows of one step: written by the first kernel, read by the second, shared by all layers."""

    def __init__(
        self,
        max_requests: int,
        heads: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate for up to ``max_requests`` requests; ``capacity`` as in ``RecordRows``, ``dtype`` the model's."""
        self.max_requests = max_requests
        self.records = max(TILE, 1 << (capacity - 1).bit_length())
        f32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.rows = torch.empty(max_requests, heads, 2 * TILE, HEAD_DIM, **f32)
        """-K e^G, then Q e^G."""
        self.values = torch.empty(max_requests, heads, TILE, HEAD_DIM, dtype=dtype, device=device)
        self.triangle = torch.zeros(max_requests, heads, 2 * TILE, 2 * TILE, **f32)
        """[[T beta, 0], [P T beta, 1]] with T = (I + A)^-1: times [V - K e^G S^T; Q e^G S^T] it gives [U; O]. The right
        half never changes."""
        self.triangle[..., TILE:, TILE:] = torch.eye(TILE, **f32)
        self.keys = torch.empty(max_requests, heads, self.records + 1, HEAD_DIM, **f32)
        """The decay of the whole fold, then the pending keys decayed to its end."""


@dataclass(frozen=True)
class _Step:
    """What one layer's step is given; names and shapes as in ``torch_path.advance_window``."""

    x: Tensor
    conv_weight: Tensor
    conv_cache: Tensor
    raw_g: Tensor
    raw_beta: Tensor
    a_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    state: Tensor
    records: WindowRecords
    plan: WindowPlan
    out: Tensor

    @property
    def heads(self) -> int:
        return self.state.shape[1]

    @property
    def windows(self) -> int:
        return self.plan.slots.shape[0]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments that every kernel that prepares windows begins with."""
        plan = self.plan
        return (
            self.x, self.conv_weight, self.conv_cache, self.raw_g, self.raw_beta, self.a_log, self.dt_bias,
            self.records.key_gate, plan.cu_seqlens, plan.slots, plan.read_rows, plan.write_rows, plan.pending,
            plan.write_at, plan.conv_first,
        )  # fmt: skip

    @property
    def input_strides(self) -> tuple[int, ...]:
        """Of the convolution's cache (slot, column, channel), the gates, the betas, and the records of k and g."""
        return (
            self.conv_cache.stride(0), self.conv_cache.stride(2), self.conv_cache.stride(1),
            self.raw_g.stride(-3), self.raw_beta.stride(-2),
            self.records.key_gate.stride(0), self.records.key_gate.stride(1),
        )  # fmt: skip

    @property
    def gate_bound(self) -> float:
        """What a kernel is given as ``lower_bound``, also where BOUNDED is False."""
        return 0.0 if self.lower_bound is None else self.lower_bound

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of every kernel that prepares windows."""
        width = self.conv_weight.shape[1]
        return {
            "K": HEAD_DIM,
            "V": HEAD_DIM,
            "TP": TILE,
            "WIDTH": width,
            "DROP": width - 1 + self.plan.window - self.conv_cache.shape[2],
            "BOUNDED": self.lower_bound is not None,
        }


def _check(step: _Step, workspace: Workspace | None, config: KernelConfig) -> None:
    x, state, records, plan = step.x, step.state, step.records, step.plan
    conv_weight, conv_cache = step.conv_weight, step.conv_cache
    value_dim, key_dim = state.shape[2:]
    if key_dim != HEAD_DIM or value_dim != HEAD_DIM:
        raise ValueError(
            f"state is [.., {value_dim}, {key_dim}]: the GPU kernels take K = V = {HEAD_DIM}; use the torch path"
        )
    if state.dtype != torch.float32 or state[0].is_contiguous() is False:
        raise ValueError(f"state must be fp32 with contiguous slots, not {state.dtype}")
    if plan.window > TILE:
        raise ValueError(
            f"window={plan.window}: the GPU kernels take at most {TILE} positions; "
            f"set num_speculative_tokens below {TILE}"
        )
    if config.kernel == "fused":
        if records.u.shape[2] > RING_RECORDS:
            raise ValueError(
                f"records hold {records.u.shape[2]} a row: the fused kernel takes {RING_RECORDS}; "
                "use kernel='portable'"
            )
    elif workspace is None:
        raise ValueError("workspace: the portable kernels need one")
    elif plan.slots.shape[0] > workspace.max_requests:
        raise ValueError(
            f"{plan.slots.shape[0]} requests: the workspace was made for {workspace.max_requests}; raise max_requests"
        )
    if conv_weight.shape[1] != 4 or conv_weight.stride(0) != 1:
        raise ValueError(
            "conv_weight must be [C, 4] stored tap by tap (a transposed [4, C]), so that channels are contiguous"
        )
    if x.stride(-1) != 1 or conv_cache.shape[2] not in (plan.window + 2, plan.window + 3):
        raise ValueError(
            f"x must have contiguous channels, and conv_cache {plan.window + 2} or {plan.window + 3} columns, "
            f"not {conv_cache.shape[2]}"
        )


def advance_window(
    x: Tensor,
    conv_weight: Tensor,
    conv_cache: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    records: WindowRecords,
    plan: WindowPlan,
    out: Tensor,
    workspace: Workspace | None = None,
    config: KernelConfig | None = None,
) -> None:
    """As ``torch_path.advance_window``, for bf16 (or fp32) inputs on a GPU.

    ``conv_weight`` [C, 4] must be stored tap by tap; ``workspace`` is for the portable kernels. Rows of ``out``
    that belong to no window (CUDA graph padding) are left alone. Raise ``ValueError`` for shapes that the kernels do
    not take.
    """
    config = config or choose(records.u.shape[2], plan.slots.shape[0] * state.shape[1])
    step = _Step(
        x, conv_weight, conv_cache, raw_g, raw_beta, a_log, dt_bias, lower_bound, state, records, plan, out
    )  # fmt: skip
    _check(step, workspace, config)
    if workspace is None or config.kernel == "fused":
        _launch_fused(step, config)
        return
    _launch_prepare(step, workspace, config)
    _launch_advance(step, workspace, config)


def _launch_fused(step: _Step, config: KernelConfig) -> None:
    """The whole step in one launch, a program a (request, head)."""
    from decode_worker.replay_ssm import gluon_kernels

    options: dict[str, Any] = {"num_warps": config.warps, "NW": config.warps, "PDL": config.overlap}
    if config.overlap:
        options["launch_pdl"] = True
    if config.registers is not None:
        options["maxnreg"] = config.registers
    u, out = step.records.u, step.out
    gluon_kernels.advance_window[(step.windows * step.heads,)](
        *step.inputs, step.state, u, out, step.gate_bound, step.plan.flush_at,
        step.x.stride(0), step.conv_weight.stride(1), *step.input_strides,
        step.state.stride(0), u.stride(0), u.stride(1), out.stride(-3), step.heads,
        **step.constants, BV=16 * config.warps, STREAM=config.stream, TILES=1 if u.shape[2] <= TILE else 3,
        DEEP=2 if step.plan.window <= 2 else 4 if step.plan.window <= 4 else TILE,
        POLICY="evict_first" if config.first_out else "", **options,
    )  # fmt: skip


def _launch_prepare(step: _Step, workspace: Workspace, config: KernelConfig) -> None:
    """The first launch: convolution and its columns, gates, triangle, pending keys. One program a (request, head)."""
    from decode_worker.replay_ssm import triton_kernels

    options: dict[str, Any] = {"launch_pdl": True} if config.overlap else {}
    triton_kernels.prepare_window[(step.windows * step.heads,)](
        *step.inputs, workspace.rows, workspace.values, workspace.triangle, workspace.keys, step.gate_bound,
        step.x.stride(0), step.conv_weight.stride(0), step.conv_weight.stride(1), *step.input_strides, step.heads,
        **step.constants, RP=workspace.records, PDL=config.overlap, num_warps=4, **options,
    )  # fmt: skip


def _launch_advance(step: _Step, workspace: Workspace, config: KernelConfig) -> None:
    """The second launch: fold, write the state where it is due, verify, leave the corrections."""
    from decode_worker.replay_ssm import triton_kernels

    state, u, out, plan = step.state, step.records.u, step.out, step.plan
    options: dict[str, Any] = {"launch_pdl": True} if config.overlap else {}
    if config.registers is not None:
        options["maxnreg"] = config.registers
    triton_kernels.advance_state[(step.windows * step.heads * (HEAD_DIM // config.value_tile),)](
        state, u, workspace.rows, workspace.values, workspace.triangle, workspace.keys, out,
        plan.cu_seqlens, plan.slots, plan.read_rows, plan.write_rows, plan.pending, plan.write_at, plan.flush_at,
        state.stride(0), u.stride(0), u.stride(1), out.stride(-3), step.heads,
        DOT=config.dot, K=HEAD_DIM, V=HEAD_DIM, BV=config.value_tile, TP=TILE, RP=workspace.records,
        PDL=config.overlap, num_warps=config.warps, **options,
    )  # fmt: skip


def flush_pending(
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    conv_cache: Tensor,
    records: WindowRecords,
    read_rows: Tensor,
    counts: Tensor,
    conv_first: Tensor,
    source_slots: Tensor,
    target_slots: Tensor,
    conv_width: int,
) -> None:
    """As ``torch_path.flush_pending``. No row's target may be another row's source."""
    from decode_worker.replay_ssm import triton_kernels

    _, heads, value_dim, key_dim = state.shape
    tile = 32
    triton_kernels.flush_pending[(counts.shape[0] * heads * (value_dim // tile),)](
        state, conv_cache, records.u, records.key_gate, a_log, dt_bias, read_rows, counts, conv_first,
        source_slots, target_slots, 0.0 if lower_bound is None else lower_bound,
        state.stride(0), conv_cache.stride(0), conv_cache.stride(2), conv_cache.stride(1),
        records.u.stride(0), records.u.stride(1), records.key_gate.stride(0), records.key_gate.stride(1),
        heads,
        K=key_dim, V=value_dim, BV=tile, WIDTH=conv_width, BOUNDED=lower_bound is not None, num_warps=4,
    )  # fmt: skip
