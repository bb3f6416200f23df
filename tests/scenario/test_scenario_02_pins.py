# SPDX-License-Identifier: Apache-2.0
"""Scenario 2, PIN UNTIL ALL RANKS: cache blocks of a boundary stay until the slowest of 8 ranks has read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from statestore import sweeping
from statestore.connector.pins import Pins
from tests.scenario.stack import Barrier, Stack, running, until

SLOW_RANK = 5
BLOCKS = 20
LENGTH = 100


@pytest.fixture
async def small() -> AsyncIterator[Stack]:
    """A prefill worker whose cache holds little more than one prompt."""
    async with running() as made:
        await made.add("prefill", {"blocks": BLOCKS})
        await made.add("decode")
        yield made


def slow_rank(stack: Stack) -> Barrier:
    """The slow rank's next publish waits before it reads a byte of the cache; only its first one."""
    barrier = Barrier()
    segment = stack.prefill.engine.pools[SLOW_RANK].segment_name

    def before(operation: str, key: str) -> None:
        if operation == "staging" and key == segment and barrier.waiting == 0:
            barrier()

    stack.store.before = before
    return barrier


async def fill_the_cache(stack: Stack) -> None:
    """Other prompts pass through every block that is free."""
    for _ in range(4):
        ask = await stack.run(stack.prompt(LENGTH), 1)
        assert stack.is_right(ask)


async def handed_over_while_others_pass(stack: Stack) -> bool:
    """Whether a boundary, one rank of which reads late, was handed over whole."""
    barrier = slow_rank(stack)
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: barrier.waiting == 1)
    await fill_the_cache(stack)
    barrier.open()
    await stack.end(ask)
    return stack.is_right(ask) and stack.trace(ask)["from_store"] == LENGTH - 1


async def test_blocks_are_not_reused_before_the_slowest_rank_has_read(small: Stack) -> None:
    baseline = small.gauges()
    assert await handed_over_while_others_pass(small)
    await small.back_to(baseline)


async def test_a_client_that_goes_does_not_free_blocks_that_are_read(small: Stack) -> None:
    baseline = small.gauges()
    name = f"{small.prefill.worker_id} blocks"
    barrier = slow_rank(small)
    ask = small.ask(small.prompt(LENGTH))
    await until(lambda: barrier.waiting == 1)
    small.abort([ask])
    await fill_the_cache(small)
    assert small.gauges()[name] < baseline[name], "pinned blocks were given back while a rank reads them"
    barrier.open()
    await small.back_to(baseline)


async def killed_while_it_writes(stack: Stack) -> None:
    barrier = slow_rank(stack)
    ask = stack.ask(stack.prompt(LENGTH))
    # The siblings have written; their objects lie in the reader's memory.
    await until(lambda: barrier.waiting == 1 and sum(o.sealed for o in stack.store.objects.values()) >= 7)
    assert await stack.decode.ledger.list(), "the control: there is a record"
    await stack.prefill.kill_while(barrier)
    await stack.end(ask)
    assert stack.is_right(ask)
    assert stack.trace(ask)["route"].startswith("local")
    assert not any(r.state == "committed" for r in await stack.decode.ledger.list())


async def test_with_that_rank_killed_nothing_is_visible_and_everything_is_swept(small: Stack) -> None:
    await killed_while_it_writes(small)
    await until(lambda: not small.records and not small.store.objects, 30)


async def test_control_without_a_sweeper(small: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 60.0)
    await asyncio.sleep(0.1)  # the sweepers' present pauses
    await killed_while_it_writes(small)
    await asyncio.sleep(1.0)
    assert small.records
    assert small.store.objects


async def test_control_without_pins(small: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_pinned(self: Pins, name: Any, request_id: str, spans: Any) -> None:
        self._blocks[name] = []

    monkeypatch.setattr(Pins, "pin", not_pinned)
    assert not await handed_over_while_others_pass(small)
