# SPDX-License-Identifier: Apache-2.0
"""vLLM's MLA attention backend on this package's kernels: any latent size, bounded context workspace, DCP.

Prefill up-projects the cached context in pieces and attends with torch's tiled attention, which never holds a score
matrix; decode attends in latent space and returns the log-sum-exp that a context parallel merge needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import MultipleOf

from deltaserve.engine.cpu import mla
from deltaserve.engine.cpu.vllm_internals import (
    CPUMLABackend,
    CPUMLAImpl,
    CPUSDPAMLAPrefillBackend,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    align_mla_chunked_context_workspace_size,
)

CONTEXT_ROWS = 2048
"""Cached tokens that prefill gathers and up-projects at once; vLLM's 64K rows cost 600 MB for four heads in fp32."""


class CpuMlaMetadataBuilder(MLACommonMetadataBuilder):
    """vLLM's metadata with a context workspace of ``CONTEXT_ROWS`` rows (or one block, if that is more).

    Speculative windows of equal length count as decodes: they attend to the latent cache as it is, where the prefill
    path would up-project the whole context for a handful of tokens.
    """

    query_len_support = QueryLenSupport.UNIFORM

    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config: VllmConfig) -> int:
        return int(align_mla_chunked_context_workspace_size(vllm_config, CONTEXT_ROWS))


class CpuMlaBackend(CPUMLABackend):
    """Describes the cache that the implementation below accepts."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # no restriction

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or block_size % 16 == 0

    @staticmethod
    def get_builder_cls() -> type[CpuMlaMetadataBuilder]:
        return CpuMlaMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[CpuMlaImpl]:
        return CpuMlaImpl


class CpuMlaImpl(CPUMLAImpl):
    """Decode attention of one layer."""

    can_return_lse_for_decode = True
    dcp_world_size: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The base class forces one context parallel rank; the true size was set when the object was made.
        ranks = self.dcp_world_size
        super().__init__(*args, **kwargs)
        self.dcp_world_size = ranks
        self.cp_kv_cache_interleave_size = (
            get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size
        )

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor]:
        decode = attn_metadata.decode
        return mla.decode_attention(
            torch.cat(q, dim=-1) if isinstance(q, tuple) else q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens.tolist(),
            scale=self.scale,
            latent_dim=self.kv_lora_rank,
        )


class CpuMlaPrefillBackend(CPUSDPAMLAPrefillBackend):
    """Prefill attention per request with torch's tiled CPU kernel."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_CPU_MLA"

    def _ragged_sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_cu_seq_lens: Tensor,
        kv_cu_seq_lens: Tensor,
        causal: bool,
        return_softmax_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = mla.prefill_attention(
            q, k, v, q_cu_seq_lens.tolist(), kv_cu_seq_lens.tolist(), scale=self.scale, causal=causal
        )
        return (out, lse) if return_softmax_lse else out


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """vLLM's gather of a rank's own context rows, in its signature."""
    starts = [0] * batch_size if seq_starts is None else seq_starts[:batch_size].tolist()
    mla.gather_rows(src_cache, dst, block_table, cu_seq_lens[: batch_size + 1].tolist(), starts)


def correct_attn_out(
    out: Tensor, lses: Tensor, cp_rank: int, ctx: Any = None, is_lse_base_on_e: bool = True
) -> tuple[Tensor, Tensor]:
    """vLLM's weighting of a rank's partial decode output, in its signature."""
    if out.ndim == 4:
        out = out.squeeze(1)
    if lses.ndim == 4:
        lses = lses.squeeze(-1) if lses.shape[-1] == 1 else lses.squeeze(1)
    return mla.merge_partial(out, lses, cp_rank, base_e=is_lse_base_on_e)


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_table_stride: int,
    slot_mapping: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = mla.PAD_SLOT,
    BLOCK_SIZE: int = 1024,
) -> None:
    """vLLM's slot mapping kernel, in its signature; its own CPU version knows no context parallelism."""
    lengths = query_start_loc.long().diff()
    tokens = int(query_start_loc[-1])
    slot_mapping[:tokens] = mla.slot_mapping(
        positions[:tokens],
        torch.repeat_interleave(torch.arange(lengths.numel()), lengths),
        block_table,
        block_size=KV_CACHE_BLOCK_SIZE,
        ranks=TOTAL_CP_WORLD_SIZE,
        rank=TOTAL_CP_RANK,
        interleave=CP_KV_CACHE_INTERLEAVE_SIZE,
    )
    slot_mapping[tokens:max_num_tokens] = PAD_ID
