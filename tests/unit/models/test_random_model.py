# SPDX-License-Identifier: Apache-2.0
"""Models with random weights by name: what the presets write, and that options win over them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file  # noqa: E402

from models import random_model  # noqa: E402
from models.random_model import PRESETS, write_random_model  # noqa: E402


def made(folder: Path, preset: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and tensors."""
    write_random_model(folder / preset, **{**PRESETS[preset], **changes})
    config: dict[str, Any] = json.loads((folder / preset / "config.json").read_text())
    return config, load_file(folder / preset / "model.safetensors")


def test_the_gpu_presets_are_eight_layers_of_24_heads() -> None:
    for name in ("k3", "kimi-linear", "k3-published", "kimi-linear-published"):
        preset = PRESETS[name]
        assert (preset["layers"], preset["heads"], preset["head_dim"], preset["dtype"]) == (
            8,
            24,
            128,
            "bfloat16",
        )
        assert preset["max_length"] > 32768
        assert {**PRESETS[f"{name}-small"], **preset} == preset, "the small one is the same form"


def test_published_k3_nests_the_text_model_and_holds_a_draft_head(tmp_path: Path) -> None:
    config, tensors = made(tmp_path, "k3-published-small")
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    text = config["text_config"]
    assert (text["num_nextn_predict_layers"], text["dtype"]) == (1, "float32")
    assert text["linear_attn_config"]["gate_lower_bound"] == -5.0
    assert not {"max_position_embeddings", "min_moe_intermediate_per_partition", "torch_dtype"} & set(text)
    assert all(name.startswith("language_model.") for name in tensors)
    assert "language_model.model.layers.4.eh_proj.weight" in tensors
    plain, same = made(tmp_path, "k3-small")
    assert plain["architectures"] == ["KimiLinearForCausalLM"]
    assert not [name for name in same if ".layers.4." in name], "control: the plain form has none"
    assert torch.equal(same["lm_head.weight"], tensors["language_model.lm_head.weight"])


def test_published_kimi_linear_has_its_own_fields(tmp_path: Path) -> None:
    config, tensors = made(tmp_path, "kimi-linear-published-small")
    assert config["architectures"] == ["KimiLinearForCausalLM"]
    assert "AutoConfig" in config["auto_map"]
    assert "gate_lower_bound" not in config["linear_attn_config"]
    assert "model.layers.0.self_attn.g_a_proj.weight" in tensors, "the gate of low rank"


@pytest.mark.parametrize("preset", ["k3-small", "kimi-linear-small"])
def test_peaked_heads_change_their_minds_less_often(tmp_path: Path, preset: str) -> None:
    """How often an error of a hundredth of the hidden state makes another token the likeliest."""
    generator = torch.Generator().manual_seed(1)
    hidden, error = torch.randn(2, 8000, 128, generator=generator)

    def changed(head: Any) -> float:
        chosen = [(state @ head.float().T).argmax(1) for state in (hidden, hidden + 0.01 * error)]
        return float((chosen[0] != chosen[1]).float().mean())

    _, peaked = made(tmp_path, preset)
    _, flat = made(tmp_path, preset, peaked=False)
    assert 0 < changed(peaked["lm_head.weight"]) < 0.8 * changed(flat["lm_head.weight"])
    last = "routed_expert_up_proj.weight" if preset.startswith("k3") else ".w2.weight"
    routed = [name for name in flat if name.endswith(last)]
    assert routed
    assert all(torch.allclose(peaked[name], 0.05 * flat[name]) for name in routed)


def test_the_command_takes_a_preset_and_options_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["x", str(tmp_path / "m"), "--preset", "k3-published-small", "--heads", "2", "--seed", "5"]
    monkeypatch.setattr(sys, "argv", argv)
    random_model.main()
    assert "parameters in" in capsys.readouterr().out
    text = json.loads((tmp_path / "m" / "config.json").read_text())["text_config"]
    assert (text["num_attention_heads"], text["num_hidden_layers"]) == (2, 4)
