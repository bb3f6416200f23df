# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start and the ring on a Hopper GPU: checks the arguments and launches the kernels.

A step of a layer is two launches whatever the batch: the preparation of the windows, which touches no state, and the
pass over the state. Between them the windows' vectors lie in a ``Workspace`` that all layers share, small enough to
stay in the L2 cache. ``choose`` picks the cut of the kernels; the reasons are measurements, in docs/replay_ssm.md.

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

HEAD_DIM = 128
"""K and V of K3 and of Kimi-Linear; the kernels' layouts are made for it."""


@dataclass(frozen=True)
class KernelConfig:
    """How the kernels are cut."""

    prepare: Literal["gluon", "triton"] = "gluon"
    """Gluon takes up to 8 records a row (fold at start); Triton any number (the ring)."""
    prepare_warps: int = 4
    prepare_registers: int | None = 128
    """Upper bound of registers a thread, or None for the compiler's choice."""
    advance: Literal["gluon", "stream", "triton"] = "gluon"
    """"gluon": a program a tile; "stream": persistent programs that read ahead; "triton": portable."""
    value_tile: int = 16
    """Rows of V a program works on at once."""
    warps: int = 1
    group: int = 4
    """Records that "gluon" folds between two looks at the count."""
    dot: Literal["tf32x3", "ieee"] = "tf32x3"
    """Precision of the products of "triton"."""
    programs: int | None = None
    """Programs of "stream"; None for two a multiprocessor, which is what fits."""
    first_out: bool = True
    """Mark what nobody reads again soon to leave the L2 cache first, so that the workspace stays in it."""
    registers: int | None = None
    overlap: bool = True
    """Programmatic dependent launch: the pass over the state starts reading while the preparation runs."""


def choose(heads: int, batch: int, capacity: int) -> KernelConfig:
    """The cut for ``batch`` requests of ``heads`` heads whose record rows hold ``capacity`` records."""
    if capacity > TILE:
        return KernelConfig(
            prepare="triton", prepare_registers=None, advance="triton", value_tile=32, warps=2
        )
    # With few heads, one-warp programs spread over more multiprocessors; with very few, reading ahead wins again. The
    # preparation of a large batch wants more programs at once, that of a small one the compiler's schedule.
    if 32 < heads * batch <= 192:
        return KernelConfig(prepare_registers=None)
    registers = None if heads * batch <= 1024 else 128
    return KernelConfig(prepare_registers=registers, advance="stream", value_tile=64, warps=4)


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


def _check(
    x: Tensor, conv_weight: Tensor, conv_cache: Tensor, state: Tensor, plan: WindowPlan, workspace: Workspace
) -> None:
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
    if plan.slots.shape[0] > workspace.max_requests:
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
    workspace: Workspace,
    config: KernelConfig | None = None,
) -> None:
    """As ``torch_path.advance_window``, for bf16 (or fp32) inputs on a GPU.

    ``conv_weight`` [C, 4] must be stored tap by tap. Raise ``ValueError`` for shapes that the kernels do not take.
    Rows of ``out`` that belong to no window (CUDA graph padding) are left alone.
    """
    _check(x, conv_weight, conv_cache, state, plan, workspace)
    if config is None:
        config = choose(state.shape[1], plan.slots.shape[0], records.u.shape[2])
    launch_prepare(
        x,
        conv_weight,
        conv_cache,
        raw_g,
        raw_beta,
        a_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        records=records,
        plan=plan,
        workspace=workspace,
        config=config,
    )
    launch_advance(state, records, plan, workspace, out, config)


def launch_prepare(
    x: Tensor,
    conv_weight: Tensor,
    conv_cache: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    records: WindowRecords,
    plan: WindowPlan,
    workspace: Workspace,
    config: KernelConfig,
) -> None:
    """The first launch: convolution and its columns, gates, triangle, pending keys. One program a (request, head)."""
    heads = raw_g.shape[-2]
    width = conv_weight.shape[1]
    grid = (plan.slots.shape[0] * heads,)
    tensors = (
        x, conv_weight, conv_cache, raw_g, raw_beta, a_log, dt_bias,
        records.key_gate, plan.cu_seqlens, plan.slots, plan.read_rows, plan.write_rows, plan.pending, plan.write_at,
        plan.conv_first, workspace.rows, workspace.values, workspace.triangle, workspace.keys,
        0.0 if lower_bound is None else lower_bound,
    )  # fmt: skip
    strides = (
        conv_cache.stride(0), conv_cache.stride(2), conv_cache.stride(1), raw_g.stride(-3), raw_beta.stride(-2),
        records.key_gate.stride(0), records.key_gate.stride(1), heads,
    )  # fmt: skip
    options: dict[str, Any] = {
        "K": HEAD_DIM,
        "V": HEAD_DIM,
        "TP": TILE,
        "WIDTH": width,
        "DROP": width - 1 + plan.window - conv_cache.shape[2],
        "BOUNDED": lower_bound is not None,
        "PDL": config.overlap,
        "num_warps": config.prepare_warps,
    }
    if config.overlap:
        options["launch_pdl"] = True
    if config.prepare_registers is not None:
        options["maxnreg"] = config.prepare_registers
    policy = "evict_first" if config.first_out else ""
    if config.prepare == "gluon":
        from decode_worker.replay_ssm import gluon_prepare

        gluon_prepare.prepare_window[grid](
            *tensors,
            x.stride(0),
            conv_weight.stride(1),
            *strides,
            NW=config.prepare_warps,
            POLICY=policy,
            **options,
        )
        return
    from decode_worker.replay_ssm import triton_kernels

    triton_kernels.prepare_window[grid](
        *tensors,
        x.stride(0),
        conv_weight.stride(0),
        conv_weight.stride(1),
        *strides,
        RP=workspace.records,
        **options,
    )


def launch_advance(
    state: Tensor,
    records: WindowRecords,
    plan: WindowPlan,
    workspace: Workspace,
    out: Tensor,
    config: KernelConfig,
) -> None:
    """The second launch: fold, write the state where it is due, verify, leave the corrections."""
    heads = state.shape[1]
    tiles = plan.slots.shape[0] * heads * (HEAD_DIM // config.value_tile)
    arguments = (
        state, records.u, workspace.rows, workspace.values, workspace.triangle, workspace.keys, out,
        plan.cu_seqlens, plan.slots, plan.read_rows, plan.write_rows, plan.pending, plan.write_at, plan.flush_at,
        state.stride(0), records.u.stride(0), records.u.stride(1), out.stride(-3), heads,
    )  # fmt: skip
    options: dict[str, Any] = {
        "K": HEAD_DIM,
        "V": HEAD_DIM,
        "BV": config.value_tile,
        "TP": TILE,
        "RP": workspace.records,
        "PDL": config.overlap,
        "num_warps": config.warps,
    }
    if config.overlap:
        options["launch_pdl"] = True
    if config.registers is not None:
        options["maxnreg"] = config.registers
    policy = "evict_first" if config.first_out else ""
    if config.advance == "stream":
        from decode_worker.replay_ssm import gluon_stream

        limit = config.programs
        if limit is None:
            limit = 2 * torch.cuda.get_device_properties(state.device).multi_processor_count
        gluon_stream.advance_stream[(min(tiles, limit),)](
            *arguments, tiles, NW=config.warps, POLICY=policy, **options
        )
    elif config.advance == "gluon":
        from decode_worker.replay_ssm import gluon_kernels

        gluon_kernels.advance_state[(tiles,)](*arguments, GROUP=config.group, NW=config.warps, **options)
    else:
        from decode_worker.replay_ssm import triton_kernels

        triton_kernels.advance_state[(tiles,)](*arguments, DOT=config.dot, **options)


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
