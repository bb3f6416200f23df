# SPDX-License-Identifier: Apache-2.0
"""What arrives when: drawn from seeds, so that every side gets the same arrivals and prompts of the same lengths.

Prompts differ from side to side in their first tokens (`turn`), so that no side meets a prompt that another one has
left in a cache of engines that both use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST_TOKEN = 300
"""Tokens below are special ones of the models used here, or bytes that are no text."""
OWN_TOKENS = 64
"""First tokens of a prompt that differ from turn to turn."""


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens."""

    prompt: int
    answer: int
    shared: int = 0
    """First tokens that all prompts of a row share; the others are each prompt's own."""
    vocab: int = 1152
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.shared + OWN_TOKENS > self.prompt:
            raise ValueError(
                f"shared: {self.shared} of {self.prompt} prompt tokens leave no {OWN_TOKENS} of its own; lower it"
            )
        if min(self.prompt, self.answer) < 2:
            raise ValueError("prompt and answer: need 2 tokens at least")


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at: float
    """Seconds after the row's begin."""
    prompt: tuple[int, ...]
    answer: int


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of arrivals within `seconds` at `rate` a second, scaled so that the last one is where the rate puts it.

    A row is short, so an unscaled draw would offer some percent more or less than the row says. Raises ValueError.
    """
    if rate <= 0 or seconds <= 0:
        raise ValueError(f"rate {rate} and seconds {seconds} must be above 0")
    number = max(2, round(rate * seconds))
    # A name of its own for every rate: rows of one seed are independent draws.
    source = random.Random(f"{seed}/{rate}")
    at, times = 0.0, []
    for _ in range(number):
        at += source.expovariate(rate)
        times.append(at)
    return [time * (number / rate) / at for time in times]


def arrivals(workload: Workload, rate: float, seconds: float, turn: str) -> list[Arrival]:
    """A row's requests. `turn` names who gets them: prompts of another turn have other first tokens."""
    times = poisson(rate, seconds, workload.seed)
    rest = random.Random(f"{workload.seed}/{rate}/prompts")
    own = random.Random(f"{workload.seed}/{rate}/{turn}")

    def tokens(source: random.Random, number: int) -> tuple[int, ...]:
        return tuple(source.choices(range(FIRST_TOKEN, workload.vocab), k=number))

    begin = tokens(own, workload.shared)
    made = []
    for at in times:
        first = tokens(own, min(OWN_TOKENS, workload.prompt - workload.shared))
        body = tokens(rest, workload.prompt - workload.shared - len(first))
        made.append(Arrival(at, begin + first + body, workload.answer))
    return made
