# SPDX-License-Identifier: Apache-2.0
"""The ledger: which boundaries exist, and who may see them. The seam; `statestore.etcd_ledger` is the real one.

Protocol. A publisher writes twice a boundary, however many ranks it has:

    open      the record, every rank pending. Refused when the id exists, or when the owner's membership does not stand
              under the epoch's lease.
    commit    the record with every rank's entry, in one transaction that compares: the record is still the pending one
              of this epoch, and the owner's membership still stands under the epoch's lease. So a worker that was
              thought dead, and whose objects may have been swept, cannot make anything visible.

`progress` tells people what ranks have written in between; it is off the critical path, and nothing depends on it.
Readers see committed records only (`get_committed`). Records are not attached to the owner's lease: when the owner
dies they stay, so that `sweep` knows which objects have to go. Objects go first, the record last: the other order
would leave objects that nobody knows.

Errors: LedgerError for what the ledger refuses, ConnectionError when it cannot be reached in time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from statestore.boundary import BoundaryRecord

T = TypeVar("T")

Records = list[BoundaryRecord]

Remove = Callable[[BoundaryRecord], Awaitable[None]]
"""Removes a record's objects from the pool; what it raises leaves the record for the next sweep."""

log = logging.getLogger(__name__)


class LedgerError(Exception):
    """The ledger refuses, and says why."""


class FencedOut(LedgerError):
    """The owner's membership does not stand under the epoch's lease: it was lost, or never was."""


class CommitConflict(LedgerError):
    """The record is not the pending one of this epoch any more: gone, committed otherwise, or of another epoch."""


class RecordExists(LedgerError):
    """The id is taken by another record."""


class Ledger(ABC):
    """See the module's description. Belongs to one event loop."""

    @abstractmethod
    async def open(self, record: BoundaryRecord) -> None:
        """Write 1. Raises FencedOut, RecordExists, and ValueError unless the record and every rank are pending."""

    @abstractmethod
    async def progress(self, record: BoundaryRecord) -> bool:
        """Replace a pending record by one with more ranks written. Returns False when it is not pending any more."""

    @abstractmethod
    async def commit(self, record: BoundaryRecord) -> None:
        """Write 2; takes the record with every rank's entry. Repeating a commit that has happened is no error.

        Raises FencedOut, CommitConflict, and BoundaryInvalid naming the rank that has not written or the object
        without proof.
        """

    @abstractmethod
    async def get(self, boundary: str) -> BoundaryRecord | None:
        """The record in whatever state; for owners, sweepers and people."""

    async def get_committed(self, boundary: str) -> BoundaryRecord | None:
        """The record when it is committed; what readers use."""
        record = await self.get(boundary)
        return record if record is not None and record.state == "committed" else None

    @abstractmethod
    async def release(self, boundary: str) -> bool:
        """Delete a record whose objects have been removed. Returns whether it was there."""

    async def abort(self, boundary: str) -> bool:
        """Delete a record that will not be committed. Returns whether it was there."""
        return await self.release(boundary)

    @abstractmethod
    async def list(self) -> Records:
        """Every record, oldest epoch first."""

    @abstractmethod
    async def find(self, model_digest: str, prefix_hash: str) -> Records:
        """Committed records of one prefix, newest epoch first; those whose id is a `boundary_id`."""

    async def list_owned(self, owner: str) -> Records:
        """Records of one owner."""
        return [record for record in await self.list() if record.owner == owner]

    @abstractmethod
    async def lease_of(self, owner: str) -> int:
        """Lease under which the owner is a member now; 0: it is none."""

    @abstractmethod
    async def delete_orphan(self, record: BoundaryRecord) -> bool:
        """Delete a record unless its owner is a member (again) or the record has changed. Returns whether it went."""

    async def orphans(self, live_workers: Collection[str]) -> Records:
        """Records whose owner is not among `live_workers` and not a member now."""
        candidates = [record for record in await self.list() if record.owner not in live_workers]
        living = {owner for owner in {r.owner for r in candidates} if await self.lease_of(owner)}
        return [record for record in candidates if record.owner not in living]

    async def sweep(self, live_workers: Collection[str], remove: Remove) -> Records:
        """Remove objects, then records, of dead owners. Returns the records that went.

        The caller's view of who lives may be stale; a record whose owner is a member is never touched. One whose
        objects cannot be removed now stays for the next sweep.
        """
        gone = []
        for record in await self.orphans(live_workers):
            try:
                await remove(record)
            except Exception as error:
                log.warning("boundary %s of dead %s: objects not removed: %s", record.id, record.owner, error)
                continue
            if await self.delete_orphan(record):
                gone.append(record)
        return gone

    @abstractmethod
    async def close(self) -> None:
        """Release connections. Never raises."""


class Sweeper:
    """Sweeps owners that have been dead for `grace` seconds.

    The grace is for workers that lost their lease because etcd was away: they come back under a new one within
    seconds, and what they hold is good.
    """

    def __init__(self, ledger: Ledger, remove: Remove, grace: float) -> None:
        if grace < 0:
            raise ValueError(f"grace: {grace} must not be negative")
        self._ledger, self._remove, self._grace = ledger, remove, grace
        self._dead_since: dict[str, float] = {}

    async def step(self, live_workers: Collection[str]) -> Records:
        """One round, with the workers that are known to live. Returns the records that went."""
        now = time.monotonic()
        dead = {record.owner for record in await self._ledger.orphans(live_workers)}
        self._dead_since = {owner: self._dead_since.get(owner, now) for owner in dead}
        spared = {owner for owner, since in self._dead_since.items() if now - since < self._grace}
        if spared >= dead:
            return []
        return await self._ledger.sweep({*live_workers, *spared}, self._remove)


class LedgerThread:
    """A ledger for synchronous code: an event loop in a thread of its own.

    `submit(thread.ledger.commit(record))` returns a future at once; coroutines may be made on any thread.
    """

    def __init__(self, make: Callable[[], Ledger], name: str = "ledger") -> None:
        """`make` runs inside the loop. Raises what it raises."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

        async def build() -> Ledger:
            return make()

        try:
            self.ledger = asyncio.run_coroutine_threadsafe(build(), self._loop).result()
        except BaseException:
            self._stop(1.0)
            raise

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine of `ledger`. Raises RuntimeError after `close`."""
        if self._loop.is_closed() or not self._thread.is_alive():
            coro.close()
            raise RuntimeError("ledger: used after close")
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def close(self, timeout: float = 5.0) -> None:
        """End what runs and the thread, within `timeout` seconds. Never raises."""
        if not self._thread.is_alive():
            return

        async def finish() -> None:
            with contextlib.suppress(Exception):
                await self.ledger.close()
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(finish(), self._loop).result(timeout)
        self._stop(timeout)

    def _stop(self, timeout: float) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self._loop.close()
