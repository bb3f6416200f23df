# SPDX-License-Identifier: Apache-2.0
"""Times of the kernels, of whole transfers between caches and pinned memory, and of decode steps beside them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.copies.caches import Caches
from benchmarks.kernels.timing import graph_us
from statestore.gpu.kernels import CHECK, GATHER, SCATTER
from statestore.gpu.launch import ShardKernels, Table
from statestore.reshard import head_bytes, row_bytes

MODES = {"gather + digest": GATHER, "scatter": SCATTER, "check + digest": CHECK}
SETS = 4
"""Blocks, token sets and staging that calls take turns with: together several times the L2 cache."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    what: str
    milliseconds: float
    nbytes: int
    """Read plus written."""

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.milliseconds * 1e3


def heads(caches: Caches, kernels: ShardKernels, mode: str) -> Row:
    """All heads of the rank."""
    g = caches.geometry
    nbytes = g.heads_per_rank * head_bytes(g)
    staging = [torch.randint(1 << 60, (nbytes // 8,), device="cuda") for _ in range(SETS)]
    flags = -(-g.heads_per_rank * len(g.kda_layers) // 2)
    found = torch.zeros(g.heads_per_rank + flags, dtype=torch.int64, device="cuda")
    pages = [kernels.pages(([block + 1],)) for block in range(SETS)]
    one = MODES[mode]
    calls = [lambda n=n: kernels.launch_states(one, pages[n], 0, staging[n], found) for n in range(SETS)]
    us = graph_us(calls)
    return Row(f"KDA {mode}", us / 1e3, nbytes * (1 if one == CHECK else 2))


def rows(kernels: ShardKernels, tables: list[list[Table]], mode: str) -> Row:
    """The rows at each of `tables`, all as long."""
    count = len(tables[0][0][0])
    nbytes = count * row_bytes(kernels.geometry)
    staging = [torch.randint(1 << 60, (nbytes // 8,), device="cuda") for _ in tables]
    units = np.stack([np.arange(count) // 1024, np.arange(count) % 1024])
    found = torch.zeros(-(-count // 1024) + 1, dtype=torch.int64, device="cuda")
    places = [kernels.places(units, table) for table in tables]
    one = MODES[mode]
    calls = [lambda n=n: kernels.launch_rows(one, places[n], staging[n], found) for n in range(len(tables))]
    us = graph_us(calls)
    return Row(f"MLA {mode}", us / 1e3, nbytes * (1 if one == CHECK else 2))


def plain_copy(nbytes: int) -> Row:
    """A device's copy of as many bytes, in the same way."""
    source = [torch.randint(1 << 60, (nbytes // 8,), device="cuda") for _ in range(SETS)]
    target = [torch.empty_like(one) for one in source]
    us = graph_us([lambda n=n: target[n].copy_(source[n]) for n in range(SETS)])
    return Row("copy", us / 1e3, 2 * nbytes)


def wall(call: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of a call that returns when it is done."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def host_bandwidth(nbytes: int = 1 << 28) -> Iterator[Row]:
    """Between the device and pinned memory, one copy at a time."""
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for what, target, source in (("device to host", host, device), ("host to device", device, host)):

        def once(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        yield Row(what, wall(once), nbytes)


class DecodeLoad:
    """What a decode step does to a device: reads weights, one matrix after the other, in one graph."""

    def __init__(self, matrices: int = 40, layers: int = 240, width: int = 7168, batch: int = 32) -> None:
        weights = [torch.randn(width, width, dtype=torch.bfloat16, device="cuda") for _ in range(matrices)]
        x = torch.randn(batch, width, dtype=torch.bfloat16, device="cuda")
        out = torch.empty_like(x)
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            torch.mm(x, weights[0], out=out)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream):
                for layer in range(layers):
                    torch.mm(x, weights[layer % matrices], out=out)

    def steps(self, count: int) -> list[float]:
        """Milliseconds of each of `count` steps."""
        times = []
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                began = time.perf_counter()
                self._graph.replay()
                self._stream.synchronize()
                times.append((time.perf_counter() - began) * 1e3)
        return times


def beside(load: DecodeLoad, transfer: Callable[[], object], count: int = 100) -> tuple[float, float, float]:
    """Steps alone and beside `transfer` without pause: median milliseconds of both, and transfers a step."""
    alone = statistics.median(load.steps(count))
    done = threading.Event()
    transfers = 0

    def run() -> None:
        nonlocal transfers
        with torch.cuda.stream(torch.cuda.Stream()):
            while not done.is_set():
                transfer()
                torch.cuda.current_stream().synchronize()
                transfers += 1

    thread = threading.Thread(target=run)
    thread.start()
    load.steps(10)
    before = transfers
    times = load.steps(count)
    moved = (transfers - before) / count
    done.set()
    thread.join()
    return alone, statistics.median(times), moved
