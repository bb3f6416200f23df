# SPDX-License-Identifier: Apache-2.0
"""The router's small parts: placement, traces, cooldown."""

from __future__ import annotations

from typing import Any

import pytest

from router.cooldown import FIRST_SECONDS, LONGEST_SECONDS, THRESHOLD, Cooldown
from router.placement import Facts, InvalidPlacement, local_reason, parse_override
from router.trace import Trace, TraceRing, response_id


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(1, False, "handover"), "single_token"),
        (Facts(2, False, "handover"), None),
        (Facts(500, True, "handover"), "prompt_logprobs"),
        (Facts(500, False, "local"), "policy"),
        (Facts(2, False, "auto"), None),
    ],
)
def test_placement(facts: Facts, reason: str | None) -> None:
    assert local_reason(facts) == reason


@pytest.mark.parametrize("value", [None, {}])
def test_no_override(value: Any) -> None:
    assert parse_override(value) is None


def test_an_override() -> None:
    assert parse_override({"placement": "local"}) == "local"


@pytest.mark.parametrize(
    "value",
    [
        {"placement": "there"},
        {"placement": ["local"]},
        {"placement": None},
        {"boundary": "b"},
        {"placement": "local", "boundary": "b"},
        "local",
        [],
        7,
    ],
)
def test_an_invalid_override(value: Any) -> None:
    with pytest.raises(InvalidPlacement, match="kv_transfer_params"):
        parse_override(value)


@pytest.mark.parametrize(
    ("external", "response"),
    [
        ("cmpl-abc-0", "cmpl-abc"),
        ("cmpl-my-own-7-12", "cmpl-my-own-7"),
        ("chatcmpl-abc-7", "chatcmpl-abc-7"),
        ("resp_1", "resp_1"),
    ],
)
def test_response_ids(external: str, response: str) -> None:
    assert response_id(external) == response


def test_the_ring_forgets_the_oldest() -> None:
    ring = TraceRing(capacity=3)
    for name in ("cmpl-a", "chatcmpl-b", "cmpl-a", "cmpl-c"):
        ring.add(Trace(name, 5, "auto", 0.0))
    assert len(ring) == 3
    assert "parts" not in ring.find("cmpl-a")
    assert ring.find("b")["request_id"] == "chatcmpl-b"
    assert ring.find("c")["request_id"] == "cmpl-c"
    ring.add(Trace("cmpl-c", 9, "auto", 0.0))
    assert [part["prompt_tokens"] for part in ring.find("cmpl-c")["parts"]] == [5, 9]
    assert ring.find("b") is None
    assert ring.find("unknown") is None


def test_cooldown() -> None:
    now = 100.0
    cooldown = Cooldown(lambda: now)
    for _ in range(THRESHOLD - 1):
        cooldown.failed("w")
    assert cooldown.allows("w")
    cooldown.failed("w")
    assert not cooldown.allows("w")
    assert cooldown.allows("other")
    now += FIRST_SECONDS
    assert cooldown.allows("w")
    for _ in range(20):
        cooldown.failed("w")
    now += LONGEST_SECONDS - 0.01
    assert not cooldown.allows("w")
    cooldown.forget("w")
    assert cooldown.allows("w")
