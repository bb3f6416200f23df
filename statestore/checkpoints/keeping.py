# SPDX-License-Identifier: Apache-2.0
"""Giving back what lies in the store, and making room by evicting checkpoints.

Order of removal: objects first, the record last. A reader that still holds the record finds objects missing, which is a
counted miss; the other order would leave objects that nobody knows. What cannot be removed now is tried again until it
is: the sweeper is for dead owners only, and what a living one leaves behind, nobody else would remove.

Eviction takes the least recently used checkpoint of this worker that nothing rests on; what it rested on may be next.
Where others' checkpoints rest on all of them, it makes those invisible first, from their leaves. A checkpoint that
failed a load is of no use to anybody: whoever finds it makes it invisible. What another worker has made invisible its
owner, who sees it vanish, gives back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

from deltaserve.telemetry import HANDOFF
from statestore.boundary import BoundaryRecord
from statestore.checkpoints.budget import Budget
from statestore.checkpoints.index import CheckpointIndex
from statestore.checkpoints.victims import foreign_leaf, own_leaf
from statestore.ledger import Ledger, LedgerError
from statestore.pool import Pool, PoolClosed, PoolError

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 5.0
"""Seconds between attempts to give back what etcd or the store could not take back."""

Background = Callable[[Coroutine[Any, Any, Any]], None]
"""Runs a coroutine beside the requests."""

_AWAY = (PoolError, LedgerError, ConnectionError, TimeoutError)


class Keeper:
    """See the module's description. Belongs to one event loop."""

    def __init__(
        self, ledger: Ledger, pool: Pool, index: CheckpointIndex, budget: Budget, background: Background
    ) -> None:
        self._ledger, self._pool, self._index = ledger, pool, index
        self.budget = budget
        self._background = background
        self._evicting = asyncio.Lock()
        self._going: set[str] = set()
        self._pool_closed = False
        index.on_gone = self._vanished

    async def give_back(
        self,
        records: Sequence[BoundaryRecord],
        keys: Iterable[str],
        done: Callable[[], None] = lambda: None,
    ) -> bool:
        """Remove objects, then records; `done` is called when both have gone. Returns whether they have already.

        Never raises: what fails is tried again in the background.
        """
        wanted = list(dict.fromkeys(keys))
        if await self._try_to_give_back(records, wanted):
            done()
            return True
        self._background(self._keep_giving_back(records, wanted, done))
        return False

    async def _keep_giving_back(
        self, records: Sequence[BoundaryRecord], keys: list[str], done: Callable[[], None]
    ) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            if self._pool_closed:
                return  # this worker ends; the sweeper of another one takes over
            if await self._try_to_give_back(records, keys):
                log.info("given back at last: %s", ", ".join(record.id for record in records))
                done()
                return
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try_to_give_back(self, records: Sequence[BoundaryRecord], keys: list[str]) -> bool:
        names = ", ".join(record.id for record in records)
        try:
            left = await asyncio.to_thread(self._pool.remove, keys) if keys else []
            if left:
                log.warning("%d objects of %s cannot be removed yet", len(left), names)
                return False
            if records:
                await self._ledger.release(*records)
        except _AWAY as error:
            self._pool_closed = isinstance(error, PoolClosed)
            log.warning("%s cannot be given back yet: %s", names or f"{len(keys)} objects", error)
            return False
        return True

    async def make_room(self, nbytes: int = 0, kept: int = 0, spare: Collection[str] = ()) -> bool:
        """Evict until `nbytes` more fit, `kept` of them within the checkpoints' limit. Returns whether they do.

        `spare`: ids of a whole chain that is not to be evicted.
        """
        if self.budget.excess(nbytes, kept) > 0:  # else nobody waits for an eviction that is under way
            async with self._evicting:
                await self._evict_while(lambda: self.budget.excess(nbytes, kept) > 0, spare)
        return self.budget.excess(nbytes, kept) <= 0

    async def evict_some(self, nbytes: int) -> None:
        """Evict so many bytes of checkpoints, or all that can be, because the store has no room."""
        goal = self.budget.checkpoint_bytes - nbytes
        async with self._evicting:
            await self._evict_while(lambda: self.budget.checkpoint_bytes > max(0, goal))

    async def condemn(self, records: Iterable[BoundaryRecord]) -> None:
        """Make checkpoints that failed a load invisible to all, whoever owns them."""
        for record in records:
            try:
                if await self._ledger.begin_eviction(record, bad=True) is not None:
                    log.warning("checkpoint %s of %s failed a load and is no more", record.id, record.owner)
            except _AWAY as error:
                log.warning("checkpoint %s cannot be condemned now: %s", record.id, error)

    def gone(self, record: BoundaryRecord) -> None:
        """The ledger has refused something because this checkpoint is none any more."""
        if record.id in self._index.records:
            self._index.remove(record.id)
            self._vanished(record)

    def _vanished(self, record: BoundaryRecord) -> None:
        """A checkpoint is not visible any more; one of this worker's own, that it did not evict, is given back.

        Where it belonged to another worker, what it rested on may be evicted now.
        """
        if record.id in self.budget.checkpoints and record.id not in self._going:
            self._going.add(record.id)
            self._background(self._take_back(record))
        elif self.budget.excess() > 0:
            self._background(self.make_room())

    async def _take_back(self, record: BoundaryRecord) -> None:
        """Somebody else has made it invisible. A view from before its commit says the same, so the ledger is asked."""
        pause = FIRST_PAUSE
        while not self._pool_closed:
            try:
                there = await self._ledger.get_checkpoints([record.id])
            except (LedgerError, ConnectionError, TimeoutError) as error:
                log.warning("checkpoint %s has vanished, and cannot be asked for yet: %s", record.id, error)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if there:
                self._going.discard(record.id)
                self._index.add([record])
                return
            keys = [entry.key for entry in record.objects()]
            await self.give_back([record], keys, lambda: self._evicted(record))
            return

    async def _evict_while(self, needed: Callable[[], bool], spare: Collection[str] = ()) -> None:
        blocked = set(spare)
        while needed():
            try:
                victim = own_leaf(self.budget, self._index, blocked | self._going)
                if victim is None:
                    victim = await self._foreign_victim(blocked | self._going)
                if victim is None:
                    return
                blocked.add(victim.id)
                if victim.id in self.budget.checkpoints:
                    going_on = await self._evict(victim)
                else:
                    going_on = await self._evict_foreign(victim)
            except (LedgerError, ConnectionError, TimeoutError) as error:
                log.warning("nothing more can be evicted now: %s", error)
                return
            if not going_on:
                return  # the store is away: others would not go either

    async def _foreign_victim(self, blocked: Collection[str]) -> BoundaryRecord | None:
        if foreign_leaf(self.budget, self._index, blocked) is None:
            return None  # so that nothing is read where nothing could go
        return foreign_leaf(self.budget, self._index, blocked, await self._ledger.pins())

    async def _evict(self, victim: BoundaryRecord) -> bool:
        """Evict one of this worker's own, unless something rests on it. Returns whether the store took it back."""
        self._going.add(victim.id)
        evicting = None
        try:
            evicting = await self._ledger.begin_eviction(victim)
        finally:
            if evicting is None:
                self._going.discard(victim.id)
                if victim.id not in self._index.records:
                    self._vanished(victim)  # while it was going, nobody else looked after it
        if evicting is None:
            return True  # a request's own boundary rests on it, or it is gone and the index will say so
        self._index.remove(victim.id)
        keys = [entry.key for entry in victim.objects()]
        return await self.give_back([evicting], keys, lambda: self._evicted(victim))

    async def _evict_foreign(self, victim: BoundaryRecord) -> bool:
        """Make another worker's checkpoint invisible, unless something rests on it; its owner does the rest."""
        if await self._ledger.begin_eviction(victim) is not None:
            log.info("checkpoint %s of %s goes, so that what it rests on can", victim.id, victim.owner)
            self._index.remove(victim.id)
        return True

    def _evicted(self, record: BoundaryRecord) -> None:
        self._going.discard(record.id)
        self.budget.drop(record.id)
        self._index.remove(record.id)
        HANDOFF.evicted(record.nbytes)
        HANDOFF.kept(self.budget.checkpoint_bytes)
