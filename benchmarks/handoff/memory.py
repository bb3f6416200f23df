# SPDX-License-Identifier: Apache-2.0
"""What this machine's memory does, and digests beside it, in the same run.

Cold: 64 MiB, more than the caches of a core hold; in cache: 256 KiB over and over, what the arithmetic alone takes.
"""

from __future__ import annotations

import os
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from statestore.digest import first_not_finite, first_null, unit_digest

COLD = 64 << 20
HOT = 256 << 10
TURNS = 7
RANKS = 4
"""Ranks that take digests at once."""


def measure() -> dict[str, Any]:
    """Bytes a second of copies, reads, digests and checks: median over `TURNS`, taking turns."""
    numbers = np.random.default_rng(1).standard_normal(COLD // 4, dtype=np.float32)
    data, target = numbers.view(np.uint8), np.zeros(COLD, np.uint8)
    hot = data[:HOT]
    parts = data.reshape(-1, HOT)
    halves = np.array_split(data, RANKS)
    work: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (COLD, lambda: np.copyto(target, data)),
        "read": (COLD, lambda: data.view(np.uint64).max()),
        "digest": (COLD, lambda: unit_digest(data)),
        f"digest, {RANKS} ranks": (
            COLD,
            lambda: _at_once([lambda part=part: unit_digest(part) for part in halves]),
        ),
        "checks": (COLD, lambda: (first_null(parts), first_not_finite(parts, "float32"))),
        "digest in cache": (64 * HOT, lambda: [unit_digest(hot) for _ in range(64)]),
        "checks in cache": (
            64 * HOT,
            lambda: [first_not_finite(hot.reshape(1, -1), "float32") for _ in range(64)],
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(TURNS):
        for name, (_, call) in work.items():
            began = time.monotonic()
            call()
            seconds[name].append(time.monotonic() - began)
    return {
        name: {
            "median": nbytes / statistics.median(seconds[name]),
            "best": nbytes / min(seconds[name]),
        }
        for name, (nbytes, _) in work.items()
    }


def _at_once(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def machine() -> dict[str, Any]:
    """The machine in words, and how busy it was."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else ""
    return {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
