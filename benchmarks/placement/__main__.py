# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.placement`; see the package's description."""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.policy import POLICIES, Prompt, make

AIMS = {64: 200.0, 1000: 1000.0}
"""Microseconds at p99, by workers."""
SHARED = 16
"""Beginnings that prompts share."""


@dataclass
class Worker:
    """A worker as a policy sees it."""

    worker_id: str
    outstanding: int
    state_bytes: int
    running: int


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--quick", action="store_true", help="few decisions: a look, not a measurement")
    return made


def prompts(count: int, noise: random.Random) -> list[Prompt]:
    """Prompts that share beginnings; their digests are not computed yet."""
    beginnings = [[noise.randrange(100_000) for _ in range(6000)] for _ in range(SHARED)]
    made = []
    for _ in range(count):
        length = noise.choice((200, 500, 1000, 2000, 4000, 8000))
        shared = noise.choice(beginnings)[: length * 3 // 4]
        made.append(Prompt([*shared, *(noise.randrange(100_000) for _ in range(length - len(shared)))]))
    return made


def measure(choose: Callable[[Prompt], object], wanted: Sequence[Prompt]) -> dict[str, float]:
    """Microseconds of one decision."""
    times = []
    for prompt in wanted:
        began = time.perf_counter_ns()
        choose(prompt)
        times.append((time.perf_counter_ns() - began) / 1000)
    times.sort()
    return {"p50": times[len(times) // 2], "p99": times[len(times) * 99 // 100], "worst": times[-1]}


def run(decisions: int) -> list[dict[str, Any]]:
    """A row for each policy and number of workers."""
    return [row for count in AIMS for row in run_size(count, decisions)]


def run_size(count: int, decisions: int) -> list[dict[str, Any]]:
    """The rows of one number of workers."""
    noise = random.Random(1)
    workers = [
        Worker(f"w{i}", noise.randrange(20_000), noise.randrange(1 << 30), noise.randrange(64))
        for i in range(count)
    ]
    decodes, prefills = workers[: count // 2], workers[count // 2 :]

    def row(name: str, choose: Callable[[Prompt], object]) -> dict[str, Any]:
        found = measure(choose, prompts(decisions, noise))
        return {"workers": count, "policy": name, "aim_p99": AIMS[count], **found}

    rows = []
    for name in POLICIES:
        policy = make(name, 256)
        for prompt in prompts(300, noise):
            policy.ended(noise.choice(decodes).worker_id, prompt, [5] * 100)
            policy.prefilled(
                noise.choice(prefills).worker_id, prompt, prompt.length, prompt.length / 2000, True
            )
        rows.append(row(name, functools.partial(policy.choose, decodes=decodes, prefills=prefills)))
    rows.append(row("(random)", lambda prompt: noise.choice(decodes)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when an aim is missed."""
    options = parser().parse_args(arguments)
    rows = run(100 if options.quick else 2000)
    print(f"{'workers':>7}  {'policy':<9} {'p50 µs':>8} {'p99 µs':>8} {'worst µs':>9}   aim p99")
    for row in rows:
        print(
            f"{row['workers']:>7}  {row['policy']:<9} {row['p50']:>8.1f} {row['p99']:>8.1f} {row['worst']:>9.1f}   "
            f"{row['aim_p99']:.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["p99"] > row["aim_p99"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
