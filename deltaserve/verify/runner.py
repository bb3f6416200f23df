# SPDX-License-Identifier: Apache-2.0
"""Sending a run's requests and comparing what comes back; used by the command and by the cluster tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from deltaserve.verify import rounding
from deltaserve.verify.client import Endpoint
from deltaserve.verify.compare import Answer, Outcome, compare
from deltaserve.verify.prompts import Group

_runs = count(1)


def run_pass(
    endpoint: Endpoint,
    groups: Sequence[Group],
    references: Sequence[Sequence[Answer]],
    placement: str,
    excuse: Callable[[Outcome], bool] | None = None,
) -> Iterator[Outcome]:
    """Send every group under one placement, one group after another.

    Under handover every request has a cache salt of its own: no worker has seen its prefix, so all of it must be handed
    over. Under auto nothing is salted, so the workers' prefix caches (with restored states in them) serve as well; what
    they hold from an earlier run may have been restored too, and must give the same answers.

    `excuse` says whether another token is rounding's: what follows it is asked for again then, and compared too.

    Raises EndpointError of the first request that failed.
    """
    run = f"verify-{os.getpid()}-{next(_runs)}"
    for number, (group, expected) in enumerate(zip(groups, references, strict=True)):
        salt = f"{run}-{number}" if placement == "handover" else ""
        replies, outcomes = endpoint.complete_group(group, placement, salt), []
        for case, reference, (answer, trace) in zip(group.cases, expected, replies, strict=True):
            recalled = None
            if case.prompt.answer is not None and not case.temperature and reference.tokens:
                recalled = reference.tokens[0] == case.prompt.answer
            outcome = Outcome(case, placement, compare(reference, answer), trace, recalled)
            outcomes.append(outcome)
            yield outcome
        if excuse is not None:
            yield from _rests(endpoint, outcomes, expected, salt, excuse)


def _rests(
    endpoint: Endpoint,
    outcomes: Sequence[Outcome],
    references: Sequence[Answer],
    salt: str,
    excuse: Callable[[Outcome], bool],
) -> Iterator[Outcome]:
    """What follows excused tokens, asked for again after the reference's own until nothing is left: the rests of a
    group at once, as the group was."""
    going = [
        (outcome.case, reference, 0, outcome) for outcome, reference in zip(outcomes, references, strict=True)
    ]
    for number in count():
        asked = []
        for case, reference, done, outcome in going:
            first = outcome.difference.first_token
            if first is None or not excuse(outcome) or (done := done + first + 1) >= len(reference.tokens):
                continue
            asked.append((case, reference, done, *rounding.rest(case, reference, done)))
        if not asked:
            return
        rests = Group(tuple(rest for *_, rest, _ in asked))
        placement = outcomes[0].placement
        replies = endpoint.complete_group(rests, placement, f"{salt}-rest-{number}" if salt else "")
        going = []
        for (case, reference, done, rest, expected), (answer, trace) in zip(asked, replies, strict=True):
            outcome = Outcome(rest, placement, compare(expected, answer), trace, None)
            going.append((case, reference, done, outcome))
            yield outcome
