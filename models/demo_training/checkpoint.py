# SPDX-License-Identifier: Apache-2.0
"""Write the trained weights as vLLM loads them, and read them back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.demo_training.config import DemoConfig
from models.demo_training.model import DemoModel, MtpHead

SHARD_BYTES = 12 << 20
_FLOAT32 = ("A_log", "dt_bias", "e_score_correction_bias", "conv1d.weight")
_EXPERT = re.compile(r"(.*block_sparse_moe)\.(w[123])$")


def _stored(name: str, value: Tensor) -> Tensor:
    return value.float() if name.endswith(_FLOAT32) else value.to(torch.bfloat16)


def _text_tensors(model: DemoModel) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        value = _stored(name, parameter.detach().cpu())
        expert = _EXPERT.match(name)
        if expert:
            for i, weight in enumerate(value):
                tensors[f"{expert[1]}.experts.{i}.{expert[2]}.weight"] = weight.clone()
        else:
            tensors[name] = (value.view(1, 1, -1, 1) if name.endswith("A_log") else value).clone()
    return tensors


def _draft_tensors(text: DemoModel, head: MtpHead) -> dict[str, Tensor]:
    prefix = f"model.layers.{text.config.layers}"
    tensors = {f"{prefix}.{n}": _stored(n, p.detach().cpu()).clone() for n, p in head.state_dict().items()}
    # vLLM wants both tables in the draft's file and then shares the text model's.
    tensors[f"{prefix}.embed_tokens.weight"] = text.model.embed_tokens.weight.detach().cpu().bfloat16()
    tensors[f"{prefix}.shared_head.head.weight"] = text.lm_head.weight.detach().cpu().bfloat16()
    return tensors


def _write(tensors: dict[str, Tensor], folder: Path) -> int:
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for name, value in tensors.items():
        count = value.numel() * value.element_size()
        if size + count > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = value.contiguous()
        size, total = size + count, total + count
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {key: name for shard, name in zip(shards, names, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")) + "\n")
    for shard, name in zip(shards, names, strict=True):
        save_file(shard, str(folder / name), metadata={"format": "pt"})
        (folder / name).chmod(0o644)
    return total


def save(text: DemoModel, head: MtpHead, folder: Path) -> int:
    """Write the text model to `folder` and its draft to `folder/mtp`; returns the bytes of all tensors."""
    draft = folder / "mtp"
    draft.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(text.config.text_config(), indent=1) + "\n")
    (draft / "config.json").write_text(json.dumps(text.config.draft_config(), indent=1) + "\n")
    return _write(_text_tensors(text), folder) + _write(_draft_tensors(text, head), draft)


def _read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(str(path)))
    if not tensors:
        raise FileNotFoundError(f"no *.safetensors in {folder}; is it a checkpoint folder?")
    return tensors


def load(folder: Path) -> tuple[DemoModel, MtpHead]:
    """Read a checkpoint for float32 computation on the stored values.

    Raises FileNotFoundError without weights and ValueError when tensors are missing or left over.
    """
    config = DemoConfig.from_text_config(json.loads((folder / "config.json").read_text()))
    text, head = DemoModel(config), MtpHead(config)
    stored = _read(folder)
    state = text.state_dict()
    for name in state:
        expert = _EXPERT.match(name)
        if expert:
            keys = [f"{expert[1]}.experts.{i}.{expert[2]}.weight" for i in range(config.experts)]
            state[name] = torch.stack([stored.pop(key).float() for key in keys])
        else:
            state[name] = stored.pop(name).float().view(state[name].shape)
    if stored:
        raise ValueError(f"{folder} holds tensors that the model has no place for: {sorted(stored)[:3]}")
    text.load_state_dict(state)
    draft = _read(folder / "mtp")
    prefix = f"model.layers.{config.layers}."
    head.load_state_dict({name: draft[prefix + name].float() for name in head.state_dict()})
    return text.eval(), head.eval()
