# SPDX-License-Identifier: Apache-2.0
"""Prefill over an fp8 cache where queries stay in the model's dtype: K3's attention of vLLM 0.33.0 on Hopper.

vLLM's layer fills a plain fp8 cache by one kernel that also casts the prompt's query, key and value to fp8, and asserts
that the query is fp8. vLLM casts queries on SM100 alone, so on Hopper every prompt ends in that assertion, though the
rest is there: decode reads fp8 rows, and a context's rows are cast back when they are gathered. Here the prompt's own
key and value stay in the model's dtype and its rows are written by vLLM's general kernel with the layer's scale. So
rows are what the other kernel writes, and attention within a prompt is more exact than there.

Chosen by `deltaserve.engine.arguments` for workers on CUDA whose cache is fp8; `DELTASERVE_FP8_CACHE=0` leaves vLLM as
it is. Where the query is fp8, or the cache is not, vLLM's own method is called.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

VARIABLE = "DELTASERVE_FP8_CACHE"
SUPPORTED_VERSION = "0.33.0"
_MODULE = "vllm.models.kimi_k3.nvidia.mla"
_METHOD = "_forward_prefill_fused"
_EXPECTED = (
    "self", "q", "kv_c_normed", "k_pe", "positions", "cos_sin_cache", "slot_mapping", "attn_metadata", "out",
)  # fmt: skip
_MENDED = "deltaserve_fp8_cache"


def mended(method: Any, module: Any) -> Any:
    """`method` of the layer, or what stands in for it where the cache is plain fp8 and the query is not.

    `module` is the layer's, whose names are used: `ops.concat_and_cache_mla`, `fused_mla_kv_concat`,
    `merge_attn_states`, `current_platform`.
    """

    @functools.wraps(method)
    def forward(
        self: Any,
        q: Any,
        kv_c_normed: Any,
        k_pe: Any,
        positions: Any,
        cos_sin_cache: Any,
        slot_mapping: Any,
        attn_metadata: Any,
        out: Any,
    ) -> None:
        prefill = attn_metadata.prefill
        plain_fp8 = str(self.kv_cache_dtype) in ("fp8", "fp8_e4m3")
        if not plain_fp8 or prefill.q_data_type == module.current_platform.fp8_dtype():
            method(self, q, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping, attn_metadata, out)
            return
        if positions is not None:
            raise UnsupportedVllmError(
                "kv_cache_dtype: an fp8 cache on Hopper is for models whose attention has no positions "
                "(mla_use_nope); leave it at auto for this one"
            )
        heads, width = self.num_local_heads, self.v_head_dim
        module.ops.concat_and_cache_mla(
            kv_c_normed,
            k_pe.reshape(k_pe.shape[0], k_pe.shape[-1]),
            self.kv_cache,
            slot_mapping,
            self.kv_cache_dtype,
            self._k_scale,
        )
        up = self.kv_b_proj(kv_c_normed)[0].view(-1, heads, self.qk_nope_head_dim + width)
        k_nope, v = up.split([self.qk_nope_head_dim, width], dim=-1)
        with_context = prefill.chunked_context is not None
        found = prefill.prefill_backend.run_prefill_new_tokens(
            q=q,
            k=module.fused_mla_kv_concat(k_nope, k_pe),
            v=v,
            return_softmax_lse=with_context,
            out=None,
        )
        whole = out.view(-1, heads, width)
        if not with_context:
            whole.copy_(found[..., :width].view(-1, heads, width))
            return
        if self.dcp_world_size > 1:
            context, context_lse = self.impl._context_parallel_compute_prefill_context(
                q,
                self._attn_read_kv_cache(),
                attn_metadata,
                k_scale=self._k_scale,
                dcp_world_size=self.dcp_world_size,
                fused_mla_kv_concat_fn=self._fused_mla_kv_concat,
            )
        else:
            context, context_lse = self._compute_prefill_context(q, attn_metadata)
        own, own_lse = found
        module.merge_attn_states(
            output=whole,
            prefix_output=context[..., :width],
            prefix_lse=context_lse,
            suffix_output=own[..., :width],
            suffix_lse=own_lse,
        )

    setattr(forward, _MENDED, True)
    return forward


def install() -> bool:
    """Exchange the layer's method if the environment asks for it; returns whether it does.

    Raises UnsupportedVllmError where vLLM is another, or its method is not the one that was read.
    """
    if os.environ.get(VARIABLE) != "1":
        return False
    import importlib

    from vllm import __version__

    module = importlib.import_module(_MODULE)
    layer = module.MultiHeadLatentAttention
    method = getattr(layer, _METHOD, None)
    if method is not None and getattr(method, _MENDED, False):
        return True
    found = tuple(inspect.signature(method).parameters) if method is not None else ()
    if __version__.split("+")[0] != SUPPORTED_VERSION or found != _EXPECTED:
        raise UnsupportedVllmError(
            f"kv_cache_dtype: fp8 on Hopper was written for vLLM {SUPPORTED_VERSION} and this is {__version__}; "
            f"install that, leave the cache's dtype at auto, or set {VARIABLE}=0"
        )
    setattr(layer, _METHOD, mended(method, module))
    return True
