# SPDX-License-Identifier: Apache-2.0
"""vLLM's text model on CUDA, from a checkpoint that has a vision tower beside it (deltaserve.text_form)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.models import kimi_k3

from deltaserve.text_form import text_weights

_Text: Any = kimi_k3.KimiLinearForCausalLM


class KimiLinearForCausalLM(_Text):
    """The same model; only the names of its tensors are read differently."""

    def load_weights(self, weights: Iterable[Any]) -> set[str]:
        loaded: set[str] = super().load_weights(text_weights(weights))
        return loaded
