# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduling one step ahead on a CPU, where its platform switches it off.

A step has been computed there when it has been launched, so what is shown is the scheduler's order: a step is
scheduled, and its blocks are named, before the outcome of the one before it is known. What a device does meanwhile is
not.
"""

from __future__ import annotations

import contextlib
from typing import Any


class _Done:
    """A CUDA stream or event of work that has been done when it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


def allow(vllm_config: Any) -> None:
    """Let an engine with this configuration schedule ahead; before it is made, in the process that it will run in."""
    import torch

    vllm_config.scheduler_config.async_scheduling = True
    torch.cuda.Event = _Done  # type: ignore[assignment,misc]
    torch.cuda.Stream = _Done  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: _Done()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc,return-value]
