# SPDX-License-Identifier: Apache-2.0
"""A ledger in memory with the contract of the real one (tests/unit/statestore/test_ledger.py runs over both)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace

from statestore.boundary import BoundaryInvalid, BoundaryRecord, prefix_of_ids
from statestore.checkpoints.chain import check_links
from statestore.ledger import (
    MAX_LINKS,
    CheckpointExists,
    CommitConflict,
    FencedOut,
    Ledger,
    Names,
    ParentGone,
    RecordExists,
    Records,
)
from tests.doubles.membership import Register


class LedgerDouble(Ledger):
    """Ledgers over the same `Register` share their records, as processes share an etcd.

    `writes` counts what would be writes to etcd; `commit_fails` lets so many commits fail as a lost connection would.
    `before_commit` is awaited before a commit is looked at, and gives what is committed in place of the records.
    `silent`: nobody is told of a commit by `wait_committed`.
    """

    def __init__(self, register: Register, records: dict[str, str] | None = None) -> None:
        self._register = register
        self.records: dict[str, str] = {} if records is None else records
        self.writes = 0
        self.commit_fails = 0
        self.before_commit: (
            Callable[[Sequence[BoundaryRecord]], Awaitable[Sequence[BoundaryRecord]]] | None
        ) = None
        self.silent = False
        self.closed = False

    async def open(self, record: BoundaryRecord) -> None:
        self._register.require()
        if record.state != "pending" or any(rank.status != "pending" for rank in record.ranks):
            raise BoundaryInvalid("state", record.state, "and every rank's status must be pending to open")
        self.writes += 1
        there = self.records.get(record.id)
        if there == record.to_json():
            return
        if there is not None:
            raise RecordExists(f"boundary {record.id} exists already; an epoch must not be used twice")
        self._check_fence(record)
        self._check_parent(record)
        self.records[record.id] = record.to_json()

    async def progress(self, record: BoundaryRecord) -> bool:
        self._register.require()
        if record.state != "pending":
            raise BoundaryInvalid("state", record.state, "must be pending; commit is another call")
        there = await self.get(record.id)
        if not _pending_of(there, record) or await self.lease_of(record.owner) != record.epoch.lease:
            return False
        self.writes += 1
        self.records[record.id] = record.to_json()
        return True

    async def commit(self, records: Sequence[BoundaryRecord], opened: str = "", beside: bool = False) -> None:
        if self.before_commit is not None:
            records = await self.before_commit(records)
        self._register.require()
        links = [record.committed() for record in records]
        if not 1 <= len(links) <= MAX_LINKS:
            raise BoundaryInvalid("records", len(links), f"must be 1 to {MAX_LINKS} links")
        check_links(links)
        last = links[-1]
        opened = opened or last.id
        if self.commit_fails:
            self.commit_fails -= 1
            raise ConnectionError("register: connection lost")
        self.writes += 1
        if self.records.get(last.id) == last.to_json():
            return
        self._check_fence(last)
        there = await self.get(opened)
        if there is None:
            raise CommitConflict(f"boundary {opened} is gone: aborted, or swept while it was written")
        if not _pending_of(there, last):
            raise CommitConflict(f"boundary {opened} has been committed, or is of another epoch")
        self._check_parent(links[0])
        prefixes = {prefix_of_ids(link.model_digest, link.prefix_hash) for link in links if link.reusable}
        others = [r for r in self._checkpoints().values() if r.id.startswith(tuple(prefixes))]
        if others and not beside:
            raise CheckpointExists(others)
        del self.records[opened]
        self.records.update({link.id: link.to_json() for link in links})

    async def get(self, boundary: str) -> BoundaryRecord | None:
        self._register.require()
        text = self.records.get(boundary)
        return None if text is None else BoundaryRecord.from_json(text)

    async def wait_committed(self, boundary: str) -> BoundaryRecord | None:
        while True:
            self._register.require()
            text = self.records.get(boundary)
            record = None if text is None else BoundaryRecord.from_json(text)
            if not self.silent and (record is None or record.state != "pending"):
                return record
            await asyncio.sleep(0.001)

    async def get_checkpoints(self, boundaries: Sequence[str]) -> dict[str, BoundaryRecord]:
        self._register.require()
        return {name: record for name, record in self._checkpoints().items() if name in boundaries}

    async def watch_checkpoints(self) -> AsyncGenerator[dict[str, BoundaryRecord], None]:
        shown: dict[str, BoundaryRecord] | None = None
        while True:
            now = shown if self._register.away else self._checkpoints()
            if now is not None and now != shown:
                shown = now
                yield dict(now)
            await asyncio.sleep(0.002)

    async def begin_eviction(self, record: BoundaryRecord, bad: bool = False) -> BoundaryRecord | None:
        self._register.require()
        self.writes += 1
        evicting = replace(record, state="evicting")
        there = self.records.get(record.id)
        if there == evicting.to_json():
            return evicting
        if there != record.to_json() or record.state != "committed" or not record.reusable:
            return None
        if not bad and record.id in await self.pins():
            return None
        self.records[record.id] = evicting.to_json()
        return evicting

    async def pins(self) -> dict[str, Names]:
        self._register.require()
        pins: dict[str, Names] = {}
        for record in map(BoundaryRecord.from_json, self.records.values()):
            if record.parents and record.state != "evicting":
                pins.setdefault(record.parents[-1], []).append(record.id)
        return pins

    async def release(self, *records: BoundaryRecord) -> bool:
        self._register.require()
        self.writes += 1
        gone = [self.records.pop(record.id, None) for record in records]
        return any(record is not None for record in gone)

    async def list(self) -> Records:
        self._register.require()
        records = [BoundaryRecord.from_json(text) for text in self.records.values()]
        return sorted(records, key=lambda record: (record.created, record.epoch, record.link))

    async def find(self, model_digest: str, prefix_hash: str) -> Records:
        start = prefix_of_ids(model_digest, prefix_hash)
        return [
            record
            for record in reversed(await self.list())
            if record.id.startswith(start)
            and record.state == "committed"
            and record.model_digest == model_digest
        ]

    async def lease_of(self, owner: str) -> int:
        self._register.require()
        member = self._register.members.get(owner)
        return member.lease if member is not None else 0

    async def delete_orphan(self, record: BoundaryRecord) -> bool:
        if await self.lease_of(record.owner):
            return False
        if record.id in self.records and self.records[record.id] != record.to_json():
            return False
        self.records.pop(record.id, None)
        return True

    async def close(self) -> None:
        self.closed = True

    def _checkpoints(self) -> dict[str, BoundaryRecord]:
        records = [BoundaryRecord.from_json(text) for text in self.records.values()]
        return {r.id: r for r in records if r.reusable and r.state == "committed"}

    def _check_parent(self, record: BoundaryRecord) -> None:
        if record.parents and record.parents[-1] not in self._checkpoints():
            raise ParentGone(
                f"boundary {record.id} rests on {record.parents[-1]}, which is no checkpoint any more"
            )

    def _check_fence(self, record: BoundaryRecord) -> None:
        member = self._register.members.get(record.owner)
        if member is None or member.lease != record.epoch.lease:
            raise FencedOut(
                f"boundary {record.id}: {record.owner} is no member under lease {record.epoch.lease:x}"
            )


def _pending_of(there: BoundaryRecord | None, record: BoundaryRecord) -> bool:
    return (
        there is not None
        and there.state == "pending"
        and there.epoch == record.epoch
        and there.owner == record.owner
    )
