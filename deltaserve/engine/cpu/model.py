# SPDX-License-Identifier: Apache-2.0
"""Kimi models (Kimi-Linear, K3 text) as vLLM runs them on a CPU: importing this module installs the kernels.

The model is vLLM's own, on its shared layers. What is replaced: the two KDA layers, the attention residual, the experts
where they use the SiTU gate, and the two context parallel operations that have no CPU version.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig

from deltaserve.engine.cpu import mla_backend, replay_runner, sampling
from deltaserve.engine.cpu import vllm_internals as internals
from deltaserve.engine.cpu.attention_residual import attention_residual
from deltaserve.engine.cpu.block_copies import longest_first
from deltaserve.engine.cpu.delta_attention import CpuK3DeltaAttention, CpuKimiLinearDeltaAttention
from deltaserve.engine.cpu.memory import keep_freed_memory
from deltaserve.engine.cpu.moe import situ_experts
from deltaserve.text_form import text_weights

_Experts: Any = internals.CPUUnquantizedExperts
_SITU = internals.MoEActivation.SITU
_supports_activation = _Experts._supports_activation
_process_weights = _Experts.process_weights_after_loading
_apply = _Experts.apply
_copy_blocks = internals.model_runner.copy_kv_cache_blocks_inplace


def _experts_support(activation: Any) -> bool:
    return activation == _SITU or bool(_supports_activation(activation))


def _experts_process_weights(self: Any, layer: nn.Module) -> None:
    # The torch experts read the checkpoint's layout; vLLM's own kernel repacks it.
    if self.moe_config.activation != _SITU:
        _process_weights(self, layer)


def _experts_apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    if activation != _SITU:
        _apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, *args, **kwargs)
        return
    situ_experts(
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        beta=self.moe_config.activation_situ_beta or 1.0,
        linear_beta=self.moe_config.activation_situ_linear_beta,
        out=output,
    )


def _not_here(*args: Any, **kwargs: Any) -> bool:
    return False


def install() -> None:
    """Put this package's kernels where vLLM's shared Kimi model looks for its vendor's."""
    keep_freed_memory()
    internals.replace(internals.linear, "KimiK3DeltaAttention", CpuK3DeltaAttention)
    internals.replace(internals.linear, "KimiLinearGatedDeltaNetAttention", CpuKimiLinearDeltaAttention)
    # These probes load the library of another instruction set into the process, which ends it.
    internals.replace(internals.k3_layer, "is_fused_kda_decode_supported", _not_here)
    internals.replace(internals.k3_layer, "is_fused_kda_chunk_supported", _not_here)
    internals.replace(internals.linear, "attn_res", attention_residual)
    internals.replace(internals.custom_ops, "cp_gather_cache", mla_backend.cp_gather_cache)
    internals.replace(internals.dcp_ops, "correct_attn_out", mla_backend.correct_attn_out)
    internals.replace(_Experts, "_supports_activation", staticmethod(_experts_support))
    internals.replace(_Experts, "process_weights_after_loading", _experts_process_weights)
    internals.replace(_Experts, "apply", _experts_apply)
    internals.replace(internals.model_runner, "copy_kv_cache_blocks_inplace", longest_first(_copy_blocks))
    sampling.install()
    replay_runner.install()


def keep_plain_weights(model: nn.Module) -> None:
    """Exempt from the CPU's packed GEMM, which empties a layer's weight, the layers whose weight is read directly.

    These are the attention residual's query and the up-projection in the experts' sharded tail.
    """
    for name, module in model.named_modules():
        if name.endswith(("_res_proj", ".routed_expert_up_proj")):
            module._cpu_skip_gemm_dispatch = True


install()


class KimiLinearForCausalLM(internals.linear.KimiLinearForCausalLM):
    """vLLM's Kimi model for Kimi-Linear and K3 text checkpoints."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        keep_plain_weights(self)

    def load_weights(self, weights: Iterable[Any]) -> set[str]:
        """The model's tensors, also out of a published checkpoint with a vision tower."""
        loaded: set[str] = super().load_weights(text_weights(weights))
        return loaded
