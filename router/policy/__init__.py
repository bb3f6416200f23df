# SPDX-License-Identifier: Apache-2.0
"""Placement policies: which decode worker, and whether a prefill worker computes the prompt for it.

base.py has the interface, `make` the policies by name. A policy sees plain facts (`Prompt`, `Worker`) and answers with
a `Choice`; the dispatcher carries it out, and tells the policy what came of it, from which it learns.

    least     least outstanding work; hands over prompts of handover_min_tokens and more
    prefix    the same, less what a worker is believed to hold of the prompt already
    price     hands over when that is expected to cost less than computing the prompt where it is needed
"""

from __future__ import annotations

from collections.abc import Callable

from router.policy.base import Choice, Policy, Prompt, Worker, held_as_work
from router.policy.least import Least
from router.policy.prefix import PrefixAware
from router.policy.price import Price

__all__ = ["POLICIES", "Choice", "Policy", "Prompt", "Worker", "held_as_work", "make"]

POLICIES: dict[str, Callable[[int], Policy]] = {"least": Least, "prefix": PrefixAware, "price": Price}


def make(name: str, handover_min_tokens: int) -> Policy:
    """A new policy. Raises ValueError naming the field when there is none of that name."""
    if name not in POLICIES:
        raise ValueError(f"policy: {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](handover_min_tokens)
