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
from typing import Literal

from deltaserve.verify.compare import Outcome, damage_found, handover_problem

Expectation = Literal["ordinary", "found", "felt"]

FELT_SHARE = 0.8
"""Of the requests that got another's state, so many must answer differently. Not all: two short prompts can have
nearly one state."""


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


def problem(outcome: Outcome, expectation: Expectation, tolerance: float) -> str:
    """What is wrong with one outcome; empty: nothing."""
    different = not outcome.difference.within(tolerance)
    if expectation == "felt":
        return "" if not _loads(outcome) else _not_loaded(outcome)
    wrong = "the answer is not the reference's" if different else ""
    if expectation == "found" and _loads(outcome) and not damage_found(outcome):
        cause = outcome.failure or f"{outcome.from_store} tokens were used"
        wrong = "; ".join(filter(None, [wrong, f"the damage was not found ({cause})"]))
    if expectation == "ordinary" and outcome.placement == "handover":
        wrong = "; ".join(filter(None, [wrong, handover_problem(outcome)]))
    return wrong


def judge(outcomes: Sequence[Outcome], expectation: Expectation, tolerance: float) -> Judgement:
    """Judge a whole run. An empty run passes nothing."""
    problems = tuple(problem(outcome, expectation, tolerance) for outcome in outcomes)
    different = sum(not outcome.difference.within(tolerance) for outcome in outcomes)
    findings: tuple[str, ...] = ()
    damaged = found = 0
    if expectation == "felt":
        # The first load of a worker has nobody's state to get, so it is left out by name.
        loads = [outcome for outcome in outcomes if _loads(outcome)][1:]
        damaged, found = len(loads), sum(not o.difference.within(tolerance) for o in loads)
        passed = damaged > 0 and not any(problems) and found >= FELT_SHARE * damaged
        sentence = f"{found} of {damaged} requests that got another request's state answered differently"
    elif expectation == "found":
        loads = [outcome for outcome in outcomes if _loads(outcome)]
        damaged, found = len(loads), sum(damage_found(outcome) for outcome in loads)
        kinds = Counter(outcome.failure or "nothing" for outcome in loads)
        findings = ("checks: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),)
        passed = damaged > 0 and not any(problems)
        sentence = f"damage found in {found} of {damaged} requests that load, {different} answers differ"
    else:
        passed = bool(outcomes) and not any(problems)
        sentence = f"{len(outcomes)} requests, {different} different"
        short = sum(bool(text) for text in problems) - different
        if short > 0:
            sentence += f", {short} without the handover that was asked for"
    return Judgement(tuple(outcomes), problems, tolerance, passed, sentence, findings, damaged, found)


def _loads(outcome: Outcome) -> bool:
    """Whether the request has a state to load: handed over, and longer than the one token that decode computes."""
    return outcome.placement == "handover" and outcome.case.length > 1


def _not_loaded(outcome: Outcome) -> str:
    if outcome.failure:
        return f"nothing was loaded: {outcome.failure}"
    return "" if outcome.from_store else "nothing was loaded"
