# SPDX-License-Identifier: Apache-2.0
"""Work that begins where it is asked for, and waits in a task."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from router.worker_link import begun


async def test_it_runs_at_once_up_to_where_it_waits() -> None:
    seen: list[str] = []
    gate = asyncio.get_running_loop().create_future()

    async def work() -> None:
        seen.append("begun")
        await gate
        await asyncio.sleep(0)
        seen.append("ended")

    task = begun(work())
    assert seen == ["begun"]
    assert isinstance(task, asyncio.Task)
    # Python 3.12's tasks take coroutines alone; 3.11's took the generator of one as well.
    assert inspect.iscoroutine(task.get_coro())
    gate.set_result(None)
    await task
    assert seen == ["begun", "ended"]


async def test_what_it_raises_is_the_futures() -> None:
    async def at_once() -> None:
        raise ConnectionError("gone")

    async def later() -> None:
        await asyncio.sleep(0)
        raise ConnectionError("gone later")

    for work in (at_once(), later()):
        with pytest.raises(ConnectionError, match="gone"):
            await begun(work)


async def test_it_can_be_cancelled_while_it_waits() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up")

    task = begun(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"]
