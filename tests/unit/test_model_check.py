# SPDX-License-Identifier: Apache-2.0
"""What a model folder holds, read from config.json as Kimi-Linear and K3 write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.model_check import ModelError, read_facts, require_servable

DEMO = Path(__file__).parents[2] / "models" / "demo"
LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "torch_dtype": "bfloat16",
    "model_max_length": 1048576,
    "num_attention_heads": 32,
    "linear_attn_config": {
        "kda_layers": list(range(20)),
        "full_attn_layers": list(range(7)),
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}


def folder(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_kimi_linear(tmp_path: Path) -> None:
    facts = require_servable(folder(tmp_path, LINEAR))
    assert (facts.kda_layers, facts.mla_layers, facts.kda_heads, facts.kda_head_dim) == (20, 7, 32, 128)
    assert (facts.gate_lower_bound, facts.full_rank_gate, facts.quantization) == (None, False, "")
    assert (facts.dtype, facts.max_position, facts.conv_width) == ("bfloat16", 1048576, 4)


def test_k3_keeps_the_text_part_inside(tmp_path: Path) -> None:
    text = {
        **LINEAR,
        "linear_attn_config": {
            **LINEAR["linear_attn_config"],
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
        "quantization_config": {"quant_method": "mxfp4"},
    }
    document = {"architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}
    facts = read_facts(folder(tmp_path, document))
    assert facts.architecture == "KimiK3ForConditionalGeneration"
    assert (facts.gate_lower_bound, facts.full_rank_gate, facts.quantization) == (-5.0, True, "mxfp4")


def test_the_demonstration_model_is_servable() -> None:
    facts = require_servable(DEMO)
    assert facts.kda_layers > 0
    assert facts.mla_layers > 0


@pytest.mark.parametrize("empty", ["kda_layers", "full_attn_layers"])
def test_one_kind_of_layer_alone_is_not_hybrid(tmp_path: Path, empty: str) -> None:
    linear = {**LINEAR["linear_attn_config"], empty: []}
    with pytest.raises(ModelError, match=r"kimi_linear is not a hybrid .*give a hybrid Kimi model"):
        read_facts(folder(tmp_path, {**LINEAR, "linear_attn_config": linear}))


MALFORMED: dict[str, Any] = {
    "a list": [],
    "text_config is a list": {"text_config": [1]},
    "linear_attn_config is a number": {**LINEAR, "linear_attn_config": 3},
    "kda_layers is a number": {
        **LINEAR,
        "linear_attn_config": {**LINEAR["linear_attn_config"], "kda_layers": 5},
    },
    "num_heads is a word": {
        **LINEAR,
        "linear_attn_config": {**LINEAR["linear_attn_config"], "num_heads": "four"},
    },
    "architectures is an object": {**LINEAR, "architectures": {"a": 1}},
    "quantization_config is a word": {**LINEAR, "quantization_config": "int4"},
    "model_max_length is a word": {**LINEAR, "model_max_length": "many"},
}


@pytest.mark.parametrize("document", MALFORMED.values(), ids=MALFORMED)
def test_a_config_of_another_shape_is_named(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ModelError, match=rf"model {tmp_path}: config.json is not that of a model .*; copy"):
        require_servable(folder(tmp_path, document))


def test_a_config_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    folder(tmp_path, LINEAR)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelError, match=r"config.json is not JSON \(it is nested too deeply\)"):
        require_servable(tmp_path)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("config.json", "cannot read config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "weights"),
    ],
)
def test_an_incomplete_folder_is_named(tmp_path: Path, missing: str, words: str) -> None:
    (folder(tmp_path, LINEAR) / missing).unlink()
    with pytest.raises(ModelError, match=words) as caught:
        require_servable(tmp_path)
    assert str(tmp_path) in str(caught.value)
