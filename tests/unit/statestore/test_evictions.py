# SPDX-License-Identifier: Apache-2.0
"""Evictions by two workers that follow one ledger, in memory and over etcd: who makes what invisible or gives back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from statestore.boundary import BoundaryRecord, Epoch
from statestore.checkpoints.budget import Budget
from statestore.checkpoints.index import CheckpointIndex
from statestore.checkpoints.keeping import Keeper
from statestore.ledger import Ledger
from tests.doubles.pool import PoolDouble, Store
from tests.support.chains import as_pending, chain_of, link_record
from tests.support.ledger_world import World, world  # noqa: F401
from tests.unit.roles.harness import geometry, until


class Side:
    """One worker's checkpoints."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self.ledger, self.pool = ledger, PoolDouble(store)
        self.budget = Budget(1 << 20, 1 << 20)
        self.index = CheckpointIndex(geometry())
        self.keeper = Keeper(ledger, self.pool, self.index, self.budget, self.background)
        self.tasks = {asyncio.ensure_future(self.index.follow(ledger))}

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.add(asyncio.ensure_future(work))

    async def publish(self, links: Sequence[BoundaryRecord]) -> None:
        """Objects are put, and the links committed."""
        opened = as_pending(replace(links[-1], parents=links[0].parents, base=links[0].base))
        await self.ledger.open(opened)
        for link in links:
            for entry in link.objects():
                with self.pool.staging(entry.nbytes, 1.0) as data:
                    data[:] = 7
                    self.pool.put(entry.key, [data])
        await self.ledger.commit(links)
        self.index.add(link for link in links if link.reusable)
        for link in links:
            if link.reusable:
                self.budget.keep(link)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.pool.close()


@dataclass
class Two:
    """A prefill worker of two checkpoints, and a decode worker with the end of an answer that rests on them."""

    store: Store
    prefill: Side
    decode: Side
    links: list[BoundaryRecord]
    end: BoundaryRecord


@contextlib.asynccontextmanager
async def two_workers(cluster: World) -> AsyncIterator[Two]:
    store = Store()
    prefill, decode = Side(cluster.ledger, store), Side(cluster.other, store)
    one, two = await cluster.owner("prefill-1"), await cluster.owner("decode-1")
    try:
        links = chain_of(one, [16, 32], last_reusable=True)
        await prefill.publish(links)
        parents = [link.id for link in links]
        end = link_record(two, 0, 32, 50, parents, owner="decode-1")
        await decode.publish([end])
        for side in (prefill, decode):
            await until(lambda side=side: set(side.index.records) == {*parents, end.id})  # type: ignore[misc]
        yield Two(store, prefill, decode, links, end)
    finally:
        await prefill.close()
        await decode.close()


async def test_a_chain_that_ends_at_another_worker_goes_as_a_whole(world: World) -> None:  # noqa: F811
    async with two_workers(world) as two:
        two.prefill.budget.checkpoint_limit = 0
        assert await two.prefill.keeper.make_room()
        assert two.prefill.budget.used == 0, "at once: nobody was waited for"
        await until(lambda: two.decode.budget.used == 0)
        assert await world.ledger.list() == []
        assert await world.ledger.pins() == {}
        assert two.store.objects == {}


async def test_an_open_on_its_end_keeps_the_whole_chain(world: World) -> None:  # noqa: F811
    async with two_workers(world) as two:
        parents = [*two.end.parents, two.end.id]
        own = link_record(Epoch(two.links[0].epoch.lease, 9000), 0, 50, 60, parents, reusable=False)
        await world.other.open(as_pending(own))
        two.prefill.budget.checkpoint_limit = 0
        assert not await two.prefill.keeper.make_room()
        assert await world.ledger.get_checkpoints(parents) == {
            record.id: record for record in (*two.links, two.end)
        }
        await world.other.abort(as_pending(own))
        assert await two.prefill.keeper.make_room(), "the control: it can go without"


@pytest.mark.parametrize("bad", [False, True])
async def test_what_is_invisible_pins_nothing(world: World, bad: bool) -> None:  # noqa: F811
    """With its child entry a record gives up its parent; its owner, who sees it vanish, removes it as before."""
    async with two_workers(world) as two:
        leaf = two.links[-1]
        assert await world.ledger.begin_eviction(leaf) is None, "the control"
        evicting = await world.ledger.begin_eviction(two.end, bad)
        assert evicting == replace(two.end, state="evicting")
        assert await world.other.pins() == {two.links[0].id: [leaf.id]}
        assert await world.ledger.begin_eviction(leaf) is not None
        await until(lambda: (two.decode.budget.used, two.prefill.budget.used) == (0, two.links[0].nbytes))
        assert await world.ledger.list() == [two.links[0]]
