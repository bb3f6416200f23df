# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's internal checkpoints in vLLM 0.33.0: one mend, and a switch that takes them away.

The mend: K3's layer on NVIDIA makes the exporter of checkpoints without saying how long a convolution's history is.
The exporter then takes the cache's width for it, which with drafts is wider by one column a draft, and stores so many
raw columns, oldest first: whoever goes on from that checkpoint reads the first three, which are too old by as many
tokens as there are drafts. vLLM's other layers say the length (Qwen, GLM, K3 on AMD). Without drafts nothing changes.

The switch: `DELTASERVE_INTERNAL_CHECKPOINTS=0` in a worker's environment, to compare the one-pass path with the
two-pass path. vLLM asks one function, by the name of the prefill kernel, how its checkpoints must be aligned; None
means that it takes none, and the scheduler ends a pass at the last block boundary instead. Kernel and blocks stay.

Both are names of one module, and exchanged before K3's layers, which bind them, are imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

VARIABLE = "DELTASERVE_INTERNAL_CHECKPOINTS"
_MODULE = "vllm.model_executor.layers.mamba.kda_checkpoint"
_ALIGNMENT, _EXPORTER = "kda_prefill_checkpoint_alignment", "FlashKDAPrefillCheckpointExporter"
_USER = "vllm.models.kimi_k3.nvidia.kda"
_MENDED = "deltaserve_history"


def _none(backend: str) -> None:
    return None


def _history() -> int:
    """Columns of a convolution's history in the model that is being made."""
    from vllm.config import get_current_vllm_config

    linear: dict[str, Any] = get_current_vllm_config().model_config.hf_text_config.linear_attn_config
    return int(linear.get("short_conv_kernel_size", 4)) - 1


def mended(exporter: Any) -> Any:
    """The exporter's class, saying the history's length where its user does not."""

    def make(self: Any, state_len: int | None = None) -> None:
        exporter.__init__(self, _history() if state_len is None else state_len)

    return type(
        exporter.__name__, (exporter,), {"__init__": make, _MENDED: True, "__module__": exporter.__module__}
    )


def install() -> bool:
    """Mend the exporter; take checkpoints away if the environment asks for it, and return whether it does.

    Raises ValueError for a value that says neither yes nor no, UnsupportedVllmError where vLLM has not these names.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={chosen!r}: 0 takes prompts in two passes, 1 or nothing in one")
    module = importlib.import_module(_MODULE)
    missing = [name for name in (_ALIGNMENT, _EXPORTER) if not callable(getattr(module, name, None))]
    if missing:
        raise UnsupportedVllmError(f"this vLLM has no {_MODULE}.{missing[0]}; install vLLM 0.33.0")
    exchanged: dict[str, Any] = {}
    if not hasattr(getattr(module, _EXPORTER), _MENDED):
        exchanged[_EXPORTER] = mended(getattr(module, _EXPORTER))
    if chosen == "0":
        exchanged[_ALIGNMENT] = _none
    for name, value in exchanged.items():
        setattr(module, name, value)
        user = sys.modules.get(_USER)
        if user is not None and hasattr(user, name):  # its own name was bound before
            setattr(user, name, value)
    return chosen == "0"
