# SPDX-License-Identifier: Apache-2.0
"""Comparing answers, and what a run must show beyond equal answers. Pure functions over plain data.

Tokens must be equal, and so must the log-probs of the chosen tokens within a tolerance: a damaged layer often shows in
them long before another token is chosen. Under placement handover all N-1 tokens of a prompt of N must come from the
store, so that equal answers cannot be the work of a decode worker that computed everything itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltaserve.verify.prompts import Case

FOUND_AS = {
    "flip": "digest",
    "truncate": "size",
    "foreign": "digest",
    "null": "null_state",
    "stale": "epoch",
    "dtype": "geometry",
}
"""The check that must find each kind of damage (statestore.connector.faults injects them)."""
NEED_ANOTHER = ("foreign", "stale", "swap")
"""Kinds that take from an earlier request, so that a worker's first load stays as it is."""


@dataclass(frozen=True)
class Answer:
    """What an engine generated: the chosen tokens and their log-probs (natural logarithm), one each."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    gaps: tuple[float, ...] = ()
    """Distance of the two likeliest tokens at every position, nats; empty where nobody asked for it."""
    noise: tuple[float, float] = (0.0, 0.0)
    """What rounding moved when the same engine answered again: a log-prob, a gap (deltaserve.verify.rounding)."""


@dataclass(frozen=True)
class Difference:
    """How two answers differ."""

    tokens_equal: bool
    first_token: int | None
    """Position of the first token that differs, also where one answer is shorter; None: all are equal."""
    logprob: float
    """Largest difference of log-probs before the first token that differs, nats; infinite for a NaN."""
    gap: float | None = None
    """The expected answer's distance of its two likeliest tokens where the first token differs; None: unknown."""

    def within(self, tolerance: float) -> bool:
        """Equal tokens, and log-probs at most `tolerance` apart."""
        return self.tokens_equal and self.logprob <= tolerance

    def excused(self, tolerance: float, gap: float) -> bool:
        """Another token, where the two likeliest are at most `gap` apart, and equal before it."""
        return self.gap is not None and self.gap <= gap and self.logprob <= tolerance


def compare(expected: Answer, found: Answer) -> Difference:
    """Compare token by token. Raises ValueError when an answer lacks a log-prob."""
    for name, answer in (("expected", expected), ("found", found)):
        if len(answer.tokens) != len(answer.logprobs):
            raise ValueError(
                f"{name}: {len(answer.tokens)} tokens but {len(answer.logprobs)} log-probs; ask for logprobs=1"
            )
    first = _first_difference(expected.tokens, found.tokens)
    compared = len(expected.tokens) if first is None else first
    largest = 0.0
    for a, b in zip(expected.logprobs[:compared], found.logprobs[:compared], strict=True):
        apart = 0.0 if a == b else abs(a - b)
        largest = math.inf if math.isnan(apart) else max(largest, apart)
    gap = None if first is None or first >= len(expected.gaps) else expected.gaps[first]
    return Difference(first is None, first, largest, gap)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass(frozen=True)
class Outcome:
    """One request of a run: what was asked, what came, and which way it went (the router's trace)."""

    case: Case
    placement: str
    difference: Difference
    trace: dict[str, Any]
    """Answer of GET /deltaserve/requests/<id>; empty where the endpoint has none."""
    recalled: bool | None
    """Whether the reference's first token is the recall task's answer; None: there is none to compare with."""

    def _number(self, name: str) -> int:
        return int(self.trace.get(name) or 0)

    @property
    def from_store(self) -> int:
        """Prompt tokens whose state was loaded."""
        return self._number("from_store")

    @property
    def local(self) -> int:
        """Prompt tokens found in the decode worker's own cache."""
        return self._number("local")

    @property
    def recomputed(self) -> int:
        """Prompt tokens that the decode worker computed (token N is always one of them)."""
        return self._number("recomputed")

    @property
    def route(self) -> str:
        """The router's words: `handover <prefill> <decode>` or `local <reason> <decode>`."""
        return str(self.trace.get("route", "unknown"))

    @property
    def failure(self) -> str:
        """Kind of the first thing that went wrong on the way; empty: nothing."""
        return str(self.trace.get("failure") or "")

    @property
    def published(self) -> bool:
        """Whether a boundary was committed for it."""
        return self._number("boundary_length") > 0


def handover_problem(outcome: Outcome) -> str:
    """Why a request under placement handover was none; empty: it was, or there was nothing to hand over."""
    length = outcome.case.length
    if length < 2:
        return ""
    if not outcome.trace:
        return "the endpoint says nothing about this request (GET /deltaserve/requests/<id>)"
    if outcome.failure:
        return f"{outcome.failure}: {outcome.trace.get('detail', '')}".rstrip(": ")
    restored = outcome.from_store + outcome.local
    if restored != length - 1:
        return (
            f"{outcome.from_store} tokens from the store and {outcome.local} local ones are not {length - 1}"
        )
    return ""


def damage_found(outcome: Outcome, damage: str) -> bool:
    """Whether a damaged load was found: refused by the check for that damage, nothing used, all of it computed.

    Ranks that share an object also find it `missing`, while another one exchanges it.
    """
    kinds = {*FOUND_AS.values()} if damage == "each" else {FOUND_AS.get(damage, damage)}
    kinds.add("missing")
    return outcome.published and outcome.failure in kinds and outcome.from_store == 0
