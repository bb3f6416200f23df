# SPDX-License-Identifier: Apache-2.0
"""Times on the device: medians of CUDA graph replays, and the copy that floors are computed from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]


def graph_us(calls: Sequence[Call], repeats: int = 11, per: int | None = None) -> float:
    """Median microseconds of one call, when all of ``calls`` are captured in order and replayed.

    Every call should work on bytes of its own, several times the L2 cache together, so that each replay reads memory.
    ``per`` is what to divide by if one call stands for several layers.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph.replay()
    graph.replay()
    events = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    median = float(statistics.median(b.elapsed_time(e) for b, e in events))
    return median * 1e3 / (per or len(calls))


def copy_bandwidth(size: int = 1 << 31, repeats: int = 15) -> float:
    """Bytes a second, read plus written, of a device-to-device copy of ``size`` bytes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return 2 * size / statistics.median(times) * 1e3
