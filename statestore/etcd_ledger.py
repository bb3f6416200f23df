# SPDX-License-Identifier: Apache-2.0
"""The ledger over etcd.

    PREFIX/boundaries/<id>             JSON of a BoundaryRecord, attached to no lease
    PREFIX/members/<role>/<worker id>  the owner's membership, attached to its lease (deltaserve.membership): the fence

Every write is one transaction. Its failure branch reads the record and the fence, so that the reason for a refusal is
the one that held at that moment, and so that a write whose answer was lost is recognised when it is repeated.
"""

from __future__ import annotations

import logging

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Compare, Etcd, KeyValue, Op, TxnResult
from deltaserve.membership import member_key
from statestore.boundary import BoundaryInvalid, BoundaryRecord, Epoch, prefix_of_ids
from statestore.ledger import CommitConflict, FencedOut, Ledger, RecordExists, Records

log = logging.getLogger(__name__)

_COMMIT_ATTEMPTS = 3
"""A commit reads the record's revision where it does not know it; somebody may write in between that often."""


class EtcdLedger(Ledger):
    """See the module's description. Connects on first use."""

    def __init__(self, config: EtcdConfig) -> None:
        self._etcd = Etcd(config)
        self._prefix = config.prefix.rstrip("/")
        self._revisions: dict[str, tuple[Epoch, int]] = {}
        """By id, of the pending records that this object wrote, so that a commit takes one call."""

    async def open(self, record: BoundaryRecord) -> None:
        """See `Ledger.open`."""
        if record.state != "pending" or any(rank.status != "pending" for rank in record.ranks):
            raise BoundaryInvalid("state", record.state, "and every rank's status must be pending to open")
        key, fence, value = self._key(record.id), self._fence(record.owner), record.to_json().encode()
        result = await self._etcd.txn(
            [Compare.absent(key), Compare.lease(fence, record.epoch.lease)],
            [Op.put(key, value)],
            [Op.get(key), Op.get(fence)],
        )
        if result.succeeded:
            self._revisions[record.id] = (record.epoch, result.revision)
            return
        found, member = result.reads
        if found is not None and found.value == value:
            self._revisions[record.id] = (record.epoch, found.mod_revision)
            return
        if found is not None:
            raise RecordExists(f"boundary {record.id} exists already; an epoch must not be used twice")
        raise _fenced(record, member)

    async def progress(self, record: BoundaryRecord) -> bool:
        """See `Ledger.progress`."""
        if record.state != "pending":
            raise BoundaryInvalid("state", record.state, "must be pending; commit is another call")
        result, _ = await self._replace(record, record.to_json().encode())
        return result.succeeded

    async def commit(self, record: BoundaryRecord) -> None:
        """See `Ledger.commit`."""
        value = record.committed().to_json().encode()
        for _ in range(_COMMIT_ATTEMPTS):
            result, known = await self._replace(record, value)
            if result.succeeded:
                self._revisions.pop(record.id, None)
                return
            found, member = result.reads
            if found is not None and found.value == value:
                self._revisions.pop(record.id, None)
                return
            if member is None or member.lease != record.epoch.lease:
                raise _fenced(record, member)
            if found is None:
                raise CommitConflict(f"boundary {record.id} is gone: aborted, or swept while it was written")
            if not _is_pending_of(found, record):
                raise CommitConflict(f"boundary {record.id} has been committed, or is of another epoch")
            if found.mod_revision == known:
                break
            self._revisions[record.id] = (record.epoch, found.mod_revision)
        raise CommitConflict(f"boundary {record.id} changed under every attempt to commit it")

    async def get(self, boundary: str) -> BoundaryRecord | None:
        """See `Ledger.get`. A record that cannot be read is an error here: BoundaryInvalid."""
        found = await self._etcd.get(self._key(boundary))
        return None if found is None else BoundaryRecord.from_json(found.value)

    async def release(self, boundary: str) -> bool:
        """See `Ledger.release`."""
        self._revisions.pop(boundary, None)
        return await self._etcd.delete(self._key(boundary))

    async def list(self) -> Records:
        """See `Ledger.list`. Records that this version cannot read are left out and logged."""
        return sorted(await self._read_all(self._key("")), key=lambda record: (record.created, record.epoch))

    async def find(self, model_digest: str, prefix_hash: str) -> Records:
        """See `Ledger.find`."""
        records = await self._read_all(self._key(prefix_of_ids(model_digest, prefix_hash)))
        committed = [r for r in records if r.state == "committed" and r.model_digest == model_digest]
        return sorted(committed, key=lambda record: (record.created, record.epoch), reverse=True)

    async def lease_of(self, owner: str) -> int:
        """See `Ledger.lease_of`."""
        member = await self._etcd.get(self._fence(owner))
        return 0 if member is None else member.lease

    async def delete_orphan(self, record: BoundaryRecord) -> bool:
        """See `Ledger.delete_orphan`."""
        key = self._key(record.id)
        result = await self._etcd.txn(
            [Compare.value(key, record.to_json()), Compare.absent(self._fence(record.owner))],
            [Op.delete(key)],
            [Op.get(key)],
        )
        # A deletion whose answer was lost finds nothing when it is repeated; it has gone all the same.
        return result.succeeded or result.reads[0] is None

    async def close(self) -> None:
        """See `Ledger.close`."""
        await self._etcd.close()

    # ---- inside

    def _key(self, boundary: str) -> str:
        return f"{self._prefix}/boundaries/{boundary}"

    def _fence(self, owner: str) -> str:
        return f"{self._prefix}/{member_key(owner)}"

    async def _replace(self, record: BoundaryRecord, value: bytes) -> tuple[TxnResult, int]:
        """Replace the pending record by `value` when it is as last seen, and the fence holds.

        Returns the result, and the revision at which the record was compared; the failure branch read record and
        fence.
        """
        key, fence = self._key(record.id), self._fence(record.owner)
        reads = [Op.get(key), Op.get(fence)]
        epoch, known = self._revisions.get(record.id, (record.epoch, 0))
        if not known or epoch != record.epoch:
            known = 0
            found = await self._etcd.get(key)
            if found is not None and _is_pending_of(found, record):
                known = found.mod_revision
        # Revision -1 matches nothing, so the failure branch runs and says what is there.
        compare = [Compare.mod_revision(key, known or -1), Compare.lease(fence, record.epoch.lease)]
        result = await self._etcd.txn(compare, [Op.put(key, value)], reads)
        if result.succeeded:
            self._revisions[record.id] = (record.epoch, result.revision)
        elif result.reads[0] is not None and result.reads[0].value == value:
            self._revisions[record.id] = (record.epoch, result.reads[0].mod_revision)
        return result, known

    async def _read_all(self, prefix: str) -> Records:
        records = []
        for key, found in (await self._etcd.list(prefix)).items.items():
            try:
                records.append(BoundaryRecord.from_json(found.value))
            except BoundaryInvalid as error:
                log.error("record %s is left out: %s", key, error)
        return records


def _is_pending_of(found: KeyValue, record: BoundaryRecord) -> bool:
    try:
        there = BoundaryRecord.from_json(found.value)
    except BoundaryInvalid:
        return False
    return there.state == "pending" and there.epoch == record.epoch and there.owner == record.owner


def _fenced(record: BoundaryRecord, member: KeyValue | None) -> FencedOut:
    now = f"it is a member under lease {member.lease:x}" if member is not None else "it is no member"
    return FencedOut(
        f"boundary {record.id}: {record.owner} published under lease {record.epoch.lease:x}, but {now}; "
        "the state must be published again under a new epoch"
    )
