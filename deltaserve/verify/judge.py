# SPDX-License-Identifier: Apache-2.0
"""Whether a run shows what it must. One rule for each kind of run:

ordinary   every answer is the reference's; under placement handover, N-1 tokens of every prompt came from the store
found      damage with verification on: every damaged load was refused by a check, and every answer is right
felt       damage with verification off: most answers differ, so the answers lean on the state
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.verify.compare import FOUND_AS, NEED_ANOTHER, Outcome, damage_found, handover_problem

FELT_SHARE = 0.8
"""Of the requests that got another's state, so many must answer differently. Not all: two short prompts can have
nearly one state."""


EXCUSED_SHARE = 0.02
"""Of all tokens, so many may be excused as rounding's: with more there would be little left to compare."""


@dataclass(frozen=True)
class Judgement:
    """A run, judged."""

    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]
    """Of each outcome what is wrong with it; empty: nothing."""
    tolerance: float
    passed: bool
    sentence: str
    findings: tuple[str, ...] = ()
    damaged: int = 0
    """Requests whose stored state was damaged before they loaded it."""
    found: int = 0
    """Of those, how many showed it: refused by a check, or (verification off) answered differently."""
    excused: int = 0
    """Tokens that differ where rounding alone may choose either."""
    gap: float | None = None
    """What rounding moves; None where it moves nothing."""

    def different(self, outcome: Outcome) -> bool:
        """Whether an answer is not the reference's, and rounding does not excuse it."""
        return _differs(outcome, self.tolerance, self.gap)


def problem(
    outcome: Outcome, damage: str, tolerance: float, spared: bool = False, gap: float | None = None
) -> str:
    """What is wrong with one outcome; empty: nothing. `spared`: its state was not damaged; `gap`: what rounding moves
    (deltaserve.verify.rounding), None where it moves nothing."""
    different = _differs(outcome, tolerance, gap)
    if damage == "swap":
        return "" if not _loads(outcome) else _not_loaded(outcome)
    wrong = ["the answer is not the reference's" if different else ""]
    if outcome.placement == "handover":
        if damage == "none" or spared:
            wrong.append(handover_problem(outcome))
        elif _loads(outcome) and not damage_found(outcome, damage):
            cause = outcome.failure or f"{outcome.from_store} tokens were used"
            wrong.append(f"the damage was not found ({cause})")
    return "; ".join(filter(None, wrong))


def is_excused(outcome: Outcome, tolerance: float, gap: float | None) -> bool:
    """Whether another token was chosen where rounding alone may choose either. A sampled token never is: what it moves
    there cannot be told from the two likeliest tokens."""
    if gap is None or outcome.case.temperature:
        return False
    return outcome.difference.excused(tolerance, gap)


def _differs(outcome: Outcome, tolerance: float, gap: float | None) -> bool:
    return not outcome.difference.within(tolerance) and not is_excused(outcome, tolerance, gap)


class Judge:
    """Takes outcomes as they come; `close` judges all of them."""

    def __init__(self, damage: str, tolerance: float, gap: float | None = None) -> None:
        """`gap`: what rounding moves; None where it moves nothing."""
        self._damage, self._tolerance, self._gap = damage, tolerance, gap
        self._outcomes: list[Outcome] = []
        self._problems: list[str] = []
        self._damaged: list[Outcome] = []
        self._spare = damage in NEED_ANOTHER

    def take(self, outcome: Outcome) -> str:
        """What is wrong with the outcome; empty: nothing."""
        spared = False
        if self._damage != "none" and _loads(outcome):
            spared, self._spare = self._spare, False
            if not spared:
                self._damaged.append(outcome)
        self._outcomes.append(outcome)
        self._problems.append(problem(outcome, self._damage, self._tolerance, spared, self._gap))
        return self._problems[-1]

    def close(self) -> Judgement:
        """The judgement. An empty run passes nothing."""
        excused = sum(is_excused(outcome, self._tolerance, self._gap) for outcome in self._outcomes)
        different = sum(_differs(outcome, self._tolerance, self._gap) for outcome in self._outcomes)
        clean = bool(self._outcomes) and not any(self._problems)
        findings: tuple[str, ...] = ()
        if self._gap is not None and self._damage != "swap":
            positions = compared_tokens(self._outcomes)
            limit = max(1, int(EXCUSED_SHARE * positions))
            clean = clean and excused <= limit
            findings = (
                f"rounding: {excused} of {positions} tokens excused ({limit} may be): the reference's two likeliest "
                f"are at most {self._gap:.1e} apart there, which its own batches move",
            )
        damaged, found = len(self._damaged), 0
        if self._damage == "none":
            sentence = f"{len(self._outcomes)} requests, {different} different"
            short = sum(bool(text) for text in self._problems) - different
            if short > 0:
                sentence += f", {short} without the handover that was asked for"
        elif self._damage == "swap":
            found = sum(not outcome.difference.within(self._tolerance) for outcome in self._damaged)
            clean = clean and damaged > 0 and found >= FELT_SHARE * damaged
            sentence = f"{found} of {damaged} requests that got another request's state answered differently"
        else:
            found = sum(damage_found(outcome, self._damage) for outcome in self._damaged)
            kinds = Counter(outcome.failure or "nothing" for outcome in self._damaged)
            findings += ("checks: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),)
            unseen = sorted({*FOUND_AS.values()} - kinds.keys()) if self._damage == "each" else []
            if unseen:
                findings += (f"too few requests for every damage; not seen: {', '.join(unseen)}",)
            clean = clean and damaged > 0 and not unseen
            sentence = f"damage found in {found} of {damaged} requests, {different} answers differ"
        return Judgement(
            tuple(self._outcomes),
            tuple(self._problems),
            self._tolerance,
            clean,
            sentence,
            findings,
            damaged,
            found,
            excused,
            self._gap,
        )


def compared_tokens(outcomes: Sequence[Outcome]) -> int:
    """Tokens compared in a run: of an answer all, or up to the first that differs."""
    return sum(
        outcome.case.max_tokens
        if outcome.difference.first_token is None
        else outcome.difference.first_token + 1
        for outcome in outcomes
    )


def judge(outcomes: Sequence[Outcome], damage: str, tolerance: float) -> Judgement:
    """Judge a whole run."""
    by = Judge(damage, tolerance)
    for outcome in outcomes:
        by.take(outcome)
    return by.close()


def _loads(outcome: Outcome) -> bool:
    """Whether the request has a state to load: handed over, and longer than the one token that decode computes."""
    return outcome.placement == "handover" and outcome.case.length > 1


def _not_loaded(outcome: Outcome) -> str:
    if outcome.failure:
        return f"nothing was loaded: {outcome.failure}"
    return "" if outcome.from_store else "nothing was loaded"
