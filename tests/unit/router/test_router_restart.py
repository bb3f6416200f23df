# SPDX-License-Identifier: Apache-2.0
"""A worker that was started again serves within a second of being ready, however long it was away."""

from __future__ import annotations

import asyncio

import pytest
from vllm.v1.engine import FinishReason

from tests.doubles.worker import WorkerDouble
from tests.unit.router.harness import cluster, until

AWAY = 4.0
"""Seconds: by then the pause between two tries to connect has grown to its longest."""


@pytest.mark.parametrize("registered", [True, False])
async def test_a_restarted_worker_serves_within_a_second(registered: bool) -> None:
    """It has a new name in the register, so nothing waits for the old one's next try.

    The control: one that serves at its old address and has not registered gets nothing.
    """
    async with cluster(prefill=0, worker_wait=0.3) as c:
        old = c.decode
        assert (await c.run([5, 6, 7]))[1] is FinishReason.LENGTH
        await old.die()
        await c.membership.set([])
        await asyncio.sleep(AWAY)
        new = WorkerDouble("decode", "d0-again")
        await new.start(old.port)
        c.doubles[:] = [new]
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            if registered:
                await c.membership.set([new.member])
                await until(lambda: bool(c.dispatcher.roster.ready("decode")))
                assert (await c.run([5, 6, 7]))[1] is FinishReason.LENGTH
                took = loop.time() - began
                print(f"serves {took:.3f} s after it was ready")
                assert took < 1.0
            else:
                assert (await c.run([5, 6, 7]))[1] is FinishReason.ERROR
                assert new.adds == []
        finally:
            await new.stop()
