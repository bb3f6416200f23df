# SPDX-License-Identifier: Apache-2.0
"""The ledger over etcd.

    PREFIX/boundaries/<id>             JSON of a BoundaryRecord: pending, evicting, or a request's own; under no lease
    PREFIX/checkpoints/<id>            JSON of a committed checkpoint: what every worker's index watches
    PREFIX/children/<parent>/<id>      the child entry of a pending or committed record that rests on <parent>, its last
                                       parent
    PREFIX/members/<role>/<worker id>  the owner's membership, attached to its lease (deltaserve.membership): the fence

A checkpoint's id begins with its model and prefix, so that a transaction can compare that there is none of the same
prefix, and that a parent is still a committed one is the existence of its key.

Every write is one transaction. Its failure branch reads what was compared, so that the reason for a refusal is the one
that held at that moment, and so that a write whose answer was lost is recognised when it is repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, replace

import grpc

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Compare, Etcd, KeyValue, Op, TxnResult, watch
from deltaserve.membership import member_key
from statestore.boundary import BoundaryInvalid, BoundaryRecord, Epoch, prefix_of_ids
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

log = logging.getLogger(__name__)

_COMMIT_ATTEMPTS = 3
"""A commit reads the record's revision where it does not know it; somebody may write in between that often."""
_READS = 100
"""Keys read in one call; etcd takes 128 operations a transaction."""
_DELETIONS = 40
"""Records deleted in one transaction, three keys each."""
RELIST = 30.0
"""Seconds between listings of the checkpoints, which find what a silent stream did not tell."""


@dataclass(frozen=True)
class _Pending:
    """A pending record as it was last seen."""

    epoch: Epoch
    revision: int
    parents: tuple[str, ...]


class EtcdLedger(Ledger):
    """See the module's description. Connects on first use."""

    def __init__(self, config: EtcdConfig) -> None:
        self._etcd = Etcd(config)
        self._prefix = config.prefix.rstrip("/")
        self._known: dict[str, _Pending] = {}
        """By id, the pending records that this object wrote, so that a commit takes one call."""
        self._read: dict[str, tuple[int, BoundaryRecord | None]] = {}
        """By key, what the last listing has read, with its revision: most records are the same in the next one."""

    async def open(self, record: BoundaryRecord) -> None:
        """See `Ledger.open`."""
        if record.state != "pending" or any(rank.status != "pending" for rank in record.ranks):
            raise BoundaryInvalid("state", record.state, "and every rank's status must be pending to open")
        key, fence, value = self._key(record.id), self._fence(record.owner), record.to_json().encode()
        compare = [Compare.absent(key), Compare.lease(fence, record.epoch.lease)]
        then = [Op.put(key, value)]
        reads = [Op.get(key), Op.get(fence)]
        if record.parents:
            parent = self._checkpoint(record.parents[-1])
            compare.append(Compare.exists(parent))
            then.append(Op.put(self._child(record.id, record.parents), record.owner))
            reads.append(Op.get(parent))
        result = await self._etcd.txn(compare, then, reads)
        if result.succeeded:
            self._know(record, result.revision)
            return
        found, member = result.reads[:2]
        if found is not None and found.value == value:
            self._know(record, found.mod_revision)
            return
        if found is not None:
            raise RecordExists(f"boundary {record.id} exists already; an epoch must not be used twice")
        if member is None or member.lease != record.epoch.lease:
            raise _fenced(record, member)
        raise _parent_gone(record)

    async def progress(self, record: BoundaryRecord) -> bool:
        """See `Ledger.progress`."""
        if record.state != "pending":
            raise BoundaryInvalid("state", record.state, "must be pending; commit is another call")
        key, fence, value = self._key(record.id), self._fence(record.owner), record.to_json().encode()
        known = await self._last_seen(record, record.id)
        result = await self._etcd.txn(
            [Compare.mod_revision(key, known.revision), Compare.lease(fence, record.epoch.lease)],
            [Op.put(key, value)],
            [Op.get(key), Op.get(fence)],
        )
        if result.succeeded:
            self._know(record, result.revision)
        elif (found := result.reads[0]) is not None and found.value == value:
            self._know(record, found.mod_revision)
        return result.succeeded

    async def commit(self, records: Sequence[BoundaryRecord], opened: str = "", beside: bool = False) -> None:
        """See `Ledger.commit`."""
        links = [record.committed() for record in records]
        if not 1 <= len(links) <= MAX_LINKS:
            raise BoundaryInvalid("records", len(links), f"must be 1 to {MAX_LINKS} links")
        check_links(links)
        last = links[-1]
        opened = opened or last.id
        for _ in range(_COMMIT_ATTEMPTS):
            known = await self._last_seen(last, opened)
            result = await self._commit_once(links, opened, known, beside)
            if result.succeeded or _is_value(result.reads[0], last):
                self._known.pop(opened, None)
                return
            _, found, member, parent = result.reads[:4]
            if member is None or member.lease != last.epoch.lease:
                raise _fenced(last, member)
            if found is None:
                raise CommitConflict(f"boundary {opened} is gone: aborted, or swept while it was written")
            pending = _pending_of(found, last)
            if pending is None:
                raise CommitConflict(f"boundary {opened} has been committed, or is of another epoch")
            if links[0].parents and parent is None:
                raise _parent_gone(links[0])
            if not beside and (others := self._parse(kv for kvs in result.ranges[4:] for kv in kvs)):
                raise CheckpointExists(others)
            if found.mod_revision == known.revision:
                break
            self._know(pending, found.mod_revision)
        raise CommitConflict(f"boundary {opened} changed under every attempt to commit it")

    async def _commit_once(self, links: Records, opened: str, known: _Pending, beside: bool) -> TxnResult:
        """The failure branch reads: last link, opened record, fence, parent, and the checkpoints of equal prefixes."""
        last = links[-1]
        key, fence = self._key(opened), self._fence(last.owner)
        parent = self._checkpoint(links[0].parents[-1]) if links[0].parents else ""
        compare = [Compare.mod_revision(key, known.revision), Compare.lease(fence, last.epoch.lease)]
        reads = [Op.get(self._key_of(last)), Op.get(key), Op.get(fence), Op.get(parent or key)]
        if parent:
            compare.append(Compare.exists(parent))
        for link in links:
            if link.reusable and not beside:
                same = self._checkpoint(prefix_of_ids(link.model_digest, link.prefix_hash))
                compare.append(Compare.none_under(same))
                reads.append(Op.get_prefix(same))
        puts = {self._key_of(link): link.to_json() for link in links}
        puts |= {self._child(link.id, link.parents): link.owner for link in links if link.parents}
        deletes = {key} | ({self._child(opened, known.parents)} if known.parents else set())
        then = [Op.put(name, value) for name, value in puts.items()]
        then += [Op.delete(name) for name in deletes - puts.keys()]
        return await self._etcd.txn(compare, then, reads)

    async def get(self, boundary: str) -> BoundaryRecord | None:
        """See `Ledger.get`. A record that cannot be read is an error here: BoundaryInvalid."""
        result = await self._etcd.txn([], [Op.get(self._key(boundary)), Op.get(self._checkpoint(boundary))])
        found = next((kv for kv in result.reads if kv is not None), None)
        return None if found is None else BoundaryRecord.from_json(found.value)

    async def wait_committed(self, boundary: str) -> BoundaryRecord | None:
        """See `Ledger.wait_committed`. A watch from now on, and when it stands a read of what was there before.

        The other way round etcd may have to look into the past for the watch, which it does ten times a second only.
        """
        key = self._key(boundary)
        try:
            async with contextlib.aclosing(self._etcd.raw_watch(key, 0)) as responses:
                async for response in responses:
                    if response.canceled or response.compact_revision:
                        break
                    texts: list[bytes | None] = []
                    if response.created:
                        result = await self._etcd.txn([], [Op.get(key)])
                        texts.append(None if result.reads[0] is None else result.reads[0].value)
                    for event in response.events:
                        if event.kv.key.decode() == key:  # a prefix is watched, and ids may begin with others
                            texts.append(None if event.type == event.DELETE else event.kv.value)
                    for text in texts:
                        record = None if text is None else BoundaryRecord.from_json(text)
                        if record is None or record.state != "pending":
                            return record if record is not None and record.state == "committed" else None
        except grpc.RpcError as error:
            raise ConnectionError(f"boundary {boundary}: the watch of its record broke: {error}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # gRPC says so too of a call whose channel has been closed.
            raise ConnectionError(f"boundary {boundary}: the connection to etcd was closed") from error
        raise ConnectionError(f"boundary {boundary}: the watch of its record has ended")

    async def get_checkpoints(self, boundaries: Sequence[str]) -> dict[str, BoundaryRecord]:
        """See `Ledger.get_checkpoints`."""
        found: Records = []
        for start in range(0, len(boundaries), _READS):
            keys = [self._checkpoint(name) for name in boundaries[start : start + _READS]]
            result = await self._etcd.txn([], [Op.get(key) for key in keys])
            found += self._parse(kv for kv in result.reads if kv is not None)
        return {record.id: record for record in found}

    async def watch_checkpoints(self) -> AsyncGenerator[dict[str, BoundaryRecord], None]:
        """See `Ledger.watch_checkpoints`."""
        known: dict[str, tuple[int, BoundaryRecord | None]] = {}
        states = watch(self._etcd, self._checkpoint(""), relist=RELIST)
        async with contextlib.aclosing(states):
            async for state in states:
                known = {key: self._reading(kv, known) for key, kv in state.items.items()}
                yield {record.id: record for _, record in known.values() if record is not None}

    async def begin_eviction(self, record: BoundaryRecord, bad: bool = False) -> BoundaryRecord | None:
        """See `Ledger.begin_eviction`."""
        evicting = replace(record, state="evicting")
        key = self._key(record.id)
        compare = [Compare.value(self._checkpoint(record.id), record.to_json())]
        if not bad:
            compare.append(Compare.none_under(self._children(record.id)))
        then = [Op.delete(self._checkpoint(record.id)), Op.put(key, evicting.to_json())]
        if record.parents:
            then.append(Op.delete(self._child(record.id, record.parents)))
        result = await self._etcd.txn(compare, then, [Op.get(key)])
        return evicting if result.succeeded or _is_value(result.reads[0], evicting) else None

    async def pins(self) -> dict[str, Names]:
        """See `Ledger.pins`."""
        pins: dict[str, Names] = {}
        start = f"{self._prefix}/children/"
        for key in (await self._etcd.list(start)).items:
            parent, _, child = key.removeprefix(start).partition("/")
            pins.setdefault(parent, []).append(child)
        return pins

    async def release(self, *records: BoundaryRecord) -> bool:
        """See `Ledger.release`."""
        deleted = 0
        for start in range(0, len(records), _DELETIONS):
            keys = {key for record in records[start : start + _DELETIONS] for key in self._keys(record)}
            deleted += (await self._etcd.txn([], [Op.delete(key) for key in sorted(keys)])).deleted
        for record in records:
            self._known.pop(record.id, None)
        return deleted > 0

    async def list(self) -> Records:
        """See `Ledger.list`. Records that this version cannot read are left out and logged."""
        # One transaction: between two calls a record could move from one place to the other.
        result = await self._etcd.txn([], [Op.get_prefix(self._key("")), Op.get_prefix(self._checkpoint(""))])
        self._read = {kv.key: self._reading(kv, self._read) for kvs in result.ranges for kv in kvs}
        records = [record for _, record in self._read.values() if record is not None]
        return sorted(records, key=lambda record: (record.created, record.epoch, record.link))

    async def find(self, model_digest: str, prefix_hash: str) -> Records:
        """See `Ledger.find`."""
        start = prefix_of_ids(model_digest, prefix_hash)
        result = await self._etcd.txn(
            [], [Op.get_prefix(self._key(start)), Op.get_prefix(self._checkpoint(start))]
        )
        records = self._parse(kv for kvs in result.ranges for kv in kvs)
        committed = [r for r in records if r.state == "committed" and r.model_digest == model_digest]
        return sorted(committed, key=lambda record: (record.created, record.epoch), reverse=True)

    async def lease_of(self, owner: str) -> int:
        """See `Ledger.lease_of`."""
        member = await self._etcd.get(self._fence(owner))
        return 0 if member is None else member.lease

    async def delete_orphan(self, record: BoundaryRecord) -> bool:
        """See `Ledger.delete_orphan`."""
        key = self._key_of(record)
        deletes = [key] + ([self._child(record.id, record.parents)] if record.parents else [])
        result = await self._etcd.txn(
            [Compare.value(key, record.to_json()), Compare.absent(self._fence(record.owner))],
            [Op.delete(name) for name in deletes],
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

    def _checkpoint(self, boundary: str) -> str:
        return f"{self._prefix}/checkpoints/{boundary}"

    def _key_of(self, record: BoundaryRecord) -> str:
        visible = record.reusable and record.state == "committed"
        return self._checkpoint(record.id) if visible else self._key(record.id)

    def _children(self, parent: str) -> str:
        return f"{self._prefix}/children/{parent}/"

    def _child(self, boundary: str, parents: Sequence[str]) -> str:
        return self._children(parents[-1]) + boundary

    def _keys(self, record: BoundaryRecord) -> Names:
        """Every key that a record may have, in whatever state."""
        own = [self._key(record.id), self._checkpoint(record.id)]
        return own + ([self._child(record.id, record.parents)] if record.parents else [])

    def _fence(self, owner: str) -> str:
        return f"{self._prefix}/{member_key(owner)}"

    def _know(self, record: BoundaryRecord, revision: int) -> None:
        self._known[record.id] = _Pending(record.epoch, revision, record.parents)

    async def _last_seen(self, record: BoundaryRecord, opened: str) -> _Pending:
        """The pending record of this epoch; revision -1, which matches nothing: it is not there."""
        known = self._known.get(opened)
        if known is not None and known.epoch == record.epoch:
            return known
        found = await self._etcd.get(self._key(opened))
        pending = None if found is None else _pending_of(found, record)
        if found is None or pending is None:
            return _Pending(record.epoch, -1, ())
        return _Pending(record.epoch, found.mod_revision, pending.parents)

    def _reading(
        self, kv: KeyValue, known: dict[str, tuple[int, BoundaryRecord | None]]
    ) -> tuple[int, BoundaryRecord | None]:
        """The key's revision and record, from what is known when it has not changed; None: it cannot be read."""
        before = known.get(kv.key)
        if before is not None and before[0] == kv.mod_revision:
            return before
        records = self._parse([kv])
        return kv.mod_revision, records[0] if records else None

    def _parse(self, found: Iterable[KeyValue]) -> Records:
        records = []
        for kv in found:
            try:
                records.append(BoundaryRecord.from_json(kv.value))
            except BoundaryInvalid as error:
                log.error("record %s is left out: %s", kv.key, error)
        return records


def _is_value(found: KeyValue | None, record: BoundaryRecord) -> bool:
    return found is not None and found.value == record.to_json().encode()


def _parent_gone(record: BoundaryRecord) -> ParentGone:
    return ParentGone(f"boundary {record.id} rests on {record.parents[-1]}, which is no checkpoint any more")


def _pending_of(found: KeyValue, record: BoundaryRecord) -> BoundaryRecord | None:
    """What was found, if it is a pending record of the same epoch and owner."""
    try:
        there = BoundaryRecord.from_json(found.value)
    except BoundaryInvalid:
        return None
    same = there.state == "pending" and there.epoch == record.epoch and there.owner == record.owner
    return there if same else None


def _fenced(record: BoundaryRecord, member: KeyValue | None) -> FencedOut:
    now = f"it is a member under lease {member.lease:x}" if member is not None else "it is no member"
    return FencedOut(
        f"boundary {record.id}: {record.owner} published under lease {record.epoch.lease:x}, but {now}; "
        "the state must be published again under a new epoch"
    )
