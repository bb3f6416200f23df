# SPDX-License-Identifier: Apache-2.0
"""What an engine's steps are made of: captured graphs or eager ones, launches, compilations, time a step.

A ``StepWatch`` is put on before the engine is loaded and counts while it is told to. It changes nothing of what the
engine does: it stands around vLLM's choice of a graph, Triton's compiler and the engine's own step.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


@dataclass
class StepWatch:
    """Counts since ``begin``."""

    counting: bool = False
    graphs: Counter[str] = field(default_factory=Counter)
    """Which graph a part of a step ran in: manager, mode, tokens."""
    compiled: list[tuple[str, float]] = field(default_factory=list)
    """Kernels compiled while counting, with the seconds they took (0: taken from the disk)."""
    seconds: list[float] = field(default_factory=list)
    """One number a step of the engine."""

    def begin(self) -> None:
        """Forget what was counted, and count."""
        self.graphs.clear()
        self.compiled.clear()
        self.seconds.clear()
        self.counting = True

    def end(self) -> dict[str, Any]:
        """Stop counting; return what was counted as JSON."""
        self.counting = False
        steps = sorted(self.seconds)
        return {
            "steps": len(steps),
            "median_ms": 1e3 * statistics.median(steps) if steps else 0.0,
            "slowest_ms": [round(1e3 * s, 2) for s in steps[-8:]],
            "graphs": dict(self.graphs),
            "compiled": [[name, round(seconds, 3)] for name, seconds in self.compiled],
        }

    def watch_compiler(self) -> None:
        """Note every kernel that Triton builds or loads from its disk cache."""
        from triton import knobs

        def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            if self.counting:
                name = getattr(getattr(src, "fn", None), "__name__", None) or str(src)[:60]
                self.compiled.append((name, 0.0 if cache_hit else times.total / 1e6))

        with suppress(AttributeError):
            knobs.compilation.listener = listen

    def watch_graphs(self) -> None:
        """Note which graph vLLM's managers choose for every part of a step."""
        from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

        dispatch = CudaGraphManager.dispatch

        @functools.wraps(dispatch)
        def noted(manager: Any, *args: Any, **kwargs: Any) -> Any:
            found = dispatch(manager, *args, **kwargs)
            if self.counting:
                self.graphs[f"{type(manager).__name__} {found.cg_mode.name} {found.num_tokens}"] += 1
            return found

        CudaGraphManager.dispatch = noted

    def watch_steps(self, llm: Any) -> None:
        """Time every step of ``llm``'s engine on the host's clock; a step ends when its tokens are on the host."""
        engine = llm.llm_engine
        step = engine.step

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return step(*args, **kwargs)
            finally:
                if self.counting:
                    self.seconds.append(time.perf_counter() - begin)

        engine.step = timed


def launches(events: Any, steps: int) -> str:
    """A profile's launches, graph launches and waits a step, one line."""
    counts = {event.key: event.count for event in events}
    own = sum(counts.get(name, 0) for name in LAUNCHES)
    waits = sum(counts.get(name, 0) for name in WAITS)
    device = sum(event.self_device_time_total for event in events if event.self_device_time_total)
    steps = max(steps, 1)
    return (
        f"a step: {own / steps:.1f} launches, {counts.get('cudaGraphLaunch', 0) / steps:.1f} graph launches, "
        f"{waits / steps:.1f} waits, {device / steps / 1e3:.3f} ms of the device's time; {steps} steps\n"
    )
