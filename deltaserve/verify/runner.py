# SPDX-License-Identifier: Apache-2.0
"""Sending a run's requests and comparing what comes back; used by the command and by the cluster tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count

from deltaserve.verify.client import Endpoint
from deltaserve.verify.compare import Answer, Outcome, compare
from deltaserve.verify.prompts import Group

_runs = count(1)


def run_pass(
    endpoint: Endpoint, groups: Sequence[Group], references: Sequence[Sequence[Answer]], placement: str
) -> Iterator[Outcome]:
    """Send every group under one placement, one group after another.

    Under handover every request has a cache salt of its own: no worker has seen its prefix, so all of it must be handed
    over. Under auto nothing is salted, so the workers' prefix caches (with restored states in them) serve as well; what
    they hold from an earlier run may have been restored too, and must give the same answers.

    Raises EndpointError of the first request that failed.
    """
    run = f"verify-{os.getpid()}-{next(_runs)}"
    for number, (group, expected) in enumerate(zip(groups, references, strict=True)):
        salt = f"{run}-{number}" if placement == "handover" else ""
        replies = endpoint.complete_group(group, placement, salt)
        for case, reference, (answer, trace) in zip(group.cases, expected, replies, strict=True):
            recalled = None
            if case.prompt.answer is not None and not case.temperature and reference.tokens:
                recalled = reference.tokens[0] == case.prompt.answer
            yield Outcome(case, placement, compare(reference, answer), trace, recalled)
