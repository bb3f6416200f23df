# SPDX-License-Identifier: Apache-2.0
"""The ledger: which boundaries exist, and who may see them. The seam; `statestore.etcd_ledger` is the real one.

Protocol. A publisher writes twice a request, however many ranks and links it has:

    open      the record, every rank pending. Refused when the id exists, when the owner's membership does not stand
              under the epoch's lease, or when the parent that it names is no committed checkpoint any more. The same
              transaction writes a child entry parent -> record, which pins the parent, and with it its whole chain.
    commit    the records of the epoch with every rank's entry, checkpoints first, in one transaction that compares: the
              opened record is still the pending one of this epoch, the owner's membership still stands under the
              epoch's lease, the parent is still there, and nobody has committed a checkpoint of the same prefix
              meanwhile. So a worker that was thought dead, and whose objects may have been swept, cannot make anything
              visible; and a checkpoint is there once.

`progress` tells people what ranks have written in between; it is off the critical path, and nothing depends on it.
Readers see committed records only (`get_committed`, `get_chain`, `watch_checkpoints`). Records are not attached to the
owner's lease: when the owner dies they stay, so that `sweep` knows which objects have to go. Objects go first, the
record last: the other order would leave objects that nobody knows.

    evict     `begin_eviction`, one transaction, compares that no child entry exists, and makes the record invisible;
              then its owner removes the objects; then `release`.

A child entry comes with its record and goes when the record goes or becomes invisible, in the same transaction,
whatever the transaction is: from then on nobody reads the record, and what it rests on is of no use to it.

Errors: LedgerError for what the ledger refuses, ConnectionError when it cannot be reached in time.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence

from statestore.boundary import BoundaryInvalid, BoundaryRecord
from statestore.checkpoints.chain import check_chain

Records = list[BoundaryRecord]
Names = list[str]
Chain = tuple[BoundaryRecord, ...]
"""Records whose rows join from token 0, oldest first; the last one has the state."""

Remove = Callable[[BoundaryRecord], Awaitable[None]]
"""Removes a record's objects from the pool; what it raises leaves the record for the next sweep."""

MAX_LINKS = 63
"""Records of one commit: etcd takes 128 operations a transaction, and a link needs two."""

log = logging.getLogger(__name__)


class LedgerError(Exception):
    """The ledger refuses, and says why."""


class FencedOut(LedgerError):
    """The owner's membership does not stand under the epoch's lease: it was lost, or never was."""


class CommitConflict(LedgerError):
    """The record is not the pending one of this epoch any more: gone, committed otherwise, or of another epoch."""


class RecordExists(LedgerError):
    """The id is taken by another record."""


class ParentGone(LedgerError):
    """The checkpoint on which a record rests is not a committed one any more."""


class ChainBroken(LedgerError):
    """A committed boundary rests on a record that is not there."""


class CheckpointExists(LedgerError):
    """Somebody has committed checkpoints of the same prefixes: `records`, of which some may be adopted."""

    def __init__(self, records: Sequence[BoundaryRecord]) -> None:
        super().__init__(f"committed meanwhile: {', '.join(record.id for record in records)}")
        self.records = tuple(records)


class Ledger(ABC):
    """See the module's description. Belongs to one event loop."""

    @abstractmethod
    async def open(self, record: BoundaryRecord) -> None:
        """Write 1. Raises FencedOut, RecordExists, ParentGone, and ValueError unless record and ranks are pending."""

    @abstractmethod
    async def progress(self, record: BoundaryRecord) -> bool:
        """Replace a pending record by one with more ranks written. Returns False when it is not pending any more."""

    @abstractmethod
    async def commit(self, records: Sequence[BoundaryRecord], opened: str = "", beside: bool = False) -> None:
        """Write 2; takes the links of one epoch with every rank's entry, each one the parent of the next.

        `opened`: id of the pending record, where it is not that of the last link. `beside`: also when others have
        committed checkpoints of the same prefixes. Repeating a commit that has happened is no error.

        Raises FencedOut, CommitConflict, ParentGone, CheckpointExists, and BoundaryInvalid naming the rank that has not
        written, the object without proof, or the link that does not join.
        """

    @abstractmethod
    async def get(self, boundary: str) -> BoundaryRecord | None:
        """The record in whatever state; for owners, sweepers and people."""

    async def get_committed(self, boundary: str) -> BoundaryRecord | None:
        """The record when it is committed; what readers use."""
        record = await self.get(boundary)
        return record if record is not None and record.state == "committed" else None

    async def get_chain(self, boundary: str, known: Mapping[str, BoundaryRecord] | None = None) -> Chain:
        """A committed record with everything that it rests on, oldest first; empty when there is no such record.

        `known`: committed checkpoints that the caller has seen already; they never change. Raises ChainBroken.
        """
        record = await self.get_committed(boundary)
        return () if record is None else await self.chain_of(record, known)

    async def chain_of(
        self, record: BoundaryRecord, known: Mapping[str, BoundaryRecord] | None = None
    ) -> Chain:
        """A committed record, which has been read, with everything that it rests on; `known` and errors as above."""
        boundary, known = record.id, known or {}
        found = {name: known[name] for name in record.parents if name in known}
        found |= await self.get_checkpoints([name for name in record.parents if name not in found])
        missing = [name for name in record.parents if name not in found]
        if missing:
            raise ChainBroken(f"boundary {boundary} rests on {missing[0]}, which is not there")
        chain = (*(found[name] for name in record.parents), record)
        try:
            check_chain(chain)
        except BoundaryInvalid as error:
            raise ChainBroken(f"boundary {boundary}: {error}") from error
        return chain

    @abstractmethod
    async def wait_committed(self, boundary: str) -> BoundaryRecord | None:
        """The committed record as soon as there is one; None when a pending one goes, or there is none at all.

        Waits for ever; the caller has a deadline. Raises ConnectionError when it cannot be told any more.
        """

    @abstractmethod
    async def get_checkpoints(self, boundaries: Sequence[str]) -> dict[str, BoundaryRecord]:
        """Those of the named records that are committed checkpoints."""

    @abstractmethod
    def watch_checkpoints(self) -> AsyncGenerator[dict[str, BoundaryRecord], None]:
        """Yield every committed checkpoint by id, now and after each change, for ever.

        While the ledger is away what was seen last stands. Survives compaction and reconnection.
        """

    @abstractmethod
    async def begin_eviction(self, record: BoundaryRecord, bad: bool = False) -> BoundaryRecord | None:
        """Make a committed checkpoint invisible, as state `evicting`, so that its owner can remove its objects.

        Whoever may call it: an owner, and others who need what it rests on, which it pins no longer.
        `bad`: also when something rests on it, because a load of it has failed: what rests on it is of no use either.
        Returns the record as it is now; None when something rests on it, or it is no committed checkpoint any more.
        """

    @abstractmethod
    async def pins(self) -> dict[str, Names]:
        """Ids of the records that rest on a checkpoint, by its id."""

    @abstractmethod
    async def release(self, *records: BoundaryRecord) -> bool:
        """Delete records whose objects have been removed, in whatever state. Returns whether one was there."""

    async def abort(self, *records: BoundaryRecord) -> bool:
        """Delete records that will not be committed. Returns whether one was there."""
        return await self.release(*records)

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
