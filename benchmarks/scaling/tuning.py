# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling.tuning`: the baselines of each trace, on the training seeds, into baselines.json.

Every setting of a family's grid plays every training seed. What is kept is the family's frontier (frontier.py), and its
`tuned` setting, the cheapest one whose mean attainment reaches the SLO's target. Each trace gets baselines of its own:
they may know in advance what will come. About 60,000 simulated hours, 0.3 s each: give it `--processes`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scaling.baselines import Autoscaler, AutoscalerSettings, Metric, Static
from benchmarks.scaling.frontier import Point, hull
from benchmarks.scaling.model import GPUS, SLO, WORKER
from benchmarks.scaling.simulator import Policy, Simulator
from benchmarks.scaling.traces import NAMES, TRAINING_SEEDS, make

FILE = Path(__file__).with_name("baselines.json")
START = (3, 3)
"""Replicas of an autoscaled run at second 0."""
LEAST = 0.9
"""A setting whose mean attainment cannot reach this any more ends early, and is on no frontier."""
SIZES = range(2, 9)
"""Workers of a static pool."""
TARGETS: dict[Metric, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "in_flight": ((0.4, 0.6, 0.85, 1.2, 1.7, 2.4), (3, 4, 5, 6.5, 8, 10)),
    "utilization": ((0.25, 0.33, 0.42, 0.52, 0.65, 0.8), (0.12, 0.16, 0.2, 0.26, 0.34, 0.42)),
    "tokens": ((500, 1_000, 2_000, 3_500, 5_500, 8_000), (0.06, 0.09, 0.12, 0.16, 0.22, 0.3)),
}
"""The autoscaler's targets for prefill and for decode, each with each ..."""
WINDOWS = (20.0, 60.0, 180.0)
"""... with each stabilization window ..."""
FLOORS = (1, 2, 3)
"""... and each lowest number of replicas."""
FAMILIES = ("static", "autoscaler")

Setting = Static | AutoscalerSettings


def grid(family: str) -> list[Setting]:
    """Every setting of a family."""
    if family == "static":
        return [Static(p, d) for p, d in itertools.product(SIZES, SIZES)]
    return [
        AutoscalerSettings(metric, *each)
        for metric, (prefill, decode) in TARGETS.items()
        for each in itertools.product(prefill, decode, WINDOWS, FLOORS)
    ]


def contestant(setting: Setting) -> tuple[Callable[[], Policy], tuple[int, int]]:
    """How to make a setting's policy, and the replicas at second 0."""
    if isinstance(setting, Static):
        return lambda: setting, (setting.prefill, setting.decode)
    return lambda: Autoscaler(setting), START


def score(name: str, seeds: Sequence[int], setting: Setting) -> Point | None:
    """A setting on a trace's seeds; None when it misses `LEAST`."""
    policy, start = contestant(setting)
    allowed, points = (1 - LEAST) * len(seeds), []
    for seed in seeds:
        trace = make(name, seed)
        most = int(allowed * len(trace.arrivals))
        result = Simulator(trace, WORKER, SLO, policy(), start, GPUS, most).run()
        if result.ended_early:
            return None
        allowed -= 1 - result.attained
        points.append(Point(result.gpu_hours, result.attained))
    return mean(points)


def mean(points: Sequence[Point]) -> Point:
    """Of both numbers."""
    number = len(points)
    return Point(sum(p.gpu_hours for p in points) / number, sum(p.attained for p in points) / number)


def summary(scored: dict[Setting, Point]) -> dict[str, Any]:
    """A family's frontier and its tuned setting, for baselines.json."""
    edge = set(hull(scored.values()))
    found = {point: setting for setting, point in reversed(scored.items()) if point in edge}
    reached = [point for point in scored.values() if point.attained >= SLO.target]
    tuned = min(reached)
    of_tuned = next(setting for setting, point in scored.items() if point == tuned)
    return {
        "tuned": {"setting": asdict(of_tuned), "training": asdict(tuned)},
        "frontier": [{"setting": asdict(found[p]), "training": asdict(p)} for p in sorted(edge)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Tune for the traces named, all by default, and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.tuning", description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="traces; all when none is named")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(argv)
    document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    with ProcessPoolExecutor(given.processes) as pool:
        for name in given.names:
            document[name] = {}
            for family in FAMILIES:
                settings = grid(family)
                points = pool.map(partial(score, name, TRAINING_SEEDS), settings, chunksize=4)
                scored = {s: p for s, p in zip(settings, points, strict=True) if p is not None}
                document[name][family] = summary(scored)
                print(name, family, document[name][family], flush=True)
            ordered = {each: document[each] for each in NAMES if each in document}
            FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
