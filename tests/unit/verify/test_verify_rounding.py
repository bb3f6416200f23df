# SPDX-License-Identifier: Apache-2.0
"""A token is excused only where the reference's own rounding chooses either, it is counted, and what follows is
compared all the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from deltaserve.config import WorkerConfig
from deltaserve.verify import report, rounding
from deltaserve.verify.client import Endpoint
from deltaserve.verify.compare import Answer, Difference, Outcome
from deltaserve.verify.judge import Judge, is_excused
from deltaserve.verify.prompts import Case, Group, Prompt, make_groups
from deltaserve.verify.reference import _with_noise, rounds
from deltaserve.verify.runner import run_pass
from tests.unit.verify.fake_endpoint import FakeEndpoint, true_trace
from tests.unit.verify.test_verify_prompts import recall_model

TOKENS = 16
NEAR, FAR = 0.01, 2.0
NOISE = rounding.Noise(logprob=0.02, gap=0.05)


def next_token(before: Sequence[int]) -> int:
    return (sum(before) * 7 + len(before)) % 997


def say(prompt: Sequence[int], count: int, flips: dict[int, int] | None = None) -> Answer:
    """`count` tokens after a prompt, each of all before it; at the lengths in `flips` another one by so much."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens) + (flips or {}).get(len(tokens), 0))
    made = tuple(tokens[len(prompt) :])
    gaps = tuple(NEAR if (len(prompt) + i) % 10 == 0 else FAR for i in range(count))
    return Answer(made, (-0.1,) * count, gaps)


def run(flips: dict[int, int]) -> tuple[Any, list[Outcome]]:
    """One prompt of 17 tokens; the endpoint says another token at the lengths in `flips`."""
    case = Case("17 greedy", Prompt(tuple(range(1, 18))), max_tokens=TOKENS)
    endpoint = FakeEndpoint(lambda body: (say(body["prompt"], body["max_tokens"], flips), true_trace(body)))
    excuse = partial(is_excused, tolerance=NOISE.tolerance(1e-3), gap=NOISE.gap)
    try:
        expected = [[say(case.prompt.tokens, TOKENS)]]
        found = list(run_pass(Endpoint(endpoint.url), [Group((case,))], expected, "handover", excuse))
    finally:
        endpoint.close()
    judge = Judge("none", NOISE.tolerance(1e-3), NOISE.gap)
    for outcome in found:
        judge.take(outcome)
    return judge.close(), found


def test_equal_answers_need_no_excuse() -> None:
    judgement, found = run({})
    assert (judgement.passed, judgement.excused, len(found)) == (True, 0, 1)


def test_a_near_token_is_excused_and_the_rest_is_asked_for_after_the_references() -> None:
    judgement, found = run({20: 1})
    assert (judgement.passed, judgement.excused) == (True, 1)
    assert [outcome.case.name for outcome in found] == ["17 greedy", "17 greedy +4"]
    assert found[1].case.prompt.tokens[:17] == tuple(range(1, 18))
    assert found[1].case.max_tokens == TOKENS - 4
    assert found[1].difference.tokens_equal
    assert found[1].from_store == 20, "the longer prompt has been handed over as well"
    assert "1 of 16 tokens excused" in " ".join(judgement.findings)
    document = report.document(judgement, {})
    assert (document["different"], document["excused"]) == (0, 1)
    assert "2 requests, 0 different" in report.summary(judgement)[0]


@pytest.mark.parametrize("flips", [{21: 1}, {20: 1, 25: 1}], ids=["at once", "in the rest"])
def test_a_token_that_rounding_does_not_choose_fails(flips: dict[int, int]) -> None:
    judgement, found = run(flips)
    assert not judgement.passed
    assert not found[-1].difference.tokens_equal
    assert found[-1].difference.gap == FAR


def test_more_than_a_few_fail() -> None:
    judgement, _ = run({20: 1, 30: 1})
    assert judgement.excused == 2
    assert not judgement.passed, "one of 16 may be excused"


def test_logprobs_must_be_near_before_the_token() -> None:
    assert Difference(False, 3, 0.03, NEAR).excused(0.04, 0.05)
    assert not Difference(False, 3, 0.05, NEAR).excused(0.04, 0.05)
    assert not Difference(False, 3, 0.0, None).excused(0.04, 0.05), "an unknown gap excuses nothing"


def test_noise_is_what_the_engines_own_answers_move() -> None:
    first = Answer((1, 2, 3), (-0.1, -0.2, -0.3), (1.0, 0.5, 0.02))
    assert rounding.between(first, first) == rounding.Noise(0.0, 0.0)
    moved = Answer((1, 2, 3), (-0.1, -0.25, -0.3), (1.0, 0.4, 0.02))
    assert rounding.between(first, moved).logprob == pytest.approx(0.05)
    assert rounding.between(first, moved).gap == pytest.approx(0.1)
    other = Answer((1, 2, 4), (-0.1, -0.2, -0.3), (1.0, 0.5, 0.03))
    assert rounding.between(first, other).gap == pytest.approx(0.05)


def test_the_reference_measures_itself_from_its_cache_and_at_once() -> None:
    cases = [Case(str(n), Prompt(tuple(range(n))), 0.8 if n == 4 else 0.0, max_tokens=2) for n in (3, 4, 5)]
    groups = [[cases[0]], cases[1:]]
    shifts = {"a": 0.01, "b": 0.02, "c": 0.03, "at-once-0": 0.2, "at-once-1": 0.2, "at-once-2": 0.0}
    asked: list[list[str]] = []

    def ask(of: Sequence[Case], salts: Sequence[str]) -> list[Answer]:
        asked.append(list(salts))
        return [Answer((1, 2), (-1.0, -1.0 - shifts[salt]), (1.0, 1.0)) for salt in salts]

    found = [[Answer((1, 2), (-1.0, -1.0), (1.0, 1.0)) for _ in group] for group in groups]
    measured = _with_noise(ask, groups, [["a"], ["b", "c"]], found)
    assert asked == [["a"], ["b"], ["c"], ["at-once-0", "at-once-1", "at-once-2"]], "batches of other shapes"
    noises = [answer.noise[0] for group in measured for answer in group]
    assert noises == pytest.approx([0.2, 0.0, 0.03]), "a sampled answer says nothing about rounding"
    assert rounding.of_answers(measured).logprob == pytest.approx(0.2)


def test_an_engine_that_contradicts_itself_is_no_reference() -> None:
    first = Answer((1, 2), (-0.1, -0.2), (1.0, 1.0))
    broken = Answer((1, 2), (-0.1, math.nan), (1.0, 1.0))
    assert not rounding.between(first, broken).plausible
    assert not rounding.between(first, Answer((1, 3), (-0.1, -0.2), (1.0, 1.5))).plausible
    assert NOISE.plausible


def test_noise_is_measured_to_the_end_of_an_answer() -> None:
    """Behind a token that became another one the rest is asked for again; what moves there counts."""
    case = Case("17 greedy", Prompt(tuple(range(1, 18))), max_tokens=TOKENS)
    first = say(case.prompt.tokens, TOKENS)
    asked: list[int] = []

    def ask(of: Sequence[Case], salts: Sequence[str]) -> list[Answer]:
        answers = []
        for one in of:
            length = len(one.prompt.tokens)
            asked.append(length)
            answer = say(one.prompt.tokens, one.max_tokens, {20: 1} if length == 17 else {})
            shift = 0.5 if length > 17 else 0.0
            answers.append(Answer(answer.tokens, tuple(x - shift for x in answer.logprobs), answer.gaps))
        return answers

    ((measured,),) = _with_noise(ask, [[case]], [["a"]], [[first]])
    assert asked == [17, 17, 21, 21], "twice, and twice the rest"
    assert measured.noise == pytest.approx((0.5, 2 * NEAR))
    assert measured.tokens == first.tokens


def test_only_narrow_arithmetic_rounds() -> None:
    assert not rounds(WorkerConfig())
    assert rounds(WorkerConfig(dtype="bfloat16"))
    assert rounds(WorkerConfig(device="cuda"))


def test_where_likelihood_decides_all_requests_are_greedy(tmp_path: Any) -> None:
    model = recall_model(tmp_path)
    modes = {case.mode for group in make_groups(model, [17], 4, 8, False, True) for case in group.cases}
    assert modes == {"greedy"}
    assert "seeded" in {case.mode for group in make_groups(model, [17], 4, 8) for case in group.cases}
