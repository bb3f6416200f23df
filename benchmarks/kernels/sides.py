# SPDX-License-Identifier: Apache-2.0
"""What is compared. Every function returns microseconds of one layer's speculative step, convolution included."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.kernels.layers import DIM, LOWER_BOUND, Layers
from benchmarks.kernels.timing import graph_us
from decode_worker.replay_ssm.gpu_path import KernelConfig, Workspace, advance_window

CUTS = [
    KernelConfig(),
    KernelConfig(warps=4, registers=None),
    KernelConfig(warps=4, registers=168),
    KernelConfig(warps=4, registers=168, stream=True),
    KernelConfig(warps=4, registers=128, stream=True),
]
"""Cuts of the kernel that ``tune`` tries."""

LAYERS_A_COMMIT = 69
"""RecoverSSM folds all layers of a model in one launch; K3 has 69 KDA layers."""


def _gate(layers: Layers) -> dict[str, Any]:
    return {"a_log": layers.a_log, "dt_bias": layers.dt_bias, "lower_bound": LOWER_BOUND}


def replay_ssm(layers: Layers, config: KernelConfig | None = None) -> float:
    """This project's kernels."""
    capacity = layers.records[0].u.shape[2]
    space = Workspace(layers.batch, layers.heads, capacity, dtype=torch.bfloat16, device="cuda")

    def step(i: int) -> None:
        advance_window(
            layers.x[i],
            layers.weight,
            layers.conv[i],
            layers.raw_g[i],
            layers.raw_beta[i],
            **_gate(layers),
            state=layers.state[i],
            records=layers.records[i],
            plan=layers.plan,
            out=layers.out[i],
            workspace=space,
            config=config,
        )

    return graph_us([partial(step, i) for i in range(layers.count)])


def tune(layers: Layers) -> list[tuple[float, KernelConfig]]:
    """Every one of ``CUTS``, fastest first."""
    return sorted(((replay_ssm(layers, config), config) for config in CUTS), key=lambda r: r[0])


def _heads(layers: Layers, i: int) -> list[torch.Tensor]:
    shape = (1, layers.batch * layers.window, layers.heads, DIM)
    return [z.view(shape) for z in layers.y[i].split(layers.heads * DIM, 1)]


def _convolve(layers: Layers, weight: torch.Tensor, i: int) -> None:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    causal_conv1d_update(
        layers.x[i],
        layers.conv[i],
        weight,
        None,
        activation="silu",
        conv_state_indices=layers.slots,
        num_accepted_tokens=layers.accepted,
        query_start_loc=layers.cu_seqlens,
        max_query_len=layers.window,
        validate_data=False,
        out=layers.y[i],
    )


def write_states(layers: Layers) -> float:
    """vLLM's recurrent kernel with one stored state a position, and its convolution."""
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent_kda

    batch, heads, window = layers.batch, layers.heads, layers.window
    count = max(2, min(layers.count, -(-800_000_000 // (layers.state_bytes * window))))
    states = [torch.randn(batch * window + 1, heads, DIM, DIM, device="cuda") for _ in range(count)]
    index = torch.zeros(batch, 16, dtype=torch.int32, device="cuda")
    index[:, :window] = torch.arange(1, batch * window + 1, device="cuda").view(batch, window)
    weight = layers.weight.contiguous()

    def step(i: int) -> None:
        _convolve(layers, weight, i)
        q, k, v = _heads(layers, i)
        fused_recurrent_kda(
            q=q,
            k=k,
            v=v,
            raw_g=layers.raw_g[i][None],
            raw_beta=layers.raw_beta[i][None],
            A_log=layers.a_log,
            dt_bias=layers.dt_bias,
            lower_bound=LOWER_BOUND,
            initial_state=states[i],
            cu_seqlens=layers.cu_seqlens,
            ssm_state_indices=index[:, :window],
            num_accepted_tokens=layers.accepted,
            out=layers.out[i][None],
        )

    return graph_us([partial(step, i) for i in range(count)])


def recover_ssm(layers: Layers) -> tuple[float, float]:
    """vLLM's RecoverSSM: (convolution + verify of a layer, a layer's share of the commit after sampling).

    The commit is the one that prefix caching needs (align mode): it also compacts the convolution's columns.
    """
    from vllm.models.kimi_k3.nvidia.ops.recoverssm import (
        KDARecoverSSMCommitContext,
        KDARecoverSSMRecords,
        kda_recoverssm_verify,
    )

    batch = layers.batch
    weight = layers.weight.contiguous()
    records = [KDARecoverSSMRecords(r.u[:batch], r.key_gate[:batch]) for r in layers.records]

    def verify(i: int) -> None:
        _convolve(layers, weight, i)
        q, k, v = _heads(layers, i)
        kda_recoverssm_verify(
            q=q,
            k=k,
            v=v,
            raw_g=layers.raw_g[i][None],
            raw_beta=layers.raw_beta[i][None],
            A_log=layers.a_log,
            dt_bias=layers.dt_bias,
            lower_bound=LOWER_BOUND,
            checkpoint_state=layers.state[i],
            records=records[i],
            query_start_loc=layers.cu_seqlens,
            state_indices=layers.slots,
            spec_query_len=layers.window,
            out=layers.out[i][None],
        )

    used = range(min(layers.count, LAYERS_A_COMMIT))
    context = KDARecoverSSMCommitContext.create(
        [
            SimpleNamespace(
                kv_cache=(layers.conv[i].transpose(1, 2), layers.state[i]),
                A_log=layers.a_log,
                dt_bias=layers.dt_bias,
                local_num_heads=layers.heads,
                head_dim=DIM,
                gate_lower_bound=LOWER_BOUND,
                recoverssm_records=records[i],
            )
            for i in used
        ],
        spec_query_len=layers.window,
        max_num_reqs=batch,
    )
    align = {
        "request_indices": torch.arange(batch, dtype=torch.int32, device="cuda"),
        "block_table": layers.slots[:, None].repeat(1, 2).contiguous(),
        "num_computed_tokens": torch.full((batch,), 100, dtype=torch.int32, device="cuda"),
        "mamba_block_size": 1536,
    }

    def commit() -> None:
        context.commit(layers.accepted, layers.slots, layers.cu_seqlens, **align)

    return (
        graph_us([partial(verify, i) for i in range(layers.count)]),
        graph_us([commit, commit], per=2 * len(used)),
    )
