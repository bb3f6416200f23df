# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling`: planner, best static pools and best autoscaler on the held-out traces.

Baselines are those of baselines.json, tuned for each trace on the training seeds; the planner has one setting for all.
SLO attainment is the share of requests that met both limits, GPU-hours are those of one trace; both are means over the
seeds. Ends with 1 when the planner does not win on both numbers against both baselines on every trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scaling.baselines import HIGHEST, Autoscaler, AutoscalerSettings, Static
from benchmarks.scaling.model import GPUS, SLO, WORKER
from benchmarks.scaling.planned import Planned, profile
from benchmarks.scaling.simulator import Policy, Result, Simulator
from benchmarks.scaling.traces import HELD_OUT_SEEDS, NAMES, TRAINING_SEEDS, make
from benchmarks.scaling.tuning import FILE, START
from deploy.planner.policy import Settings

POLICIES = ("planner", "static", "autoscaler")


def contestants(name: str) -> dict[str, tuple[Callable[[], Policy], tuple[int, int]]]:
    """For a trace: how to make each policy, and the replicas at second 0."""
    tuned = json.loads(FILE.read_text(encoding="utf-8"))[name]
    given = {
        kind: {key: value for key, value in tuned[kind].items() if key != "training"}
        for kind in ("static", "autoscaler")
    }
    static, autoscaler = Static(**given["static"]), AutoscalerSettings(**given["autoscaler"])
    return {
        "planner": (lambda: Planned(profile(WORKER), SLO, Settings(highest=HIGHEST)), START),
        "static": (lambda: static, (static.prefill, static.decode)),
        "autoscaler": (lambda: Autoscaler(autoscaler), START),
    }


def play(name: str, seeds: Sequence[int]) -> dict[str, list[Result]]:
    """Every policy on every seed of a trace."""
    return {
        kind: [Simulator(make(name, seed), WORKER, SLO, policy(), start, GPUS).run() for seed in seeds]
        for kind, (policy, start) in contestants(name).items()
    }


def means(results: Sequence[Result]) -> tuple[float, float]:
    """(SLO attainment, GPU-hours)."""
    number = len(results)
    return sum(r.attained for r in results) / number, sum(r.gpu_hours for r in results) / number


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--training", action="store_true", help="the training seeds instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    given = parser.parse_args(argv)
    seeds = TRAINING_SEEDS if given.training else HELD_OUT_SEEDS
    print(
        f"seeds {', '.join(map(str, seeds))}; SLO: TTFT <= {SLO.ttft} s and TPOT <= {SLO.tpot * 1000:.0f} ms"
    )
    print(f"{'trace':14}{'policy':12}{'attainment':>11}{'GPU-hours':>11}   by seed")
    document: dict[str, Any] = {}
    won = True
    for name in NAMES:
        results = play(name, seeds)
        table = {kind: means(results[kind]) for kind in POLICIES}
        for kind in POLICIES:
            attained, hours = table[kind]
            by_seed = "  ".join(f"{r.attained:.4f}/{r.gpu_hours:.2f}" for r in results[kind])
            print(f"{name:14}{kind:12}{attained:11.4f}{hours:11.2f}   {by_seed}", flush=True)
        mine = table["planner"]
        beaten = [kind for kind in POLICIES[1:] if mine[0] > table[kind][0] and mine[1] < table[kind][1]]
        won = won and len(beaten) == 2
        print(f"{name:14}wins on both against: {', '.join(beaten) or 'nobody'}")
        document[name] = {
            kind: {
                "attainment": a,
                "gpu_hours": h,
                "by_seed": [[r.attained, r.gpu_hours] for r in results[kind]],
            }
            for kind, (a, h) in table.items()
        }
    if given.json:
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if won else 1


if __name__ == "__main__":
    sys.exit(main())
