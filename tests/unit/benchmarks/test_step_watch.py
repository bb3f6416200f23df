# SPDX-License-Identifier: Apache-2.0
"""What the engine benchmark says of an engine's steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernels.watch import StepWatch, launches


class Engine:
    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps


def test_steps_count_only_between_begin_and_end() -> None:
    watch, engine = StepWatch(), Engine()
    watch.watch_steps(SimpleNamespace(llm_engine=engine))
    assert engine.step() == 1
    watch.begin()
    assert [engine.step(), engine.step()] == [2, 3]
    found = watch.end()
    engine.step()
    assert found["steps"] == 2
    assert len(found["slowest_ms"]) == 2
    assert watch.end()["steps"] == 2
    watch.begin()
    assert watch.end() == {"steps": 0, "median_ms": 0.0, "slowest_ms": [], "graphs": {}, "compiled": []}


def test_compilations_are_told_from_those_on_the_disk() -> None:
    knobs = pytest.importorskip("triton").knobs
    watch, before = StepWatch(), knobs.compilation.listener
    try:
        watch.watch_compiler()
        listen: Any = knobs.compilation.listener

        def build(name: str, cached: bool) -> None:
            source = SimpleNamespace(fn=SimpleNamespace(__name__=name))
            listen(
                src=source,
                metadata={},
                metadata_group={},
                times=SimpleNamespace(total=250_000),
                cache_hit=cached,
            )

        build("before", False)
        watch.begin()
        build("built", False)
        build("loaded", True)
        assert watch.end()["compiled"] == [["built", 0.25], ["loaded", 0.0]]
    finally:
        knobs.compilation.listener = before


def test_a_profile_is_counted_a_step() -> None:
    def event(key: str, count: int, microseconds: float = 0.0) -> Any:
        return SimpleNamespace(key=key, count=count, self_device_time_total=microseconds)

    events = [
        event("cudaLaunchKernel", 30),
        event("cuLaunchKernelEx", 10),
        event("cudaGraphLaunch", 20),
        event("cudaEventSynchronize", 10),
        event("some_kernel", 400, 5000.0),
    ]
    line = launches(events, 10)
    assert "4.0 launches, 2.0 graph launches, 1.0 waits, 0.500 ms" in line
    assert launches([], 0).startswith("a step: 0.0 launches")
