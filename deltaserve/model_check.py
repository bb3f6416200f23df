# SPDX-License-Identifier: Apache-2.0
"""What a model folder holds, and whether this cluster can serve it. Reads two small files; loads nothing.

A servable model is hybrid: some layers are Kimi Delta Attention (`linear_attn_config.kda_layers`), the others latent
attention (`full_attn_layers`). A model without KDA layers has no state for which this project would be needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.documents import parse_json

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tokenization_kimi.py")


class ModelError(ValueError):
    """The folder cannot be served; the message names it, what is wrong and the remedy."""


@dataclass(frozen=True)
class ModelFacts:
    """What config.json says about a hybrid model. Layer numbers are counts, head sizes are channels."""

    architecture: str
    kda_layers: int
    mla_layers: int
    kda_heads: int
    kda_head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    """None: the softplus gate of Kimi-Linear."""
    full_rank_gate: bool
    dtype: str
    quantization: str
    """Method of the weights' quantisation, empty for none."""
    max_position: int
    """Longest sequence the model was made for, tokens; 0 when config.json does not say."""


def require_servable(model: Path) -> ModelFacts:
    """The facts of a hybrid model that has weights and a tokenizer.

    Raises ModelError when the folder is missing or incomplete, or the model is not hybrid.
    """
    if not model.is_dir():
        raise ModelError(
            f"model {model}: no such folder; give the folder of a hybrid Kimi model with --model"
        )
    facts = read_facts(model)
    if not any((model / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"model {model}: has no tokenizer ({' or '.join(_TOKENIZERS[:3])}); "
            "copy the tokenizer's files of the model into the folder"
        )
    if not any(model.glob("*.safetensors")):
        raise ModelError(f"model {model}: has no *.safetensors weights; give a complete model with --model")
    return facts


def read_facts(model: Path) -> ModelFacts:
    """The facts out of config.json alone. Raises ModelError when there is none, or the model is not hybrid."""
    path = model / "config.json"
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"model {model}: cannot read config.json ({error.strerror}); give the folder of a model with --model"
        ) from error
    except ValueError as error:
        raise ModelError(f"model {model}: config.json is not JSON ({error})") from error
    try:
        return _facts(model, document)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"model {model}: config.json is not that of a model ({error}); copy the model's own file into the folder"
        ) from error


def _facts(model: Path, document: Any) -> ModelFacts:
    """Raises ModelError when the model is not hybrid, and whatever Python says to fields of other types."""
    text: dict[str, Any] = document.get("text_config") or document
    linear: dict[str, Any] = text.get("linear_attn_config") or {}
    kda, mla = linear.get("kda_layers") or [], linear.get("full_attn_layers") or []
    if not kda or not mla:
        kind = text.get("model_type") or document.get("model_type") or "unknown"
        raise ModelError(
            f"model {model}: {kind} is not a hybrid of KDA and full attention (linear_attn_config in config.json names "
            "no kda_layers or no full_attn_layers); give a hybrid Kimi model, or serve this one with vLLM alone"
        )
    heads = int(linear.get("num_heads", text.get("num_attention_heads", 0)))
    bound = linear.get("gate_lower_bound")
    quantization = text.get("quantization_config") or document.get("quantization_config") or {}
    return ModelFacts(
        architecture=str((document.get("architectures") or ["unknown"])[0]),
        kda_layers=len(kda),
        mla_layers=len(mla),
        kda_heads=heads,
        kda_head_dim=int(linear.get("head_dim", 128)),
        conv_width=int(linear.get("short_conv_kernel_size", 4)),
        gate_lower_bound=None if bound is None else float(bound),
        full_rank_gate=bool(linear.get("use_full_rank_gate", False)),
        dtype=str(text.get("torch_dtype") or text.get("dtype") or document.get("torch_dtype") or "unknown"),
        quantization=str(quantization.get("quant_method", "")),
        max_position=int(text.get("model_max_length") or text.get("max_position_embeddings") or 0),
    )
