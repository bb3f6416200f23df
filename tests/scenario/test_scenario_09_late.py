# SPDX-License-Identifier: Apache-2.0
"""Scenario 9, LATE WRITE: a transfer that ends after its request has gone hurts nobody who has its memory now.

Times are a tenth of the public report's: late by 0.5 s and more, given up or aborted long before.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.doubles.pool import DeadlinePool, PoolDouble
from tests.scenario.stack import Barrier, Stack, failures, running, until

LENGTH = 70
TIMEOUT = 0.3
BLOCKS = 24
STAGING = 64 << 10


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Store calls may take 0.3 s; one decode rank, with little staging memory and a small cache."""
    made_pool = DeadlinePool.__init__

    def small(self: DeadlinePool, store: Any, segment_bytes: int, **options: Any) -> None:
        made_pool(self, store, segment_bytes, staging_bytes=STAGING, **options)

    monkeypatch.setattr(DeadlinePool, "__init__", small)
    async with running() as made:
        await made.add("prefill")
        await made.add("decode", {"blocks": BLOCKS}, tp=1, store={"timeout": TIMEOUT})
        yield made


class LateReads:
    """The first read of an object goes on after its deadline, and writes into its buffers when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.barrier = Barrier()
        self.wrote = threading.Event()
        self.let_go_by_the_next = False
        honest = PoolDouble.get_into
        late = self

        def reading(pool: PoolDouble, key: str, buffers: Sequence[Any], timeout: float | None = None) -> None:
            honest(pool, key, buffers, timeout)
            if "/kda/" not in key:
                return
            if late.barrier.waiting == 0:
                late.barrier()
                for buffer in buffers:
                    buffer[:] = 0x5A
                late.wrote.set()
            elif late.let_go_by_the_next:
                # Another request has just read: the moment in which a late write would hurt most.
                late.let_go_by_the_next = False
                late.barrier.open()
                assert late.wrote.wait(30)

        monkeypatch.setattr(PoolDouble, "get_into", reading)


async def late_write_into_a_successor(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The trace of a handover during which the late write of an earlier one lands; its answer is right."""
    late = LateReads(monkeypatch)
    first = await stack.run(stack.prompt(LENGTH))
    assert late.barrier.waiting == 1
    assert stack.is_right(first), "a load that is late is recomputed"
    assert stack.trace(first)["failure"] == "store_unavailable"
    late.let_go_by_the_next = True
    second = await stack.run(stack.prompt(LENGTH))
    assert late.wrote.is_set()
    assert stack.is_right(second)
    return stack.trace(second)


async def test_staging_memory_of_a_late_read_is_kept_aside(
    hasty: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline = hasty.gauges()
    trace = await late_write_into_a_successor(hasty, monkeypatch)
    assert trace["from_store"] == LENGTH - 1
    await hasty.back_to(baseline)


async def test_control_without_quarantine(hasty: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The successor's bytes are overwritten under it; its digests find that, and it recomputes."""
    monkeypatch.setattr(DeadlinePool, "busy", lambda self, buffer: False)
    before = failures("load", "digest")
    trace = await late_write_into_a_successor(hasty, monkeypatch)
    assert trace["from_store"] == 0
    assert failures("load", "digest") == before + 1


async def test_pages_of_an_aborted_load_wait_for_it() -> None:
    """Aborted at once, ended much later: meanwhile others pass through every page that is free."""
    async with running() as small:
        await small.add("prefill")
        await small.add("decode", {"blocks": BLOCKS})
        baseline = small.gauges()
        name = f"{small.decode.worker_id} blocks"
        barrier = Barrier()
        slow = small.decode.engine.pools[4]

        def before(operation: str, key: str) -> None:
            if operation == "staging" and key == slow.segment_name and barrier.waiting == 0:
                barrier()

        ask = small.ask(small.prompt(LENGTH))
        small.store.before = before
        await until(lambda: barrier.waiting == 1 or ask.ended.is_set())
        small.abort([ask])
        for _ in range(4):
            other = await small.run(small.prompt(LENGTH), 2)
            assert small.is_right(other)
            assert small.gauges()[name] < baseline[name], "pages of a load under way were given back"
        barrier.open()
        await small.back_to(baseline)
