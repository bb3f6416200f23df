# SPDX-License-Identifier: Apache-2.0
"""How many requests will arrive a second when a worker that is started now serves, and how far such forecasts were off.

Requests that arrive are counted, and a count's variance is its mean (Poisson), so that a rise can be told from noise
after a few intervals, without first learning how noisy the demand is. For every moment within the last `SPAN` seconds
at which a rise may have begun, the rate before it is taken as level, and a straight line from there is fitted to the
rate since (least squares). What is believed of the line's slope is its lower confidence bound, `doubt` standard errors
below the fit. The forecast is the highest that any such line has at the end of the lead, and never less than the level.

The reserve is a high quantile of what earlier forecasts missed, beyond what the noise of counting explains: a demand
that surprises keeps more in reserve, one that is steady keeps none.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SPAN = 40.0
"""Seconds back to the earliest beginning of a rise that is considered."""
BEFORE = 60.0
"""Seconds before a rise that its base is the mean of."""
NOISE = 2.0
"""Standard deviations of the judged rate that are no miss."""
STEEPEST = 2.0
"""A rise is not believed to add more than so many times the rate that it has reached."""


@dataclass(frozen=True)
class Care:
    """How a forecast is made, how it is judged, and what is kept in reserve for its misses."""

    level: float
    """Seconds: time constant of the level."""
    doubt: float
    """Standard errors taken off a slope."""
    judged: float
    """Seconds: time constant of the rate that a forecast is compared with; what a queue evens out is no miss."""
    quantile: float
    """Of the misses, which is kept in reserve ..."""
    memory: float
    """... for so many seconds."""


class Forecast:
    """One series of arrivals. Feed it at even intervals."""

    def __init__(self, lead: float, care: Care) -> None:
        """`lead`: seconds ahead."""
        self._lead = lead
        self._care = care
        self.level = 0.0
        """Requests a second, now."""
        self.expected = 0.0
        """Requests a second when the lead is over, and not less than now: who will not be needed then is until then."""
        self._judged = 0.0
        self._samples: deque[tuple[float, float]] = deque()
        self._made: deque[tuple[float, float]] = deque()
        self._misses: deque[tuple[float, float]] = deque()

    def add(self, now: float, interval: float, rate: float) -> None:
        """A sample: the requests a second of the interval that has just ended, in seconds."""
        first = not self._samples
        self.level += (1.0 if first else _weight(interval, self._care.level)) * (rate - self.level)
        self._judged += (1.0 if first else _weight(interval, self._care.judged)) * (rate - self._judged)
        self._samples.append((now, rate))
        while self._samples[0][0] < now - SPAN - BEFORE:
            self._samples.popleft()
        self.expected = self._highest(now, interval)
        while self._made and self._made[0][0] <= now:
            due, expected = self._made.popleft()
            # An exponential mean over T seconds of a Poisson process of rate r has the variance r / 2T.
            noise = NOISE * math.sqrt(self._judged / (2 * self._care.judged))
            self._misses.append((due, self._judged - expected - noise))
        while self._misses and self._misses[0][0] < now - self._care.memory:
            self._misses.popleft()
        self._made.append((now + self._lead, self.expected))

    @property
    def reserve(self) -> float:
        """What forecasts have missed, requests a second; 0 while there are none to judge."""
        if not self._misses:
            return 0.0
        misses = sorted(miss for _, miss in self._misses)
        return max(0.0, misses[min(len(misses) - 1, int(self._care.quantile * len(misses)))])

    def _highest(self, now: float, interval: float) -> float:
        samples = list(self._samples)
        before = max(1, round(BEFORE / interval))
        highest = self.level
        for since in range(2, min(len(samples) - 2, int(SPAN / interval + 1e-9)) + 1):
            onset = len(samples) - since
            begin = samples[onset][0] - interval
            earlier = [rate for _, rate in samples[max(0, onset - before) : onset]]
            # A sample stands for the middle of its interval.
            later = [(time - interval / 2 - begin, rate) for time, rate in samples[onset:]]
            base, slope = rise(earlier, later, interval, self._care.doubt)
            if slope <= 0:
                continue
            reached = max(self.level, sum(rate for _, rate in later) / since)
            line = base + slope * (now - begin + self._lead)
            highest = max(highest, min(line, (1 + STEEPEST) * reached))
        return highest


def rise(
    earlier: Sequence[float], later: Sequence[tuple[float, float]], interval: float, doubt: float
) -> tuple[float, float]:
    """(requests a second before, growth a second): the lower confidence bound of a line's slope, at least 0.

    `earlier`: rates before the rise; `later`: (seconds since its beginning, rate); both of intervals of so many
    seconds. A rate of m a second, counted over t seconds, has the variance m / t; where nothing came, one request did.
    """
    base = sum(earlier) / len(earlier)
    mean = sum(rate for _, rate in later) / len(later)
    squares = sum(time * time for time, _ in later)
    times = sum(time for time, _ in later)
    slope = sum(time * (rate - base) for time, rate in later) / squares
    of_later = max(mean, 1 / (interval * len(later))) / interval
    of_base = max(base, 1 / (interval * len(earlier))) / interval / len(earlier)
    error = math.sqrt(of_later / squares + of_base * (times / squares) ** 2)
    return base, max(0.0, slope - doubt * error)


def _weight(interval: float, seconds: float) -> float:
    return 1 - math.exp(-interval / seconds)
