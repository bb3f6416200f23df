# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint with random weights in the form of K3's text model or of Kimi-Linear.

For shapes that the demonstration model does not have: other head counts, the low-rank gate, bf16 weights, the
configuration files of published models. The same arguments give the same bytes, so such a model is made where it is
needed (`--preset` names the shapes of benchmarks/cluster). It runs every kernel but proves little about state: it tends
to repeat one token whatever its state holds. The tokenizer works on bytes and needs no training data.
"""

from __future__ import annotations

import argparse
import inspect
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from models.random_config import CONV_WIDTH, Form, Shape, document

CHAT_TEMPLATE = "{{ '<bos>' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

_GPU: dict[str, Any] = {
    "layers": 8,
    "heads": 24,
    "head_dim": 128,
    "hidden": 1024,
    "dtype": "bfloat16",
    "experts": 16,
    "expert_hidden": 256,
    "max_length": 33792,
    "mla_head_dim": 128,
    "peaked": True,
}
_SMALL: dict[str, Any] = {"max_length": 33792, "peaked": True}
PRESETS: dict[str, dict[str, Any]] = {
    "k3": {"form": "k3", **_GPU},
    "kimi-linear": {"form": "kimi-linear", **_GPU},
    "k3-published": {"form": "k3", "published": True, **_GPU},
    "kimi-linear-published": {"form": "kimi-linear", "published": True, **_GPU},
    "k3-small": {"form": "k3", **_SMALL},
    "kimi-linear-small": {"form": "kimi-linear", **_SMALL},
    "k3-published-small": {"form": "k3", "published": True, **_SMALL},
    "kimi-linear-published-small": {"form": "kimi-linear", "published": True, **_SMALL},
}
"""Arguments of `write_random_model` by name: eight layers of 24 heads for GPUs, four of four heads for CPUs (small)."""


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


def _kda_layer(w: _Weights, name: str, s: Shape) -> None:
    width = s.heads * s.head_dim
    for part in "qkv":
        w.linear(f"{name}.{part}_proj", width, s.hidden)
        w.tensors[f"{name}.{part}_conv1d.weight"] = (w.normal(width, 1, CONV_WIDTH) * 0.5).to(w.dtype)
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


def _draft_layer(w: _Weights, s: Shape) -> None:
    """K3's multi-token prediction head, which counts as one more layer: latent attention and experts."""
    name = f"model.layers.{s.layers}"
    for part in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "shared_head.norm"):
        w.norm(f"{name}.{part}", s.hidden)
    w.linear(f"{name}.eh_proj", s.hidden, 2 * s.hidden)
    _mla_layer(w, f"{name}.self_attn", s)
    _moe(w, f"{name}.block_sparse_moe", s)
    # It embeds and reads out as the model does; published files hold both again.
    w.tensors[f"{name}.embed_tokens.weight"] = w.tensors["model.embed_tokens.weight"].clone()
    w.tensors[f"{name}.shared_head.head.weight"] = w.tensors["lm_head.weight"].clone()


def _tensors(s: Shape, seed: int, dtype: torch.dtype, peaked: bool, published: bool) -> dict[str, Tensor]:
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
    if peaked:
        lengths = torch.exp(1.5 * w.normal(s.vocab))
        head = w.tensors["lm_head.weight"].float() * (4 * lengths / lengths.max()).unsqueeze(1)
        w.tensors["lm_head.weight"] = head.to(dtype)
        # Which experts a token goes to may hang on rounding; what they add must not.
        last = ".routed_expert_up_proj.weight" if s.form == "k3" else ".w2.weight"
        for name in [name for name in w.tensors if name.endswith(last)]:
            w.tensors[name] = w.tensors[name] * 0.05
    if s.form == "k3":
        w.norm("model.output_attn_res_norm", s.hidden)
        w.linear("model.output_attn_res_proj", 1, s.hidden)
        if published:
            _draft_layer(w, s)
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
    peaked: bool = False,
    published: bool = False,
) -> int:
    """Write a checkpoint, its config and a byte tokenizer into ``path`` (created); return the number of parameters.

    The same arguments give the same bytes. ``form`` "k3" has the full-rank gate with lower bound -5, the attention
    residual, SiTU and latent experts, and a low-rank MLA query; "kimi-linear" has the low-rank softplus gate and SiLU
    experts. Layers 1..``layers`` are KDA except every ``mla_every``-th. ``peaked``: the output head's rows differ a
    hundredfold in length, so that fewer tokens are nearly as likely, and routed experts add little, because random
    routers choose by rounding. ``published``: config.json and the tensors'
    names are those of published models (`models.random_config`), K3 with its draft head (MTP); weights of a vision
    tower are not written.

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
    tensors = _tensors(shape, seed, getattr(torch, dtype), peaked, published)
    if published and form == "k3":
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(document(shape, dtype, published), indent=1) + "\n")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(special) + "\n")
    _write_tokenizer(path, vocab, max_length)
    return sum(t.numel() for t in tensors.values())


def main() -> None:
    """Command line: python -m models.random_model PATH [--preset k3] [--form kimi-linear] [--heads 8] ..."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(write_random_model).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="arguments by name; those that are given win"
    )
    choices = {"form": ["k3", "kimi-linear"], "dtype": ["float32", "bfloat16"]}
    for name, value in defaults.items():
        flag, shown = f"--{name.replace('_', '-')}", f"default {value}"
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true", default=None, help=shown)
        else:
            parser.add_argument(flag, type=type(value), choices=choices.get(name), help=shown)
    given = vars(parser.parse_args())
    path, preset = given.pop("path"), given.pop("preset")
    options = PRESETS.get(preset, {}) | {name: value for name, value in given.items() if value is not None}
    print(f"{write_random_model(path, **options)} parameters in {path}")


if __name__ == "__main__":
    main()
