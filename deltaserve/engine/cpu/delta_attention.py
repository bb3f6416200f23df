# SPDX-License-Identifier: Apache-2.0
"""The KDA layers of K3 and of Kimi-Linear on the CPU: vLLM's projections and weights, this package's kernels.

A step's tokens fall into up to three parts, which vLLM's metadata names: requests with a speculative window, requests
that decode one token, and requests that prefill. Decodes come first in a batch without speculation.

Where the engine folds at start (``replay.py``), a window writes no state: its records are folded by the next one.

With ``additional_config={"kda_prefill_checkpoint": True}`` the layers offer vLLM's scheduler internal checkpoints: the
last pass over a prompt is not split at the reusable position, and the state there is stored on the way.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context

from deltaserve.engine.cpu import replay
from deltaserve.engine.cpu.conv import decode_conv, prefill_conv, speculative_conv, store_columns
from deltaserve.engine.cpu.kda import NULL_SLOT, chunk_kda, decode_kda, speculative_kda
from deltaserve.engine.cpu.layer_caches import LayerCaches
from deltaserve.engine.cpu.vllm_internals import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
    KimiGatedDeltaNetAttention,
    KimiK3DeltaAttention,
)

CHECKPOINT_ALIGNMENT = 16
"""Tokens: a checkpoint lies a multiple of this behind the start of its pass, as with vLLM's CUDA kernel."""


class CpuDeltaMetadataBuilder(GDNAttentionMetadataBuilder):
    """vLLM's request classification without the chunk tables that its GPU kernels want."""

    def _build_chunk_metadata(self, *args: Any, **kwargs: Any) -> tuple[None, None]:
        return None, None


class CpuDeltaBackend(GDNAttentionBackend):
    """Names the builder; the state's shapes come from the layer."""

    @staticmethod
    def get_name() -> str:
        return "KDA_CPU"

    @staticmethod
    def get_builder_cls() -> type[CpuDeltaMetadataBuilder]:
        return CpuDeltaMetadataBuilder


def _prefill(c: LayerCaches, m: Any, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor) -> None:
    """Requests that prefill, the single-token decodes before them included: all continue from their slot."""
    cu = m.non_spec_query_start_loc.tolist()
    spans = list(itertools.pairwise(cu))
    slots = m.non_spec_state_indices_tensor[: len(spans)].tolist()
    has_state = m.has_initial_state[: len(spans)].tolist()
    y = prefill_conv(qkv, c.weight, c.conv, slots, has_state, cu)
    q, k, v = y.view(y.shape[0], 3, c.heads, c.head_dim).unbind(1)
    state = torch.zeros(len(spans), *c.recurrent.shape[1:], dtype=torch.float32)
    for n, slot in enumerate(slots):
        if has_state[n]:
            state[n] = c.recurrent[slot]
    if m.checkpoint is not None:
        # Up to each checkpoint first, so that the state there can be stored; then the rest.
        cuts = [start + offset for (start, _), offset in zip(spans, m.checkpoint.offsets, strict=True)]
        head = [(start, cut) for (start, _), cut in zip(spans, cuts, strict=True)]
        chunk_kda(q, k, v, raw_g, raw_beta, **c.gate, spans=head, state=state, out=out)
        for n, slot in enumerate(m.checkpoint.state_indices.tolist()):
            if cuts[n] > spans[n][0] and slot != NULL_SLOT:
                store_columns(c.conv, slot, qkv[spans[n][0] : cuts[n]], c.weight.shape[1] - 1)
                c.recurrent[slot] = state[n].to(c.recurrent.dtype)
        spans = [(cut, stop) for cut, (_, stop) in zip(cuts, spans, strict=True)]
    chunk_kda(q, k, v, raw_g, raw_beta, **c.gate, spans=spans, state=state, out=out)
    for n, slot in enumerate(slots):
        if slot > NULL_SLOT and cu[n + 1] > cu[n]:
            c.recurrent[slot] = state[n].to(c.recurrent.dtype)


def _decode(c: LayerCaches, m: Any, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor) -> None:
    slots = m.non_spec_state_indices_tensor[: qkv.shape[0]]
    y = decode_conv(qkv, c.weight, c.conv, slots)
    out.copy_(decode_kda(y, raw_g, raw_beta, **c.gate, state_cache=c.recurrent, slots=slots))


def _speculate(c: LayerCaches, m: Any, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor) -> None:
    cu = m.spec_query_start_loc[: m.num_spec_decodes + 1].tolist()
    slots = m.spec_state_indices_tensor[: m.num_spec_decodes]
    accepted = m.num_accepted_tokens
    y = speculative_conv(qkv, c.weight, c.conv, slots[:, 0], accepted, cu)
    out.copy_(
        speculative_kda(
            y,
            raw_g,
            raw_beta,
            **c.gate,
            state_cache=c.recurrent,
            slots=slots,
            num_accepted=accepted,
            cu_seqlens=cu,
        )
    )


def _replay(
    steps: Any, layer: str, c: LayerCaches, m: Any, qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, out: Tensor
) -> None:
    """Windows whose accepted tokens become state when the next window begins."""
    n = m.num_spec_decodes
    steps.advance(
        layer,
        m.spec_sequence_masks_cpu.nonzero().flatten().tolist(),
        qkv,
        raw_g,
        raw_beta,
        blocks=m.spec_state_indices_tensor[:n, 0],
        cu_seqlens=m.spec_query_start_loc[: n + 1],
        out=out,
    )


def _settle(steps: Any, layer: str, m: Any) -> None:
    """Fold what is pending of the requests of this step that run no window."""
    blocks = m.non_spec_state_indices_tensor
    if blocks is None:
        return
    if m.spec_sequence_masks is None:
        rows = list(range(len(steps.requests)))
    else:
        rows = (~m.spec_sequence_masks_cpu[: len(steps.requests)]).nonzero().flatten().tolist()
    steps.settle(layer, rows, blocks[: len(rows)])


def _forward(
    layer: Any, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
) -> None:
    """One step: raw ``mixed_qkv`` [T, 3HD], ``beta`` [1, T, H], decay ``g1`` [1, T, H, D], gate ``g2`` [T, H, D]."""
    metadata = get_forward_context().attn_metadata
    if metadata is None or (m := metadata.get(layer.prefix)) is None:
        return  # a profiling run carries no metadata for recurrent layers
    if not isinstance(m, GDNAttentionMetadata):
        raise TypeError(f"{layer.prefix}: expected GDNAttentionMetadata, got {type(m).__name__}")
    tokens = m.num_actual_tokens
    qkv, raw_g, raw_beta = mixed_qkv[:tokens], g1[0, :tokens], beta[0, :tokens]
    out = core_attn_out[0, :tokens]
    caches = LayerCaches(layer)
    others = _prefill if m.num_prefills > 0 else _decode
    speculate = _speculate
    if (steps := replay.active()) is not None:
        speculate = functools.partial(_replay, steps, layer.prefix)
        _settle(steps, layer.prefix, m)
    if m.spec_sequence_masks is None:
        others(caches, m, qkv, raw_g, raw_beta, out)
    elif m.num_prefills == 0 and m.num_decodes == 0:
        speculate(caches, m, qkv, raw_g, raw_beta, out)
    else:
        for run, index in ((speculate, m.spec_token_indx), (others, m.non_spec_token_indx)):
            part = torch.empty(index.numel(), *out.shape[1:], dtype=out.dtype)
            run(caches, m, qkv[index], raw_g[index], raw_beta[index], part)
            out[index] = part
    core_attn_out.copy_(layer.o_norm(core_attn_out, g2))


def _cache_spec(spec: Any, vllm_config: Any) -> Any:
    """Ask for a block for an internal checkpoint where the configuration says so, and for none a draft with replay."""
    if replay.wanted(vllm_config):
        spec = replace(spec, num_speculative_blocks=0)
    options = vllm_config.additional_config
    wanted = isinstance(options, dict) and bool(options.get("kda_prefill_checkpoint", False))
    if not wanted:
        return spec
    return replace(spec, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=CHECKPOINT_ALIGNMENT)


class CpuK3DeltaAttention(KimiK3DeltaAttention):
    """K3: full-rank output gate, lower-bounded decay."""

    def get_attn_backend(self) -> type[CpuDeltaBackend]:
        return CpuDeltaBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return _cache_spec(super().get_kv_cache_spec(vllm_config), vllm_config)

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        _forward(self, mixed_qkv, g1, g2, beta, core_attn_out)


class CpuKimiLinearDeltaAttention(KimiGatedDeltaNetAttention):
    """Kimi-Linear: low-rank output gate, softplus decay."""

    def get_attn_backend(self) -> type[CpuDeltaBackend]:
        return CpuDeltaBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return _cache_spec(super().get_kv_cache_spec(vllm_config), vllm_config)

    def _forward(
        self, mixed_qkv: Tensor, g1: Tensor, g2: Tensor, beta: Tensor, core_attn_out: Tensor
    ) -> None:
        _forward(self, mixed_qkv, g1, g2, beta, core_attn_out)
