# SPDX-License-Identifier: Apache-2.0
"""A ledger in memory with the contract of the real one (tests/unit/statestore/test_ledger.py runs over both)."""

from __future__ import annotations

from statestore.boundary import BoundaryInvalid, BoundaryRecord, prefix_of_ids
from statestore.ledger import CommitConflict, FencedOut, Ledger, RecordExists, Records
from tests.doubles.membership import Register


class LedgerDouble(Ledger):
    """Ledgers over the same `Register` share their records, as processes share an etcd.

    `writes` counts what would be writes to etcd; `commit_fails` lets so many commits fail as a lost connection would.
    """

    def __init__(self, register: Register, records: dict[str, str] | None = None) -> None:
        self._register = register
        self.records: dict[str, str] = {} if records is None else records
        self.writes = 0
        self.commit_fails = 0
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

    async def commit(self, record: BoundaryRecord) -> None:
        self._register.require()
        value = record.committed().to_json()
        if self.commit_fails:
            self.commit_fails -= 1
            raise ConnectionError("register: connection lost")
        self.writes += 1
        if self.records.get(record.id) == value:
            return
        self._check_fence(record)
        there = await self.get(record.id)
        if there is None:
            raise CommitConflict(f"boundary {record.id} is gone: aborted, or swept while it was written")
        if not _pending_of(there, record):
            raise CommitConflict(f"boundary {record.id} has been committed, or is of another epoch")
        self.records[record.id] = value

    async def get(self, boundary: str) -> BoundaryRecord | None:
        self._register.require()
        text = self.records.get(boundary)
        return None if text is None else BoundaryRecord.from_json(text)

    async def release(self, boundary: str) -> bool:
        self._register.require()
        self.writes += 1
        return self.records.pop(boundary, None) is not None

    async def list(self) -> Records:
        self._register.require()
        records = [BoundaryRecord.from_json(text) for text in self.records.values()]
        return sorted(records, key=lambda record: (record.created, record.epoch))

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
