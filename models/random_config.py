# SPDX-License-Identifier: Apache-2.0
"""The config.json of a model with random weights: this project's plain form, and the forms of published models.

Plain is a text model alone, as the demonstration model has it. Published is what comes with the models themselves: K3's
text model nested beside a vision tower under the architecture KimiK3ForConditionalGeneration, Kimi-Linear with the
fields and names of its own file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["k3", "kimi-linear"]

CONV_WIDTH = 4
_SITU_BETA, _SITU_LINEAR_BETA = 4.0, 25.0


@dataclass(frozen=True)
class Shape:
    """Sizes of one model; every field is a count of features unless it says otherwise."""

    form: Form
    layers: int
    heads: int
    head_dim: int
    """Key and value size of a KDA head."""
    hidden: int
    vocab: int
    experts: int
    experts_per_token: int
    expert_hidden: int
    max_length: int
    """Context length in tokens."""
    mla_every: int
    """One layer in so many is MLA (the last of each group)."""
    mla_head_dim: int
    """Size of an MLA head's value and of its key without the rotary part."""
    rope_dim: int = 64
    kv_lora_rank: int = 512

    def is_kda(self, layer: int) -> bool:
        return (layer + 1) % self.mla_every != 0

    @property
    def latent(self) -> int:
        """What the routed experts work on: K3 projects down to half, Kimi-Linear does not."""
        return self.hidden // 2 if self.form == "k3" else self.hidden


def plain(s: Shape, dtype: str) -> dict[str, Any]:
    k3 = s.form == "k3"
    linear_attention: dict[str, Any] = {
        "kda_layers": [i + 1 for i in range(s.layers) if s.is_kda(i)],
        "full_attn_layers": [i + 1 for i in range(s.layers) if not s.is_kda(i)],
        "num_heads": s.heads,
        "head_dim": s.head_dim,
        "short_conv_kernel_size": CONV_WIDTH,
    }
    config: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "torch_dtype": dtype,
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": 2 * s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.heads,
        "head_dim": s.mla_head_dim + s.rope_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "num_experts": s.experts,
        "num_experts_per_token": s.experts_per_token,
        "num_shared_experts": 1,
        "moe_intermediate_size": s.expert_hidden,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": s.kv_lora_rank,
        "qk_nope_head_dim": s.mla_head_dim,
        "qk_rope_head_dim": s.rope_dim,
        "v_head_dim": s.mla_head_dim,
        "mla_use_nope": True,
        "max_position_embeddings": s.max_length,
        "model_max_length": s.max_length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "min_moe_intermediate_per_partition": 32,
        "linear_attn_config": linear_attention,
    }
    if k3:
        config |= {
            "hidden_act": "situ",
            "activation_situ_beta": _SITU_BETA,
            "activation_situ_linear_beta": _SITU_LINEAR_BETA,
            "q_lora_rank": s.hidden // 2,
            "mla_use_output_gate": True,
            "attn_res_block_size": min(4, s.layers),
            "routed_expert_hidden_size": s.latent,
            "latent_moe_use_norm": True,
        }
        linear_attention |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    return config


def document(s: Shape, dtype: str, published: bool) -> dict[str, Any]:
    """The config.json of a shape. `dtype` is that of the weights."""
    text = plain(s, dtype)
    if not published:
        return text
    text["dtype"] = text.pop("torch_dtype")
    # What a published text model does not say: its length is the tokenizer's, its experts are wide enough.
    del text["max_position_embeddings"], text["min_moe_intermediate_per_partition"]
    text |= {
        "rope_scaling": None,
        "use_cache": True,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
    }
    if s.form == "kimi-linear":
        return text | {
            "auto_map": {
                "AutoConfig": "configuration_kimi.KimiLinearConfig",
                "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
            },
        }
    special = {name: text[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    text["num_nextn_predict_layers"] = 1
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "media_placeholder_token_id": 3,
        **special,
        "text_config": text,
        "vision_config": {
            "model_type": "kimi_k3_vision",
            "vt_num_hidden_layers": 2,
            "vt_hidden_size": 64,
            "vt_intermediate_size": 128,
            "vt_num_attention_heads": 2,
            "text_hidden_size": s.hidden,
        },
    }
