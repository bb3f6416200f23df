# SPDX-License-Identifier: Apache-2.0
"""Three hours that a cluster may see, each made from a seed: `bursty`, `diurnal` and `long_context`.

Arrivals are a Poisson process whose rate changes (thinning); lengths are lognormal. Baselines and planner are tuned on
`TRAINING_SEEDS`; what is claimed is measured on `HELD_OUT_SEEDS` only. (Seeds 101-105 were held out for an earlier
planner, and are spent.) `digest` pins a trace, so that a change to a generator cannot pass unseen (digests.json,
tests/unit/planner/test_traces.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TRAINING_SEEDS = tuple(range(11, 31))
HELD_OUT_SEEDS = tuple(range(201, 221))
SECONDS = 3600.0
"""Length of every trace."""
LONGEST_PROMPT = 16_000
"""Tokens."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    seed: int
    arrivals: list[float]
    """Seconds since the start."""
    prompts: list[int]
    """Prompt lengths, tokens."""
    outputs: list[int]
    """Answer lengths, tokens; at least 2."""

    def digest(self) -> str:
        """Of all three columns; arrivals to the microsecond."""
        columns = (
            np.round(np.asarray(self.arrivals) * 1e6).astype("<i8"),
            np.asarray(self.prompts, "<i8"),
            np.asarray(self.outputs, "<i8"),
        )
        return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def make(name: str, seed: int) -> Trace:
    """The trace of that name. Raises KeyError for a name that is none of `NAMES`."""
    generator = np.random.Generator(np.random.PCG64([seed, NAMES.index(name)]))
    arrivals, prompts, outputs = _MAKERS[name](generator)
    return Trace(name, seed, arrivals.tolist(), prompts.astype(int).tolist(), outputs.astype(int).tolist())


def _poisson(generator: np.random.Generator, rate: Callable[[Floats], Floats], highest: float) -> Floats:
    """Arrival times of an inhomogeneous Poisson process by thinning (Lewis and Shedler, 1979)."""
    number = generator.poisson(highest * SECONDS)
    times = np.sort(generator.uniform(0, SECONDS, number))
    kept: Floats = times[generator.uniform(0, highest, number) < rate(times)]
    return kept


def _lengths(
    generator: np.random.Generator, median: Floats | float, sigma: float, number: int, low: int, high: int
) -> Floats:
    drawn = np.asarray(median) * np.exp(sigma * generator.standard_normal(number))
    clipped: Floats = np.clip(np.round(drawn), low, high)
    return clipped


def _prompts(
    generator: np.random.Generator, median: Floats | float, number: int, sigma: float = 0.6
) -> Floats:
    return _lengths(generator, median, sigma, number, 16, LONGEST_PROMPT)


def _outputs(generator: np.random.Generator, median: Floats | float, number: int) -> Floats:
    return _lengths(generator, median, 0.6, number, 2, 2_000)


def _bursty(generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """1.2 requests/s, and every ten minutes or so a burst that builds up within 1-2 minutes; few are tall."""
    corners, levels, now = [0.0], [1.2], 0.0
    while True:
        now += 120 + generator.exponential(360)
        if now > SECONDS:
            break
        rise, hold, fall = generator.uniform(60, 120), generator.uniform(60, 180), 60.0
        height = min(10.0, 1.2 + 3.0 * np.exp(0.45 * generator.standard_normal()))
        corners += [now, now + rise, now + rise + hold, now + rise + hold + fall]
        levels += [1.2, height, height, 1.2]
        now += rise + hold + fall
    arrivals = _poisson(generator, lambda t: np.interp(t, corners, levels), 10.0)
    number = len(arrivals)
    return arrivals, _prompts(generator, 2_500, number), _outputs(generator, 250, number)


def _diurnal(generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """A day in an hour: 0.8 requests/s at night, about 6 at the peak, which differs from day to day; a slow wobble."""
    peak = 6.0 * np.exp(0.15 * generator.standard_normal())
    phases, periods = generator.uniform(0, 2 * np.pi, 4), generator.uniform(90, 400, 4)

    def rate(times: Floats) -> Floats:
        day = (0.5 - 0.5 * np.cos(2 * np.pi * times / SECONDS)) ** 1.3
        wobble = sum(
            0.05 * np.sin(2 * np.pi * times / period + phase)
            for phase, period in zip(phases, periods, strict=True)
        )
        shaped: Floats = (0.8 + (peak - 0.8) * day) * (1 + wobble)
        return shaped

    arrivals = _poisson(generator, rate, 1.2 * peak)
    number = len(arrivals)
    return arrivals, _prompts(generator, 2_500, number), _outputs(generator, 250, number)


def _long_context(generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Short chats at 4 requests/s; for about twenty minutes many prompts are long documents with short answers."""
    begin, end, turn = (
        generator.uniform(900, 1300),
        generator.uniform(2300, 2700),
        generator.uniform(120, 240),
    )
    most = generator.uniform(0.5, 0.85)
    corners = [0.0, begin, begin + turn, end, end + turn]

    def share(times: Floats) -> Floats:
        shares: Floats = np.interp(times, corners, [0.0, 0.0, most, most, 0.0])
        return shares

    arrivals = _poisson(generator, lambda t: 4.0 - 2.2 * share(t), 4.0)
    number = len(arrivals)
    is_long = generator.uniform(size=number) < share(arrivals)
    prompts = np.where(
        is_long, _prompts(generator, 9_000, number, sigma=0.3), _prompts(generator, 1_200, number)
    )
    return arrivals, prompts, _outputs(generator, np.where(is_long, 160.0, 280.0), number)


_MAKERS: dict[str, Callable[[np.random.Generator], tuple[Floats, Floats, Floats]]] = {
    "bursty": _bursty,
    "diurnal": _diurnal,
    "long_context": _long_context,
}
NAMES = tuple(_MAKERS)
"""Every trace."""
