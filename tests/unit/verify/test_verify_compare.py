# SPDX-License-Identifier: Apache-2.0
"""Comparing and judging: what is equal, what is a handover, what counts as damage found or felt."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deltaserve.verify.compare import Answer, Outcome, compare, damage_found, handover_problem
from deltaserve.verify.judge import judge
from deltaserve.verify.prompts import Case, Prompt

A = Answer((1, 2, 3), (-0.1, -0.2, -0.3))
EQUAL = compare(A, A)
OTHER = compare(A, Answer((1, 5, 3), (-0.1, -0.2, -0.3)))


def outcome(length: int, difference: Any = EQUAL, placement: str = "handover", **trace: Any) -> Outcome:
    """An outcome whose handover went well unless `trace` says otherwise."""
    base = {"from_store": max(0, length - 1), "recomputed": 1, "boundary_length": max(0, length - 1)}
    case = Case("case", Prompt(tuple(range(length))))
    return Outcome(case, placement, difference, {**base, **trace}, None)


def damaged(length: int, kind: str = "digest", **trace: Any) -> Outcome:
    """An outcome whose load failed a check."""
    return outcome(length, failure=kind, **{"from_store": 0, "recomputed": length, **trace})


def test_equal_answers_are_equal() -> None:
    assert EQUAL.tokens_equal
    assert EQUAL.first_token is None
    assert EQUAL.logprob == 0.0
    assert EQUAL.within(1e-9)


def test_the_first_different_token_is_named_and_later_logprobs_do_not_count() -> None:
    difference = compare(A, Answer((1, 9, 3), (-0.1004, -5.0, -9.0)))
    assert not difference.within(1.0)
    assert difference.first_token == 1
    assert difference.logprob == pytest.approx(4e-4)


def test_a_shorter_answer_differs_where_it_ends() -> None:
    assert compare(A, Answer((1, 2), (-0.1, -0.2))).first_token == 2


@pytest.mark.parametrize(("shift", "within"), [(9e-4, True), (1.1e-3, False), (math.nan, False)])
def test_logprobs_are_compared_within_the_tolerance(shift: float, within: bool) -> None:
    difference = compare(A, Answer(A.tokens, (-0.1, -0.2, -0.3 + shift)))
    assert difference.tokens_equal
    assert difference.within(1e-3) is within


def test_impossible_tokens_compare_equal() -> None:
    minus = Answer((1,), (-math.inf,))
    assert compare(minus, minus).within(1e-3)


def test_answers_without_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="found: 3 tokens but 0 log-probs"):
        compare(A, Answer(A.tokens, ()))


def test_a_handover_restores_all_but_one_token() -> None:
    assert handover_problem(outcome(100)) == ""
    assert handover_problem(outcome(1)) == ""
    assert handover_problem(outcome(100, from_store=83, local=16)) == ""
    assert "98 tokens from the store" in handover_problem(outcome(100, from_store=98))
    assert "prefill_failed: gone" in handover_problem(outcome(100, failure="prefill_failed", detail="gone"))
    empty = Outcome(outcome(100).case, "handover", EQUAL, {}, None)
    assert "says nothing" in handover_problem(empty)


def test_an_ordinary_run_passes_and_fails_on_one_difference() -> None:
    good = [outcome(1), outcome(100), outcome(100, placement="auto", from_store=0, recomputed=100)]
    assert judge(good, "none", 1e-3).passed
    for bad in (outcome(100, OTHER), outcome(100, OTHER, placement="auto"), outcome(100, from_store=0)):
        judgement = judge([*good, bad], "none", 1e-3)
        assert not judgement.passed
        assert judgement.problems[-1]
        assert not any(judgement.problems[:-1])


def test_an_empty_run_passes_nothing() -> None:
    for damage in ("none", "flip", "stale", "swap"):
        assert not judge([], damage, 1e-3).passed


def test_damage_is_found_only_by_a_check_and_never_used() -> None:
    assert damage_found(damaged(50), "flip")
    assert not damage_found(outcome(50), "flip")
    assert not damage_found(damaged(50, "prefill_failed"), "flip")
    assert not damage_found(damaged(50, from_store=49), "flip")
    assert not damage_found(damaged(50, boundary_length=0), "flip")
    assert not damage_found(damaged(50, "digest"), "null"), "another check found it"
    assert damage_found(damaged(50, "null_state"), "null")


def test_every_damage_must_be_found_and_every_answer_right() -> None:
    good = [outcome(1), damaged(2), damaged(500)]
    judgement = judge(good, "flip", 1e-3)
    assert (judgement.passed, judgement.damaged, judgement.found) == (True, 2, 2)
    missed = judge([*good, outcome(100)], "flip", 1e-3)
    assert (missed.passed, missed.damaged, missed.found) == (False, 3, 2)
    wrong = Outcome(damaged(7).case, "handover", OTHER, damaged(7).trace, None)
    assert not judge([*good, wrong], "flip", 1e-3).passed
    assert not judge([outcome(1)], "flip", 1e-3).passed, "nothing was damaged"


def test_damage_without_verification_must_be_felt_by_most() -> None:
    first = outcome(50)
    felt, not_felt = outcome(50, OTHER), outcome(50)
    judgement = judge([first, *[felt] * 9, not_felt], "swap", 1e-3)
    assert (judgement.passed, judgement.damaged, judgement.found) == (True, 10, 9)
    assert not judge([first, *[felt] * 7, *[not_felt] * 3], "swap", 1e-3).passed
    assert not judge([first], "swap", 1e-3).passed
    assert not judge([first, *[felt] * 9, damaged(50)], "swap", 1e-3).passed, "a check found it: it was on"


def test_damage_that_takes_from_another_request_spares_the_first() -> None:
    good = [outcome(1), outcome(2), damaged(17, "epoch"), damaged(500, "epoch")]
    judgement = judge(good, "stale", 1e-3)
    assert (judgement.passed, judgement.damaged, judgement.found) == (True, 2, 2)
    assert not judge([damaged(2, "epoch"), *good[2:]], "stale", 1e-3).passed, "the first was not damaged"
    assert not judge([*good, outcome(9)], "stale", 1e-3).passed


def test_each_damage_must_have_been_seen() -> None:
    kinds = ["digest", "size", "digest", "null_state", "epoch", "geometry"]
    assert judge([damaged(9, kind) for kind in kinds], "each", 1e-3).passed
    judgement = judge([damaged(9, kind) for kind in kinds[:-1]], "each", 1e-3)
    assert not judgement.passed
    assert "not seen: geometry" in judgement.findings[-1]
