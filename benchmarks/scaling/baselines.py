# SPDX-License-Identifier: Apache-2.0
"""What a planner has to beat: pools that never change, and an autoscaler that looks at one metric.

The autoscaler does what a HorizontalPodAutoscaler does with an AverageValue target: replicas = ceil(total / target),
nothing within a tolerance of 10 %, up at once, and down to the highest wish within a stabilization window. It looks as
often as the planner, has a target of its own for each pool, and may choose its metric:

    in_flight     requests in the pool, waiting and running
    utilization   prefill: computing time; decode: slots taken (of all slots, in replicas)
    tokens        prefill: prompt tokens queued; decode: cache taken (in replicas)
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from benchmarks.scaling.simulator import Observation, PoolView

Metric = Literal["in_flight", "utilization", "tokens"]
TOLERANCE = 0.1
HIGHEST = 24
"""Replicas of a pool at most."""


@dataclass(frozen=True)
class Static:
    """The same replicas all the time."""

    prefill: int
    decode: int

    def __call__(self, observation: Observation) -> tuple[int, int]:
        """The policy."""
        return self.prefill, self.decode


@dataclass(frozen=True)
class AutoscalerSettings:
    """What is tuned."""

    metric: Metric
    prefill_target: float
    decode_target: float
    window: float
    """Seconds of stabilization before scaling down."""
    lowest: int = 1
    """Replicas of a pool at least."""


class Autoscaler:
    """The policy; keeps its recent wishes, so make a new one for each run."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        self._settings = settings
        self._wishes: dict[str, deque[tuple[float, int]]] = {"prefill": deque(), "decode": deque()}

    def __call__(self, observation: Observation) -> tuple[int, int]:
        """The policy."""
        s = self._settings
        return (
            self._wish("prefill", observation.now, observation.prefill, s.prefill_target),
            self._wish("decode", observation.now, observation.decode, s.decode_target),
        )

    def _wish(self, role: str, now: float, pool: PoolView, target: float) -> int:
        current = pool.ready + pool.starting
        total = self._total(role, pool)
        ratio = total / (target * current)
        wish = current if abs(ratio - 1) <= TOLERANCE else math.ceil(total / target)
        wish = min(HIGHEST, max(self._settings.lowest, wish))
        wishes = self._wishes[role]
        wishes.append((now, wish))
        while wishes[0][0] < now - self._settings.window:
            wishes.popleft()
        return wish if wish >= current else min(current, max(w for _, w in wishes))

    def _total(self, role: str, pool: PoolView) -> float:
        if self._settings.metric == "in_flight":
            return pool.requests
        if self._settings.metric == "utilization":
            return pool.busy * pool.ready
        return pool.queued_tokens if role == "prefill" else pool.kv_usage * pool.ready
