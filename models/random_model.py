# SPDX-License-Identifier: Apache-2.0
"""Write a small checkpoint with random weights in the form of K3's text model or of Kimi-Linear.

For shapes that the demonstration model does not have: other head counts, the low-rank gate, bf16 weights. Such a model
runs every kernel but proves nothing about state: it tends to repeat one token whatever its state holds. The tokenizer
works on bytes and needs no training data.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

Form = Literal["k3", "kimi-linear"]

CHAT_TEMPLATE = "{{ '<bos>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CONV_WIDTH = 4
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


class _Weights:
    """Collects named tensors, drawn from one seeded generator."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def linear(self, name: str, out_dim: int, in_dim: int, gain: float = 1.0) -> None:
        self.tensors[f"{name}.weight"] = (self.normal(out_dim, in_dim) * (gain / in_dim**0.5)).to(self.dtype)

    def norm(self, name: str, dim: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.1 * self.normal(dim)).to(self.dtype)


def _config(s: Shape, dtype: str) -> dict[str, Any]:
    k3 = s.form == "k3"
    linear_attention: dict[str, Any] = {
        "kda_layers": [i + 1 for i in range(s.layers) if s.is_kda(i)],
        "full_attn_layers": [i + 1 for i in range(s.layers) if not s.is_kda(i)],
        "num_heads": s.heads,
        "head_dim": s.head_dim,
        "short_conv_kernel_size": _CONV_WIDTH,
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


def _kda_layer(w: _Weights, name: str, s: Shape) -> None:
    width = s.heads * s.head_dim
    for part in "qkv":
        w.linear(f"{name}.{part}_proj", width, s.hidden)
        w.tensors[f"{name}.{part}_conv1d.weight"] = (w.normal(width, 1, _CONV_WIDTH) * 0.5).to(w.dtype)
    w.tensors[f"{name}.A_log"] = torch.log(torch.rand(s.heads, generator=w.generator) * 4 + 0.05).view(
        1, 1, -1, 1
    )
    w.tensors[f"{name}.dt_bias"] = w.normal(width) - 3.0  # slow decay, so that the state reaches far back
    w.linear(f"{name}.f_a_proj", s.head_dim, s.hidden)
    w.linear(f"{name}.f_b_proj", width, s.head_dim)
    w.linear(f"{name}.b_proj", s.heads, s.hidden)
    if s.form == "k3":
        w.linear(f"{name}.g_proj", width, s.hidden)
    else:
        w.linear(f"{name}.g_a_proj", s.head_dim, s.hidden)
        w.linear(f"{name}.g_b_proj", width, s.head_dim)
    w.norm(f"{name}.o_norm", s.head_dim)
    w.linear(f"{name}.o_proj", s.hidden, width, 2.0)


def _mla_layer(w: _Weights, name: str, s: Shape) -> None:
    queries = s.heads * (s.mla_head_dim + s.rope_dim)
    if s.form == "k3":
        rank = s.hidden // 2
        w.linear(f"{name}.q_a_proj", rank, s.hidden)
        w.norm(f"{name}.q_a_layernorm", rank)
        w.linear(f"{name}.q_b_proj", queries, rank, 2.0)
        w.linear(f"{name}.g_proj", s.heads * s.mla_head_dim, s.hidden)
    else:
        w.linear(f"{name}.q_proj", queries, s.hidden, 2.0)
    w.linear(f"{name}.kv_a_proj_with_mqa", s.kv_lora_rank + s.rope_dim, s.hidden)
    w.norm(f"{name}.kv_a_layernorm", s.kv_lora_rank)
    w.linear(f"{name}.kv_b_proj", 2 * s.heads * s.mla_head_dim, s.kv_lora_rank)
    w.linear(f"{name}.o_proj", s.hidden, s.heads * s.mla_head_dim, 2.0)


def _mlp(w: _Weights, name: str, hidden: int, inner: int) -> None:
    w.linear(f"{name}.gate_proj", inner, hidden)
    w.linear(f"{name}.up_proj", inner, hidden)
    w.linear(f"{name}.down_proj", hidden, inner)


def _moe(w: _Weights, name: str, s: Shape) -> None:
    w.linear(f"{name}.gate", s.experts, s.hidden)
    w.tensors[f"{name}.gate.e_score_correction_bias"] = torch.zeros(s.experts)
    for e in range(s.experts):
        w.linear(f"{name}.experts.{e}.w1", s.expert_hidden, s.latent)
        w.linear(f"{name}.experts.{e}.w3", s.expert_hidden, s.latent)
        w.linear(f"{name}.experts.{e}.w2", s.latent, s.expert_hidden)
    _mlp(w, f"{name}.shared_experts", s.hidden, s.expert_hidden)
    if s.form == "k3":
        w.linear(f"{name}.routed_expert_down_proj", s.latent, s.hidden)
        w.norm(f"{name}.routed_expert_norm", s.latent)
        w.linear(f"{name}.routed_expert_up_proj", s.hidden, s.latent)


def _tensors(s: Shape, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    w = _Weights(seed, dtype)
    w.tensors["model.embed_tokens.weight"] = w.normal(s.vocab, s.hidden).to(dtype)
    for i in range(s.layers):
        name = f"model.layers.{i}"
        w.norm(f"{name}.input_layernorm", s.hidden)
        w.norm(f"{name}.post_attention_layernorm", s.hidden)
        (_kda_layer if s.is_kda(i) else _mla_layer)(w, f"{name}.self_attn", s)
        if i == 0:
            _mlp(w, f"{name}.mlp", s.hidden, 2 * s.hidden)
        else:
            _moe(w, f"{name}.block_sparse_moe", s)
        if s.form == "k3":
            for part in ("self_attention_res", "mlp_res"):
                w.norm(f"{name}.{part}_norm", s.hidden)
                w.linear(f"{name}.{part}_proj", 1, s.hidden)
    w.norm("model.norm", s.hidden)
    w.linear("lm_head", s.vocab, s.hidden)
    if s.form == "k3":
        w.norm("model.output_attn_res_norm", s.hidden)
        w.linear("model.output_attn_res_proj", 1, s.hidden)
    return w.tensors


def _write_tokenizer(path: Path, vocab: int, max_length: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: i for i, token in enumerate([*_SPECIAL, *alphabet])}
    for i in range(len(tokens), vocab):
        tokens[f"<extra_{i}>"] = i
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def write_random_model(
    path: Path,
    *,
    form: Form = "k3",
    layers: int = 4,
    heads: int = 4,
    head_dim: int = 32,
    hidden: int = 128,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    vocab: int = 512,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_hidden: int = 64,
    max_length: int = 8192,
    mla_every: int = 4,
    mla_head_dim: int = 32,
) -> int:
    """Write a checkpoint, its config and a byte tokenizer into ``path`` (created); return the number of parameters.

    The same arguments give the same bytes. ``form`` "k3" has the full-rank gate with lower bound -5, the attention
    residual, SiTU and latent experts, and a low-rank MLA query; "kimi-linear" has the low-rank softplus gate and SiLU
    experts. Layers 1..``layers`` are KDA except every ``mla_every``-th.

    Raises ValueError when there is no MLA layer, the vocabulary cannot hold all bytes, or an expert is too narrow
    for vLLM's kernels.
    """
    if layers < mla_every:
        raise ValueError(f"layers={layers} gives no MLA layer; use at least mla_every={mla_every}")
    if vocab < 256 + len(_SPECIAL):
        raise ValueError(f"vocab={vocab} cannot hold 256 bytes and {len(_SPECIAL)} special tokens")
    if expert_hidden % 32:
        raise ValueError(f"expert_hidden={expert_hidden} must be a multiple of 32")
    shape = Shape(
        form=form,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=vocab,
        experts=experts,
        experts_per_token=experts_per_token,
        expert_hidden=expert_hidden,
        max_length=max_length,
        mla_every=mla_every,
        mla_head_dim=mla_head_dim,
    )
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(shape, seed, getattr(torch, dtype))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(_config(shape, dtype), indent=1) + "\n")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(special) + "\n")
    _write_tokenizer(path, vocab, max_length)
    return sum(t.numel() for t in tensors.values())


def main() -> None:
    """Command line: python -m models.random_model PATH [--form kimi-linear] [--heads 8] ..."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--form", choices=["k3", "kimi-linear"], default="k3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value in (
        ("layers", 4),
        ("heads", 4),
        ("head-dim", 32),
        ("hidden", 128),
        ("seed", 0),
        ("vocab", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (
        ("experts", 8),
        ("experts-per-token", 2),
        ("expert-hidden", 64),
        ("max-length", 8192),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("mla-every", 4), ("mla-head-dim", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = vars(parser.parse_args())
    print(f"{write_random_model(**options)} parameters in {options['path']}")


if __name__ == "__main__":
    main()
