# SPDX-License-Identifier: Apache-2.0
"""Waiting for a commit, over the double and over a real etcd: told of it when it happens, and of nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd_client import Etcd
from statestore.etcd_ledger import EtcdLedger
from tests.support.ledger_world import World
from tests.support.patience import HUNG
from tests.support.records import committed, pending

SOON = 10.0


async def waiting(world: World, boundary: str) -> asyncio.Task[Any]:
    """Somebody waits; long enough for a watch to stand."""
    task = asyncio.ensure_future(world.other.wait_committed(boundary))
    await asyncio.sleep(0.2)
    return task


async def test_told_when_it_is_committed(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch, ranks=2))
    task = await waiting(world, pending(epoch).id)
    assert not task.done()
    await world.ledger.commit([committed(epoch, ranks=2)])
    assert await asyncio.wait_for(task, SOON) == committed(epoch, ranks=2)


async def test_told_of_what_is_committed_already(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    await world.ledger.commit([committed(epoch)])
    assert await asyncio.wait_for(world.other.wait_committed(pending(epoch).id), SOON) == committed(epoch)


async def test_a_commit_beside_the_first_look_is_not_missed(world: World) -> None:
    for _ in range(30):
        epoch = await world.owner()
        await world.ledger.open(pending(epoch))
        task = asyncio.ensure_future(world.other.wait_committed(pending(epoch).id))
        await world.ledger.commit([committed(epoch)])
        assert await asyncio.wait_for(task, SOON) == committed(epoch)


async def test_one_that_goes_is_none(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    task = await waiting(world, pending(epoch).id)
    await world.ledger.abort(pending(epoch))
    assert await asyncio.wait_for(task, SOON) is None


async def test_one_that_was_never_there_is_none(world: World) -> None:
    epoch = await world.owner()
    assert await asyncio.wait_for(world.other.wait_committed(pending(epoch).id), SOON) is None


async def test_progress_and_others_are_not_it(world: World) -> None:
    """Nor one whose id begins with this one."""
    epoch = await world.owner()
    longer = replace(epoch, counter=int(f"{epoch.counter}7"))
    assert pending(longer).id.startswith(pending(epoch).id)
    await world.ledger.open(pending(epoch, ranks=2))
    task = await waiting(world, pending(epoch).id)
    half = replace(pending(epoch, ranks=2), ranks=(committed(epoch, 2).ranks[0], pending(epoch, 2).ranks[1]))
    await world.ledger.progress(half)
    await world.ledger.open(pending(longer))
    await world.ledger.commit([committed(longer)])
    await world.ledger.release(committed(longer))
    await asyncio.sleep(0.2)
    assert not task.done()
    await world.ledger.commit([committed(epoch, ranks=2)])
    assert await asyncio.wait_for(task, SOON) == committed(epoch, ranks=2)


@pytest.fixture
async def busy(etcd_config: EtcdConfig) -> AsyncIterator[Etcd]:
    """An etcd that others write to all the time, so that every revision is soon one of the past."""
    etcd = Etcd(etcd_config)
    stop = asyncio.Event()

    async def write() -> None:
        while not stop.is_set():
            await etcd.put(f"{etcd_config.prefix}/others", b"x")

    task = asyncio.ensure_future(write())
    yield etcd
    stop.set()
    await task
    await etcd.close()


@pytest.mark.parametrize("world", ["etcd"], indirect=True)
async def test_the_push_does_not_wait_for_etcd_to_look_into_the_past(world: World, busy: Etcd) -> None:
    """A watch from a revision that has passed is served ten times a second; twelve such commits would take 600 ms."""
    late = 0.0
    for _ in range(12):
        epoch = await world.owner()
        await world.ledger.open(pending(epoch))
        task = asyncio.ensure_future(world.other.wait_committed(pending(epoch).id))
        await asyncio.sleep(0.005)
        await world.ledger.commit([committed(epoch)])
        began = time.monotonic()
        assert await asyncio.wait_for(task, SOON) == committed(epoch)
        late += time.monotonic() - began
    assert late < 0.4


@pytest.mark.parametrize("world", ["etcd"], indirect=True)
async def test_a_watch_that_ends_says_so(world: World) -> None:
    """A reader that cannot be told must not wait for ever."""
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    task = await waiting(world, pending(epoch).id)
    assert isinstance(world.other, EtcdLedger)
    await world.other._etcd.close()
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(task, HUNG)
