# SPDX-License-Identifier: Apache-2.0
"""GPU settings for training: which KDA kernel serves, and how much compile time it may take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from models.demo_training import kda

TOLERANCE = {"d_a_log": 0.15, "d_dt_bias": 0.15}
"""Sums over all tokens in bfloat16; every other relative error must stay under 0.05."""


def prepare_gpu(note: Callable[[str, object], None]) -> str:
    """Set up the GPU and return the KDA kernel to use.

    Raises RuntimeError when the fla kernels disagree with the definition: training on them would not match.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("FLA_FLASH_KDA", "0")
    torch.backends.cuda.matmul.allow_tf32 = True
    _limit_autotuning()
    errors = kda.compare_with_definition("fla", torch.device("cuda"), torch.bfloat16)
    note("fla against the definition", {name: f"{value:.1e}" for name, value in errors.items()})
    bad = {n: e for n, e in errors.items() if not e < TOLERANCE.get(n, 0.05)}
    if bad:
        raise RuntimeError(f"fla's KDA kernels differ from the definition: {bad}; use fla-core 0.6.0")
    return "fla"


def _limit_autotuning() -> None:
    """Keep one configuration of each Triton kernel: trying them all costs more than it gains in ten minutes."""
    from triton.runtime import autotuner

    original = autotuner.Autotuner.__init__

    def preference(config: Any) -> tuple[float, float, int]:
        small = sum(v for v in config.kwargs.values() if isinstance(v, int) and v <= 64)
        return abs(math.log2(config.num_warps) - 2), abs(config.num_stages - 2), -small

    def limited(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:
        kept = sorted(configs or [], key=preference)[:1]
        original(self, fn, arg_names, kept or configs, *rest, **named)

    autotuner.Autotuner.__init__ = limited
