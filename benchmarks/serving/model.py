# SPDX-License-Identifier: Apache-2.0
"""A model for measuring: the demonstration model's form at a size that keeps a GPU busy, without weights.

16 layers (12 KDA, 4 latent attention), 24 heads, 16 experts: about 4.9 billion parameters. Engines make the weights
themselves (`load_format=dummy`, the same ones in every engine), so the folder is a few kilobytes. Answers mean nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "models" / "demo"
LAYERS, HIDDEN, HEADS, EXPERTS, EXPERT_HIDDEN, VOCAB = 16, 4096, 24, 16, 2048, 32768
MLA_EVERY = 4
LONGEST = 131072


def config(layers: int = LAYERS, longest: int = LONGEST) -> dict[str, Any]:
    """config.json: the demonstration model's with other sizes. Raises ValueError for too few layers."""
    if layers < MLA_EVERY:
        raise ValueError(f"layers: {layers} hold no latent attention; use at least {MLA_EVERY}")
    made: dict[str, Any] = json.loads((DEMO / "config.json").read_text())
    mla = [layer for layer in range(1, layers + 1) if layer % MLA_EVERY == 0]
    made |= {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_token": 4,
        "moe_intermediate_size": EXPERT_HIDDEN,
        "moe_layer_freq": 1,
        "q_lora_rank": 768,
        "routed_expert_hidden_size": HIDDEN // 2,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": longest,
        "model_max_length": longest,
    }
    made["linear_attn_config"] |= {
        "kda_layers": [layer for layer in range(1, layers + 1) if layer not in mla],
        "full_attn_layers": mla,
        "num_heads": HEADS,
    }
    return made


def write(folder: Path, layers: int = LAYERS) -> Path:
    """Write the folder, and return it. What stands there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(layers), indent=1) + "\n")
    _write_tokenizer(folder)
    # Tools that want to see weights see one byte; with load_format=dummy nobody reads it.
    header = json.dumps({"none": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    return folder


def _write_tokenizer(folder: Path) -> None:
    """The demonstration model's, with words for every further token: any output can be detokenized."""
    shutil.copy(DEMO / "tokenizer_config.json", folder)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    words: dict[str, int] = tokenizer["model"]["vocab"]
    taken = set(words.values()) | {added["id"] for added in tokenizer.get("added_tokens", [])}
    for token in range(VOCAB):
        if token not in taken:
            words[f"<{token}>"] = token
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
