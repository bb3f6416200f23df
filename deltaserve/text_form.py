# SPDX-License-Identifier: Apache-2.0
"""K3 from its published files: the text model alone.

A published K3 nests its text model beside a vision tower, under the architecture KimiK3ForConditionalGeneration, and
its tensors' names begin with `language_model.`. This cluster serves text. So router and workers hand vLLM the nested
configuration as the whole one (`text_alone`), and the text model leaves out what belongs to the tower
(`text_weights`): no tower in memory, no image processor, and every check that vLLM makes of the text model holds. A
configuration of the text model alone, or of Kimi-Linear, passes through unchanged; so does that of K3's draft head,
which vLLM has renamed by the time it comes here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PUBLISHED = "KimiK3ForConditionalGeneration"
TEXT = "KimiLinearForCausalLM"
VARIABLE = "DELTASERVE_TEXT_FORM"
"""1 in every process of an engine whose model is published with its tower: their text model's class is ours."""

_PREFIX = "language_model."
_TOWER = ("vision_tower.", "mm_projector.")


def is_published(model: Path) -> bool:
    """Whether the folder's config.json nests the text model; False also where there is none that can be read."""
    try:
        document = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return PUBLISHED in document["architectures"] and isinstance(document["text_config"], dict)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def has_chat_template(model: Path) -> bool:
    """Whether the model's files hold a chat template; published K3 renders conversations by code of vLLM instead."""
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(
            json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


class TextAlone:
    """vLLM's `hf_overrides`: the text model's configuration out of a published one, any other as it is."""

    def __call__(self, config: Any) -> Any:
        text = getattr(config, "text_config", None)
        if list(getattr(config, "architectures", None) or []) != [PUBLISHED] or text is None:
            return config
        text.architectures = [TEXT]
        quantization = getattr(text, "quantization_config", None) or getattr(
            config, "quantization_config", None
        )
        if quantization is not None:
            if quantization.get("format") == "mxfp4-pack-quantized":
                # What vLLM does for the published architecture by its name: MXFP4's own kernels for the experts.
                quantization = {**quantization, "quant_method": "mxfp4"}
            text.quantization_config = quantization
        return text

    def __repr__(self) -> str:
        return "text_alone"  # the same in every process: it is part of what kept answers are named by


text_alone = TextAlone()


def text_weights(weights: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """(name, tensor, ...) of the text model, by its own names; others as they are, the tower's left out."""
    for name, *rest in weights:
        if name.startswith(_TOWER):
            continue
        short = name.removeprefix(_PREFIX)
        yield (f"model.{short}" if short.startswith("layers.") else short, *rest)
