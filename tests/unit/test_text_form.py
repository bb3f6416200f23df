# SPDX-License-Identifier: Apache-2.0
"""K3's published files: read as the text model, by the router and by an engine, and nothing else is touched."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve import text_form
from deltaserve.config import RouterConfig, WorkerConfig
from deltaserve.engine.arguments import engine_args, set_environment
from deltaserve.model_check import require_servable
from models.random_model import PRESETS, write_random_model

LENGTH = 2048


def made(folder: Path, preset: str) -> Path:
    write_random_model(folder / preset, **PRESETS[preset])
    return folder / preset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for preset in ("k3-published-small", "kimi-linear-published-small", "k3-small"):
        made(root, preset)
    return root


def test_published_files_are_told_from_others(folder: Path) -> None:
    names = ("k3-published-small", "kimi-linear-published-small", "k3-small", "missing")
    assert [text_form.is_published(folder / name) for name in names] == [True, False, False, False]


def test_the_facts_of_every_form(folder: Path) -> None:
    for name, architecture in (
        ("k3-published-small", "KimiK3ForConditionalGeneration"),
        ("kimi-linear-published-small", "KimiLinearForCausalLM"),
    ):
        facts = require_servable(folder / name)
        assert (facts.architecture, facts.kda_layers, facts.mla_layers) == (architecture, 3, 1)
        assert (facts.max_position, facts.dtype) == (33792, "float32")


def test_the_text_model_is_what_is_nested() -> None:
    text = SimpleNamespace(architectures=None)
    config = SimpleNamespace(architectures=[text_form.PUBLISHED], text_config=text)
    assert text_form.text_alone(config) is text
    assert text.architectures == [text_form.TEXT]
    assert not hasattr(text, "quantization_config")


def test_other_configurations_pass_through() -> None:
    """vLLM hands the same function the draft head's, which it has renamed, and dummies without fields."""
    draft = SimpleNamespace(architectures=["KimiK3MTPModel"], text_config=SimpleNamespace())
    for config in (draft, SimpleNamespace(), SimpleNamespace(architectures=[text_form.TEXT])):
        assert text_form.text_alone(config) is config


@pytest.mark.parametrize(
    ("form", "method"), [("mxfp4-pack-quantized", "mxfp4"), ("other", "compressed-tensors")]
)
def test_the_weights_quantisation_goes_with_it(form: str, method: str) -> None:
    outer = {"quant_method": "compressed-tensors", "format": form}
    config = SimpleNamespace(
        architectures=[text_form.PUBLISHED], text_config=SimpleNamespace(), quantization_config=outer
    )
    assert text_form.text_alone(config).quantization_config["quant_method"] == method
    assert outer["quant_method"] == "compressed-tensors"


def test_names_of_tensors() -> None:
    names = {
        "language_model.model.layers.0.x": "model.layers.0.x",
        "language_model.layers.0.x": "model.layers.0.x",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.layers.1.y": "model.layers.1.y",
        "vision_tower.encoder.z": None,
        "mm_projector.proj.0.z": None,
    }
    found = list(text_form.text_weights((name, i, {"a": i}) for i, name in enumerate(names)))
    wanted = [(name, i, {"a": i}) for i, name in enumerate(names.values()) if name is not None]
    assert found == wanted


def test_engines_are_given_the_form(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(text_form.VARIABLE, raising=False)
    plain = WorkerConfig(model=folder / "k3-small")
    set_environment(plain)
    import os

    assert text_form.VARIABLE not in os.environ
    assert "hf_overrides" not in engine_args(plain, None)
    published = WorkerConfig(model=folder / "k3-published-small")
    monkeypatch.setenv(text_form.VARIABLE, "")  # put back afterwards
    monkeypatch.delenv(text_form.VARIABLE)
    set_environment(published)
    assert os.environ[text_form.VARIABLE] == "1"
    args = engine_args(published, None)
    assert json.dumps(args["hf_overrides"], default=str) == '"text_alone"', "kept answers are named by it"


def configured(model: Path, monkeypatch: pytest.MonkeyPatch, **router: Any) -> Any:
    """vLLM's model configuration as a router makes it."""
    pytest.importorskip("vllm")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from router import core_client
    from router.app import arguments

    return core_client.front_config(
        arguments(RouterConfig(model=model, max_model_len=LENGTH, **router))
    ).model_config


@pytest.mark.parametrize("name", ["k3-published-small", "kimi-linear-published-small", "k3-small"])
def test_a_router_starts_from_it(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(folder / name, monkeypatch)
    assert config.architecture == text_form.TEXT
    assert (config.is_hybrid, config.is_multimodal_model) == (True, False)
    assert (config.max_model_len, config.tokenizer_mode) == (LENGTH, "auto")


def test_without_a_template_conversations_are_rendered_as_k3s(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(tmp_path, "k3-published-small")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert configured(model, monkeypatch).tokenizer_mode == "kimi_k3"
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert configured(model, monkeypatch).tokenizer_mode == "auto"


def test_vllm_alone_takes_it_for_more_than_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without `text_alone` the same folder is another model, which has no class on this platform or wants an
    image processor."""
    monkeypatch.setattr(text_form, "is_published", lambda model: False)
    try:
        config = configured(folder / "k3-published-small", monkeypatch)
    except Exception:
        return
    assert config.architecture != text_form.TEXT
