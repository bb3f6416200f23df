# SPDX-License-Identifier: Apache-2.0
"""Forward passes of a published prompt are counted where they are scheduled, and a token computed twice shows."""

from __future__ import annotations

from statestore.connector.passes import Passes
from tests.unit.statestore.scheduler_probe import LONG, Half


def passes(half: Half) -> tuple[int, int, int]:
    found = half.outcome.passes
    return found.steps, found.computed, found.again


def publish(half: Half, *ends: int, length: int = 40, **intent: int) -> None:
    """A prompt whose steps end there, written by both ranks; steps of others in between do not count."""
    request = half.publish("r", length, LONG, **intent)
    for end in ends:
        for job in half.steps(request, end):
            half.written("r", 0, 1, link=job.link)
        half.step(other=7)
    half.end(request)


def test_a_prompt_in_one_step_is_one_pass(half: Half) -> None:
    publish(half, 40)
    assert passes(half) == (1, 40, 0)


def test_steps_that_end_at_checkpoints_are_passes_and_compute_every_token_once(half: Half) -> None:
    publish(half, 16, 32, 40, checkpoint_tokens=16)
    assert [link.length for link in half.outcome.links] == [16, 32, 40]
    assert passes(half) == (3, 40, 0)


def test_tokens_that_were_restored_are_not_computed(half: Half) -> None:
    request = half.publish("r", 40, LONG, base=16)
    request.num_computed_tokens = 16
    half.steps(request, 40)
    half.written("r", 0, 1)
    assert passes(half) == (1, 24, 0)


def test_what_a_preempted_request_computes_again_is_counted(half: Half) -> None:
    request = half.publish("r", 40, LONG)
    half.steps(request, 24)
    request.num_computed_tokens = 8  # its blocks went, but for those that the prefix cache kept
    half.steps(request, 40)
    half.written("r", 0, 1)
    assert passes(half) == (2, 56, 16)


def test_the_step_after_the_prompt_is_none_of_it(half: Half) -> None:
    request = half.publish("r", 40, LONG)
    half.steps(request, 40, 41, 42)
    half.written("r", 0, 1)
    half.end(request)
    assert passes(half) == (1, 40, 0)


def test_the_end_of_an_answer_has_no_passes(half: Half) -> None:
    request = half.publish("r", None, LONG)
    half.steps(request, 30, 31)
    half.end(request)
    half.written("r", 0, 1)
    assert passes(half) == (0, 0, 0)


def test_a_step_without_tokens_is_no_pass() -> None:
    found = Passes()
    found.step(0, 0)
    assert found == Passes()
