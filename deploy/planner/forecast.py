# SPDX-License-Identifier: Apache-2.0
"""What demand will be when a worker that is started now serves, and how far such forecasts have been off.

The forecast is the level (an exponential mean) plus the trend (a least-squares slope over the last samples, taken only
as far as it stands out of its own standard error) times the lead. The reserve is a high quantile of what earlier
forecasts missed: a demand that surprises keeps more in reserve, one that is steady keeps next to none.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

TREND_SECONDS = 40.0
"""Span of the samples that the slope is fitted to."""
STEEPEST = 3.0
"""A trend is not believed to add more than so many times the level."""


@dataclass(frozen=True)
class Judge:
    """How forecasts are judged, and what is kept in reserve for their misses."""

    level: float
    """Seconds: time constant of the demand that a forecast is compared with; what a queue evens out is no miss."""
    quantile: float
    """Of the misses remembered ..."""
    caution: float
    """... so many times over."""
    memory: float
    """Seconds."""


class Forecast:
    """One series of demand, in any unit. Feed it at even intervals."""

    def __init__(self, lead: float, level: float, doubt: float, judge: Judge) -> None:
        """`lead`: seconds ahead; `level`: time constant of the level, seconds; `doubt`: standard errors off a slope."""
        self._lead = lead
        self._level_seconds = level
        self._doubt = doubt
        self._judge = judge
        self.level = 0.0
        self._judged = 0.0
        self._samples: deque[tuple[float, float]] = deque()
        self._made: deque[tuple[float, float]] = deque()
        self._misses: deque[tuple[float, float]] = deque()

    def add(self, now: float, interval: float, value: float) -> None:
        """A sample: the mean demand of the interval that has just ended."""
        first = not self._samples
        weight = 1.0 if first else 1 - math.exp(-interval / self._level_seconds)
        self.level += weight * (value - self.level)
        self._judged += (1.0 if first else 1 - math.exp(-interval / self._judge.level)) * (
            value - self._judged
        )
        self._samples.append((now, value))
        while self._samples[0][0] < now - TREND_SECONDS:
            self._samples.popleft()
        while self._made and self._made[0][0] <= now:
            due, expected = self._made.popleft()
            self._misses.append((due, self._judged - expected))
        while self._misses and self._misses[0][0] < now - self._judge.memory:
            self._misses.popleft()
        self._made.append((now + self._lead, self.expected))

    @property
    def trend(self) -> float:
        """Demand a second; 0 unless it stands out of the noise."""
        number = len(self._samples)
        if number < 4:
            return 0.0
        mean_time = sum(t for t, _ in self._samples) / number
        mean = sum(v for _, v in self._samples) / number
        spread = sum((t - mean_time) ** 2 for t, _ in self._samples)
        slope = sum((t - mean_time) * (v - mean) for t, v in self._samples) / spread
        rest = sum((v - mean - slope * (t - mean_time)) ** 2 for t, v in self._samples)
        error = math.sqrt(rest / (number - 2) / spread)
        return math.copysign(max(0.0, abs(slope) - self._doubt * error), slope)

    @property
    def expected(self) -> float:
        """Demand when the lead is over, the level's own lag made good.

        Never less than the level now: who will not be needed then is needed until then.
        """
        return self.level + min(
            max(0.0, self.trend) * (self._lead + self._level_seconds), STEEPEST * self.level
        )

    @property
    def reserve(self) -> float:
        """What forecasts have missed; 0 while there are none to judge."""
        if not self._misses:
            return 0.0
        misses = sorted(miss for _, miss in self._misses)
        return self._judge.caution * max(
            0.0, misses[min(len(misses) - 1, int(self._judge.quantile * len(misses)))]
        )
