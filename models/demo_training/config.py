# SPDX-License-Identifier: Apache-2.0
"""The demonstration model's shape, and the configuration file that vLLM reads.

Names and meanings follow the `KimiLinearForCausalLM` configuration of vLLM 0.32 and 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PAD, BOS, EOS = 0, 1, 2


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of a K3-form text model. All widths are in channels."""

    vocab_size: int = 1152
    hidden_size: int = 256
    layers: int = 8
    heads: int = 4
    """Heads of both KDA and MLA; tensor parallelism 1, 2 and 4 divide it."""
    kda_head_dim: int = 128
    mla_every: int = 4
    """One layer in this many is MLA, as in K3; the others are KDA."""
    kv_lora_rank: int = 512
    q_lora_rank: int = 128
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    dense_size: int = 256
    """Intermediate size of the feed-forward layers that are not mixtures, and of the MTP block."""
    experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 128
    latent_size: int = 128
    """Width of the routed experts' input and output (K3's latent mixture)."""
    moe_every: int = 3
    """Layers whose index is a positive multiple of this are mixtures of experts. It must not divide `layers`:
    the MTP block is layer number `layers`, and it is dense."""
    residual_block: int = 4
    """Layers in one block of the attention residual."""
    gate_lower_bound: float = -5.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    norm_eps: float = 1e-5
    max_length: int = 32768
    conv_size: int = 4

    def is_kda(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is KDA."""
        return (layer + 1) % self.mla_every != 0

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is a mixture of experts."""
        return layer >= 1 and layer % self.moe_every == 0

    @property
    def kda_layers(self) -> list[int]:
        """Indices (from 0) of the KDA layers."""
        return [i for i in range(self.layers) if self.is_kda(i)]

    @property
    def mla_layers(self) -> list[int]:
        """Indices (from 0) of the MLA layers."""
        return [i for i in range(self.layers) if not self.is_kda(i)]

    def text_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The `config.json` of the text model."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "torch_dtype": dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.dense_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.nope_dim + self.rope_dim,
            "hidden_act": "situ",
            "activation_situ_beta": self.situ_beta,
            "activation_situ_linear_beta": self.situ_linear_beta,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "num_experts": self.experts,
            "num_experts_per_token": self.experts_per_token,
            "num_shared_experts": 1,
            "moe_intermediate_size": self.expert_size,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "moe_layer_freq": self.moe_every,
            "use_grouped_topk": True,
            "num_expert_group": 1,
            "topk_group": 1,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "mla_use_nope": True,
            "mla_use_output_gate": True,
            "attn_res_block_size": self.residual_block,
            "routed_expert_hidden_size": self.latent_size,
            "latent_moe_use_norm": True,
            "max_position_embeddings": self.max_length,
            "model_max_length": self.max_length,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            # An expert's slice at tensor parallelism 4 is 32 wide; without this vLLM pads it to 256.
            "min_moe_intermediate_per_partition": 32,
            # vLLM builds the MTP head from the text model's configuration, whatever the draft folder says.
            "num_nextn_predict_layers": 1,
            "linear_attn_config": {
                "kda_layers": [i + 1 for i in self.kda_layers],
                "full_attn_layers": [i + 1 for i in self.mla_layers],
                "num_heads": self.heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.conv_size,
                "use_full_rank_gate": True,
                "gate_lower_bound": self.gate_lower_bound,
            },
        }

    def draft_config(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The `config.json` of the draft folder.

        vLLM attaches K3's MTP head by the model type `kimi_k3` with the text fields nested, which the text
        model's own configuration cannot say; so the head is a draft folder beside it.
        """
        return {
            "architectures": ["KimiK3ForConditionalGeneration"],
            "model_type": "kimi_k3",
            "torch_dtype": dtype,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "pad_token_id": PAD,
            "tie_word_embeddings": False,
            "text_config": self.text_config(dtype),
        }

    @staticmethod
    def from_text_config(text: dict[str, Any]) -> DemoConfig:
        """Read the sizes back from a `config.json` written by `text_config`."""
        linear = text["linear_attn_config"]
        return DemoConfig(
            vocab_size=text["vocab_size"],
            hidden_size=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            kda_head_dim=linear["head_dim"],
            mla_every=linear["full_attn_layers"][0],
            kv_lora_rank=text["kv_lora_rank"],
            q_lora_rank=text["q_lora_rank"],
            nope_dim=text["qk_nope_head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            value_dim=text["v_head_dim"],
            dense_size=text["intermediate_size"],
            experts=text["num_experts"],
            experts_per_token=text["num_experts_per_token"],
            expert_size=text["moe_intermediate_size"],
            latent_size=text["routed_expert_hidden_size"],
            moe_every=text["moe_layer_freq"],
            residual_block=text["attn_res_block_size"],
            gate_lower_bound=linear["gate_lower_bound"],
            situ_beta=text["activation_situ_beta"],
            situ_linear_beta=text["activation_situ_linear_beta"],
            norm_eps=text["rms_norm_eps"],
            max_length=text["max_position_embeddings"],
            conv_size=linear["short_conv_kernel_size"],
        )


TINY = DemoConfig(
    hidden_size=64, layers=4, heads=2, kda_head_dim=32, kv_lora_rank=64, q_lora_rank=32, nope_dim=32,
    rope_dim=16, value_dim=32, dense_size=64, experts=4, expert_size=32, latent_size=32, residual_block=2,
)  # fmt: skip
"""A shape small enough to train a few steps on a CPU in a test."""
