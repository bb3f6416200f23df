# SPDX-License-Identifier: Apache-2.0
"""FlashKDA without internal checkpoints: the two-pass path, to compare the one-pass path with.

`DELTASERVE_INTERNAL_CHECKPOINTS=0` in a worker's environment. vLLM 0.33.0 asks one function, by the name of the prefill
kernel, how its checkpoints must be aligned; None means that it takes none, and the scheduler ends a pass at the last
block boundary instead. Kernel, blocks and everything else stay the same.
"""

from __future__ import annotations

import os
import sys

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

VARIABLE = "DELTASERVE_INTERNAL_CHECKPOINTS"
_ASKED, _NAME = "vllm.model_executor.layers.mamba.kda_checkpoint", "kda_prefill_checkpoint_alignment"
_USER = "vllm.models.kimi_k3.nvidia.kda"


def _none(backend: str) -> None:
    return None


def install() -> bool:
    """Take them away if the environment asks for it; whether it does.

    Raises ValueError for a value that says neither yes nor no, UnsupportedVllmError where vLLM has no such function or
    has been asked already.
    """
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE}={chosen!r}: 0 takes prompts in two passes, 1 or nothing in one")
    if chosen != "0":
        return False
    import importlib

    module = importlib.import_module(_ASKED)
    if not callable(getattr(module, _NAME, None)):
        raise UnsupportedVllmError(f"{VARIABLE}=0: this vLLM has no {_ASKED}.{_NAME}; leave the variable out")
    setattr(module, _NAME, _none)
    user = sys.modules.get(_USER)
    if user is not None:  # its own name for the function was bound before
        setattr(user, _NAME, _none)
    return True
