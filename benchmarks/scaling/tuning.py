# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling.tuning`: the best baselines for each trace, on the training seeds, into baselines.json.

Best is the cheapest setting whose mean attainment reaches the SLO's target; where none does, the one with the highest
attainment. Each trace gets baselines of its own: they may know in advance what will come. The autoscaler's grid is
three metrics, two windows, and four targets a pool; then, around the best of each metric, finer targets, other windows
and floors.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from benchmarks.scaling.baselines import Autoscaler, AutoscalerSettings, Metric, Static
from benchmarks.scaling.model import GPUS, SLO, WORKER
from benchmarks.scaling.simulator import Policy, Simulator
from benchmarks.scaling.traces import NAMES, TRAINING_SEEDS, Trace, make

FILE = Path(__file__).with_name("baselines.json")
START = (3, 3)
"""Replicas of an autoscaled run at second 0."""
NEAR = 0.002
"""A policy that cannot come within so much of the target is ended early: what it has not run counts as missed."""
TARGETS: dict[Metric, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "in_flight": ((0.5, 0.8, 1.2), (4, 6, 9)),
    "utilization": ((0.3, 0.45, 0.6), (0.15, 0.25, 0.4)),
    "tokens": ((1_000, 2_500, 5_000), (0.1, 0.2, 0.35)),
}

Setting = TypeVar("Setting")


@dataclass(frozen=True)
class Score:
    """Means over the seeds."""

    attained: float
    gpu_hours: float

    @property
    def order(self) -> tuple[bool, float, float]:
        """Smaller is better."""
        reached = self.attained >= SLO.target
        return not reached, self.gpu_hours if reached else -self.attained, self.gpu_hours


def score(
    traces: Sequence[Trace], policy: Callable[[], Policy], start: tuple[int, int], most: float
) -> Score:
    """A policy on some traces. Counts as nothing attained once it has cost more than `most` GPU-hours a trace.

    A policy that cannot reach the target any more, whatever its other traces bring, ends early.
    """
    attained, hours, left = [], [], most * len(traces)
    allowed = (1 - SLO.target + NEAR) * len(traces)
    for trace in traces:
        number = len(trace.arrivals)
        result = Simulator(
            trace, WORKER, SLO, policy(), start, GPUS, int(allowed * number), most_hours=left
        ).run()
        hours.append(result.gpu_hours)
        left -= result.gpu_hours
        allowed -= 1 - result.attained
        attained.append(0.0 if left < 0 else result.attained)
        if result.ended_early:
            break
    return Score(sum(attained) / len(traces), sum(hours) / len(hours))


class Search(Generic[Setting]):
    """Scores settings on some traces, each once."""

    def __init__(self, run: Callable[[Setting], tuple[Callable[[], Policy], tuple[int, int]]]) -> None:
        """`run` makes a policy, and the replicas at second 0, of a setting."""
        self._run = run
        self._scores: dict[Setting, Score] = {}

    def best(self, settings: Iterable[Setting], traces: list[Trace]) -> tuple[Setting, Score]:
        """The best of the settings."""
        candidates = list(settings)
        for setting in candidates:
            if setting not in self._scores:
                reached = [s.gpu_hours for s in self._scores.values() if s.attained >= SLO.target]
                most = min(reached, default=math.inf)
                self._scores[setting] = score(traces, *self._run(setting), most)
        chosen = min(candidates, key=lambda setting: self._scores[setting].order)
        return chosen, self._scores[chosen]


def best_static(traces: list[Trace]) -> tuple[Static, Score]:
    """Over 2 to 8 prefill and 2 to 8 decode workers."""
    grid = [Static(p, d) for p, d in itertools.product(range(2, 9), range(2, 9))]
    return Search[Static](lambda s: (lambda: s, (s.prefill, s.decode))).best(grid, traces)


def best_autoscaler(traces: list[Trace]) -> tuple[AutoscalerSettings, Score]:
    """Over the coarse grid, then around its best of each metric."""
    search = Search[AutoscalerSettings](lambda s: (lambda: Autoscaler(s), START))
    found = []
    for metric, (prefill, decode) in TARGETS.items():
        coarse = [
            AutoscalerSettings(metric, *each) for each in itertools.product(prefill, decode, (60.0, 180.0))
        ]
        centre, reached = search.best(coarse, traces)
        for nearby in (_finer, _other_windows, _finer):
            centre, reached = search.best([centre, *nearby(centre)], traces)
        print(f"  {metric}: {centre} {reached}", flush=True)
        found.append((centre, reached))
    return min(found, key=lambda pair: pair[1].order)


def _finer(centre: AutoscalerSettings) -> list[AutoscalerSettings]:
    return [
        dataclasses.replace(
            centre, prefill_target=centre.prefill_target * a, decode_target=centre.decode_target * b
        )
        for a, b in itertools.product((0.85, 1.0, 1.2), repeat=2)
    ]


def _other_windows(centre: AutoscalerSettings) -> list[AutoscalerSettings]:
    return [
        dataclasses.replace(centre, window=window, lowest=lowest)
        for window, lowest in itertools.product((20.0, 60.0, 180.0), (1, 2, 3))
    ]


def main(names: Sequence[str]) -> int:
    """Tune for the traces named, all by default, and write the file."""
    for name in names or NAMES:
        traces = [make(name, seed) for seed in TRAINING_SEEDS]
        print(name, flush=True)
        static, static_score = best_static(traces)
        print(f"  static: {static} {static_score}", flush=True)
        autoscaler, autoscaler_score = best_autoscaler(traces)
        document: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        document[name] = {
            "static": {**asdict(static), "training": asdict(static_score)},
            "autoscaler": {**asdict(autoscaler), "training": asdict(autoscaler_score)},
        }
        ordered = {each: document[each] for each in NAMES if each in document}
        FILE.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
