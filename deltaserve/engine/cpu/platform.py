# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform for models that mix MLA with a recurrent state.

vLLM 0.32 turns prefix caching and chunked prefill off for MLA on CPUs without AMX, forces blocks of 16 tokens, aligns
the block size of hybrid models only in the worker, and rounds the cache's bytes up to GiB. All of it is undone here:
the first two because the MLA backend of this package reads cached context, the block size because the scheduler, in
another process, splits prefills by it and would see the wrong one, the last so that memory is what was configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms.cpu import CpuPlatform

if TYPE_CHECKING:  # vllm.config imports the platform
    from vllm.config import VllmConfig

_BLOCK_TOKENS = 128
"""Block size before alignment; vLLM raises it until a block holds a whole recurrent state."""


class HybridCpuPlatform(CpuPlatform):
    """CpuPlatform with prefix caching, chunked prefill and context parallelism for hybrid MLA models."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, prefix = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
        batched_tokens = scheduler.max_num_batched_tokens
        block_size = cache.block_size if cache.user_specified_block_size else None
        cache_bytes = cache.kv_cache_memory_bytes
        super().check_and_update_config(vllm_config)
        if cache_bytes is not None:
            # The variable that keeps vLLM from taking a share of the machine counts in GiB, and would win.
            cache.kv_cache_memory_bytes = cache_bytes
        model = vllm_config.model_config
        if model is None or not model.use_mla:
            return
        if model.is_hybrid:
            from deltaserve.engine.cpu import replay

            replay.take_over(vllm_config)
        scheduler.enable_chunked_prefill, cache.enable_prefix_caching = chunked, prefix
        scheduler.max_num_batched_tokens = batched_tokens
        if model.is_hybrid:
            from deltaserve.engine.cpu.mla_backend import CpuMlaBackend

            cache.block_size = block_size or _BLOCK_TOKENS
            cls._align_hybrid_block_size(vllm_config, CpuMlaBackend)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        if attn_selector_config.use_mla and not attn_selector_config.use_sparse:
            return "deltaserve.engine.cpu.mla_backend.CpuMlaBackend"
        return str(super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads))

    @classmethod
    def get_mla_prefill_backend_cls(cls, mla_selector_config: Any) -> type[Any]:
        from deltaserve.engine.cpu.mla_backend import CpuMlaPrefillBackend

        return CpuMlaPrefillBackend

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        super().register_triton_kernel_overrides()
        from vllm.triton_utils.dispatcher import register_kernels

        from deltaserve.engine.cpu import draft_sampling, state_copies
        from deltaserve.engine.cpu.mla_backend import compute_slot_mapping

        slot_mapping = {"vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping}
        register_kernels(slot_mapping | state_copies.OVERRIDES | draft_sampling.OVERRIDES)
