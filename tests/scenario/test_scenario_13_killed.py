# SPDX-License-Identifier: Apache-2.0
"""Scenario 13, PREFILL KILLED mid-publish: the request is answered elsewhere, and what was written is swept."""

from __future__ import annotations

from typing import Any

import pytest

from router.dispatcher import Dispatcher
from tests.scenario.stack import Ask, Barrier, Stack, until

LENGTH = 70


async def killed_mid_publish(stack: Stack, operation: str, at: int) -> Ask:
    """Kill the prefill worker at the `at`-th call of one kind during a publish; its threads go on into nothing."""
    barrier = Barrier()
    calls = []

    def before(called: str, key: str) -> None:
        if called == operation:
            calls.append(key)
            if len(calls) >= at:
                barrier()

    stack.store.before = before
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: barrier.waiting > 0)
    stack.store.before = lambda called, key: None
    await stack.prefill.kill_while(barrier)
    return ask


@pytest.mark.parametrize(("operation", "at"), [("reserve", 1), ("write", 3), ("seal", 1), ("seal", 8)])
async def test_the_request_is_answered_and_the_rest_swept(stack: Stack, operation: str, at: int) -> None:
    ask = await killed_mid_publish(stack, operation, at)
    await stack.end(ask)
    assert stack.is_right(ask)
    assert stack.trace(ask)["route"].startswith("local prefill_failed")
    await until(lambda: not stack.records and not stack.store.objects, 30)


async def test_another_prefill_worker_serves_the_next(stack: Stack) -> None:
    await stack.add("prefill")
    ask = await killed_mid_publish(stack, "seal", 1)
    await stack.end(ask)
    assert stack.is_right(ask)
    following = await stack.run(stack.prompt(LENGTH))
    assert stack.is_right(following)
    assert stack.trace(following)["from_store"] == LENGTH - 1


async def test_control_a_router_that_does_not_notice(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: Dispatcher, link: Any, legs: list[Any], reason: str) -> None:
        self.roster.changed()

    monkeypatch.setattr(Dispatcher, "link_down", deaf)
    ask = await killed_mid_publish(stack, "seal", 1)
    with pytest.raises(TimeoutError):
        await stack.end(ask, 2.0)
