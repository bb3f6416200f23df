# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling`: the planner against static pools and single-metric autoscalers on held-out traces.

Baselines are those of baselines.json, chosen for each trace on the training seeds (tuning.py); the planner has one
setting for all. Every setting of a family's frontier plays the held-out seeds; the hull of what it gets there is the
frontier that the planner is compared with (frontier.py). SLO attainment is the share of requests that met both limits,
GPU-hours are those of one trace; both are means over the seeds.

Ends with 1 unless, on every trace, the planner attains the SLO's target, costs less than either frontier at equal
attainment and attains more at equal GPU-hours. Beside that the table has each family's one setting that was tuned for
the target, and on which of the two numbers the planner beats it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scaling.baselines import HIGHEST, AutoscalerSettings, Static
from benchmarks.scaling.frontier import Point, attained_at, hours_at, hull, wins
from benchmarks.scaling.model import GPUS, SLO, WORKER
from benchmarks.scaling.planned import Planned, profile
from benchmarks.scaling.simulator import Policy, Simulator
from benchmarks.scaling.traces import HELD_OUT_SEEDS, NAMES, TRAINING_SEEDS, make
from benchmarks.scaling.tuning import FAMILIES, FILE, START, Setting, contestant, mean
from deploy.planner.policy import Settings


def committed(name: str) -> dict[str, tuple[Setting, list[Setting]]]:
    """For a trace, of each family: the tuned setting, and those of the frontier."""
    found = json.loads(FILE.read_text(encoding="utf-8"))[name]
    kinds: dict[str, type[Static] | type[AutoscalerSettings]] = {
        "static": Static,
        "autoscaler": AutoscalerSettings,
    }
    return {
        family: (
            kinds[family](**found[family]["tuned"]["setting"]),
            [kinds[family](**each["setting"]) for each in found[family]["frontier"]],
        )
        for family in FAMILIES
    }


def planner() -> tuple[Callable[[], Policy], tuple[int, int]]:
    """The planner with the one setting it has, and the replicas at second 0."""
    return lambda: Planned(profile(WORKER), SLO, Settings(highest=HIGHEST)), START


def play(name: str, seeds: Sequence[int], who: tuple[Callable[[], Policy], tuple[int, int]]) -> list[Point]:
    """A policy on every seed of a trace."""
    policy, start = who
    results = [Simulator(make(name, seed), WORKER, SLO, policy(), start, GPUS).run() for seed in seeds]
    return [Point(result.gpu_hours, result.attained) for result in results]


def compare(mine: Point, tuned: Point) -> str:
    """On which numbers the planner beats one setting."""
    found = [
        word
        for word, better in (
            ("attainment", mine.attained > tuned.attained),
            ("GPU-hours", mine.gpu_hours < tuned.gpu_hours),
        )
        if better
    ]
    return f"beaten on {' and '.join(found) or 'neither'}"


def judge(name: str, seeds: Sequence[int]) -> tuple[bool, dict[str, Any]]:
    """Play a trace, print its rows; (whether the planner wins on it, the numbers)."""
    by_seed = play(name, seeds, planner())
    mine = mean(by_seed)
    print(f"{name:14}{'planner':12}{mine.attained:11.4f}{mine.gpu_hours:11.2f}", flush=True)
    document: dict[str, Any] = {"planner": {**asdict(mine), "by_seed": [asdict(p) for p in by_seed]}}
    won = mine.attained >= SLO.target
    for family, (tuned, edge) in committed(name).items():
        points = {setting: mean(play(name, seeds, contestant(setting))) for setting in (tuned, *edge)}
        frontier = hull(points[setting] for setting in edge)
        hours, attained = hours_at(frontier, mine.attained), attained_at(frontier, mine.gpu_hours)
        won = won and wins(mine, frontier)
        of_tuned = points[tuned]
        print(
            f"{name:14}{family:12}{of_tuned.attained:11.4f}{of_tuned.gpu_hours:11.2f}   "
            f"{compare(mine, of_tuned):34}"
            f"{f'{hours:.2f} ({mine.gpu_hours / hours - 1:+.1%})' if hours else 'never':>16}"
            f"{f'{attained:.4f}' if attained else 'too few':>10}"
            f"   {'planner wins' if wins(mine, frontier) else 'planner loses'}",
            flush=True,
        )
        document[family] = {
            "tuned": asdict(of_tuned),
            "frontier": [asdict(p) for p in frontier],
            "hours_at_equal_attainment": hours,
            "attained_at_equal_hours": attained,
        }
    return won, document


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--training", action="store_true", help="the training seeds instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    given = parser.parse_args(argv)
    seeds = TRAINING_SEEDS if given.training else HELD_OUT_SEEDS
    print(f"seeds {seeds[0]}-{seeds[-1]}; SLO: TTFT <= {SLO.ttft} s and TPOT <= {SLO.tpot * 1000:.0f} ms")
    print(
        f"{'trace':14}{'policy':12}{'attainment':>11}{'GPU-hours':>11}   {'tuned for the target':34}"
        f"{'hours at equal':>16}{'attained':>10}"
    )
    judged = {name: judge(name, seeds) for name in NAMES}
    if given.json:
        document = {name: found for name, (_, found) in judged.items()}
        given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    won = [name for name, (wins_here, _) in judged.items() if wins_here]
    print(f"planner wins on {len(won)} of {len(NAMES)} traces: {', '.join(won) or 'none'}")
    return 0 if len(won) == len(NAMES) else 1


if __name__ == "__main__":
    sys.exit(main())
