# SPDX-License-Identifier: Apache-2.0
"""Drafts without a recurrent state a position: the CPU engine's end of ReplaySSM (docs/replay_ssm.md).

vLLM's own flag switches it on: ``use_replayssm`` among the engine arguments. vLLM 0.32 refuses it for this model on a
CPU (its kernels are Triton's, its V1 model runner has no commit) and beside a KV connector, so the platform takes the
flag over before vLLM looks (``take_over``), and leaves a note in ``additional_config``.

The layers and the state copies ask for ``active()``; ``replay_runner.py`` sets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOTE = "deltaserve_replay"
"""Key of ``additional_config``; the configuration travels to every process with it."""

_active: Any = None


def take_over(vllm_config: Any) -> None:
    """Turn vLLM's ``use_replayssm`` into this project's note.

    Raise ``ValueError`` where there is no room for one, and with pipeline parallelism, whose first stages are not told
    how many tokens were accepted.
    """
    cache = vllm_config.cache_config
    if not cache.use_replayssm:
        return
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ValueError(
            "use_replayssm: on the CPU not with pipeline_parallel_size above 1; leave one of the two out"
        )
    if not isinstance(vllm_config.additional_config, dict):
        raise ValueError(
            "use_replayssm: additional_config must be a dict on the CPU, the setting travels in it; leave one of the "
            "two out"
        )
    cache.use_replayssm = False
    vllm_config.additional_config[NOTE] = True


def wanted(vllm_config: Any) -> bool:
    """Whether the layers fold at start: the note is there, and there are drafts."""
    options = getattr(vllm_config, "additional_config", None)
    noted = isinstance(options, Mapping) and bool(options.get(NOTE, False))
    return noted and vllm_config.num_speculative_tokens > 0


def active() -> Any:
    """The ``ReplaySteps`` of the engine whose step this process runs; None where states are written a position."""
    return _active


def activate(steps: Any) -> None:
    """Let the layers and the state copies of the step that begins use ``steps``."""
    global _active
    _active = steps
