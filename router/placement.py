# SPDX-License-Identifier: Apache-2.0
"""Whether a request may be handed over, and what clients may say about it: plain facts, no workers.

Which workers it goes to is chosen by a policy (policy/), under the conditions in chooser.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Placement = Literal["auto", "handover", "local"]

LocalReason = Literal[
    "single_token",
    "prompt_logprobs",
    "policy",
    "short_prompt",
    "warm_prefix",
    "cheaper_here",
    "no_prefill_worker",
    "prefill_failed",
    "prefill_timeout",
    "store_full",
]
"""Why a prompt is prefilled on its decode worker (label of deltaserve_router_local_prefill_total)."""

LOCAL_REASONS: tuple[str, ...] = get_args(LocalReason)

HANDOVER_FAILED: tuple[LocalReason, ...] = ("prefill_failed", "prefill_timeout", "store_full")
"""A request with one of these reasons is not handed over again; the others are decided anew at each placement."""

ANSWER_TOKENS = 512
"""How much of an answer's limit counts as outstanding work: clients' limits are far above what they get."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision looks at."""

    prompt_tokens: int
    prompt_logprobs: bool
    placement: Placement


def local_reason(facts: Facts) -> LocalReason | None:
    """Why a prompt cannot or must not be handed over, whatever a policy thinks; None: it may be.

    A single token leaves nothing to hand over (N-1 = 0), and log-probs of the prompt need every one of its tokens
    computed where they are sampled.
    """
    if facts.prompt_tokens < 2:
        return "single_token"
    if facts.prompt_logprobs:
        return "prompt_logprobs"
    if facts.placement == "local":
        return "policy"
    return None


class InvalidPlacement(ValueError):
    """`kv_transfer_params` of a client that mean nothing here; the message is for the client."""


def parse_override(value: Any) -> Placement | None:
    """The placement that a client's `kv_transfer_params` ask for; None: they ask for nothing.

    Raises InvalidPlacement for anything but {"placement": "auto" | "handover" | "local"}: boundaries are the router's,
    and a client must never name one.
    """
    if value is None or value == {}:
        return None
    if not isinstance(value, dict) or set(value) != {"placement"}:
        raise InvalidPlacement("kv_transfer_params: only the key 'placement' is accepted")
    if value["placement"] not in get_args(Placement):
        raise InvalidPlacement("kv_transfer_params.placement: must be 'auto', 'handover' or 'local'")
    placement: Placement = value["placement"]
    return placement
