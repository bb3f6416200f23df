# SPDX-License-Identifier: Apache-2.0
"""The ledger's contract, over the double and over a real etcd; then what only the real one can show."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Etcd, EtcdMembership, EtcdUnavailable
from statestore.boundary import BoundaryInvalid, BoundaryRecord, Epoch, RankEntry
from statestore.etcd_ledger import EtcdLedger
from statestore.ledger import (
    CommitConflict,
    FencedOut,
    RecordExists,
    Sweeper,
)
from tests.support import services
from tests.support.ledger_world import World, member
from tests.support.patience import HUNG
from tests.support.records import MODEL, committed, pending, written


async def commit(world: World, epoch: Epoch, ranks: int = 1, **changes: Any) -> BoundaryRecord:
    await world.ledger.open(pending(epoch, ranks, **changes))
    record = committed(epoch, ranks, **changes)
    await world.ledger.commit([record])
    return record


# ---- open, commit, read


async def test_open_commit_read_release(world: World) -> None:
    epoch = await world.owner()
    record = pending(epoch, ranks=2)
    await world.ledger.open(record)
    assert await world.other.get(record.id) == record
    assert await world.other.get_committed(record.id) is None, "nobody reads what is not committed"
    full = committed(epoch, ranks=2)
    await world.ledger.commit([full])
    assert await world.other.get_committed(record.id) == full
    assert await world.ledger.release(record)
    assert not await world.ledger.release(record)
    assert await world.other.get(record.id) is None


async def test_commit_takes_the_entries_whatever_its_state_says(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    await world.ledger.commit([replace(pending(epoch), ranks=(written(epoch, 0),))])
    assert await world.other.get_committed(pending(epoch).id) == committed(epoch)


async def test_a_rank_that_has_not_written_is_refused_by_name(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch, ranks=2))
    half = replace(pending(epoch, ranks=2), ranks=(written(epoch, 0), RankEntry(1)))
    with pytest.raises(BoundaryInvalid, match=r"ranks\[1\]\.status"):
        await world.ledger.commit([half])
    assert await world.other.get_committed(half.id) is None


async def test_a_null_object_is_refused(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    good = written(epoch, 0)
    null = replace(good, objects=(replace(good.objects[0], null_free=False),))
    with pytest.raises(BoundaryInvalid, match="null_free"):
        await world.ledger.commit([replace(pending(epoch), ranks=(null,))])
    assert await world.other.get_committed(pending(epoch).id) is None


async def test_open_needs_a_pending_record_and_a_new_id(world: World) -> None:
    epoch = await world.owner()
    with pytest.raises(BoundaryInvalid, match="state"):
        await world.ledger.open(committed(epoch))
    with pytest.raises(BoundaryInvalid, match="state"):
        await world.ledger.open(replace(pending(epoch), ranks=(written(epoch, 0),)))
    await world.ledger.open(pending(epoch))
    await world.ledger.open(pending(epoch))  # the answer was lost and the call repeated
    with pytest.raises(RecordExists, match="epoch"):
        await world.ledger.open(pending(epoch, length=33))
    await commit(world, replace(epoch, counter=epoch.counter + 1000))


async def test_a_repeated_commit_is_no_error_and_another_one_is(world: World) -> None:
    record = await commit(world, await world.owner())
    await world.ledger.commit([record])
    await world.other.commit([record])
    with pytest.raises(CommitConflict, match="has been committed"):
        await world.ledger.commit([replace(record, length=record.length + 1)])
    assert await world.other.get_committed(record.id) == record


async def test_commit_from_a_process_that_did_not_open(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    await world.other.commit([committed(epoch)])
    assert await world.ledger.get_committed(pending(epoch).id) == committed(epoch)


async def test_commit_of_what_is_gone_or_of_another_epoch(world: World) -> None:
    epoch = await world.owner()
    with pytest.raises(CommitConflict, match="gone"):
        await world.ledger.commit([committed(epoch)])
    await world.ledger.open(pending(epoch))
    assert await world.ledger.abort(pending(epoch))
    with pytest.raises(CommitConflict, match="gone"):
        await world.ledger.commit([committed(epoch)])
    later = Epoch(epoch.lease, epoch.counter + 500)
    await world.ledger.open(replace(pending(later), id="same"))
    with pytest.raises(CommitConflict, match="another epoch"):
        await world.ledger.commit([replace(committed(epoch), id="same")])


async def test_progress_shows_ranks_and_does_not_make_visible(world: World) -> None:
    epoch = await world.owner()
    record = pending(epoch, ranks=2)
    await world.ledger.open(record)
    half = replace(record, ranks=(written(epoch, 0), RankEntry(1)))
    assert await world.ledger.progress(half)
    assert await world.other.get(record.id) == half
    assert await world.other.get_committed(record.id) is None
    await world.ledger.commit([committed(epoch, ranks=2)])
    assert not await world.ledger.progress(half), "a commit must not be undone by late progress"
    assert await world.other.get_committed(record.id) == committed(epoch, ranks=2)
    with pytest.raises(BoundaryInvalid, match="state"):
        await world.ledger.progress(committed(epoch, ranks=2))


async def test_commit_after_progress_of_another_process(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch, ranks=2))
    assert await world.other.progress(
        replace(pending(epoch, ranks=2), ranks=(written(epoch, 0), RankEntry(1)))
    )
    await world.ledger.commit([committed(epoch, ranks=2)])
    assert await world.other.get_committed(pending(epoch).id) is not None


# ---- the fence


async def test_open_needs_a_membership_under_the_epochs_lease(world: World) -> None:
    epoch = await world.owner()
    with pytest.raises(FencedOut, match="lease"):
        await world.ledger.open(pending(Epoch(epoch.lease + 1, 1)))
    with pytest.raises(FencedOut, match="prefill-9"):
        await world.ledger.open(pending(epoch, owner="prefill-9"))
    assert await world.ledger.list() == []


async def test_commit_of_a_worker_whose_lease_has_ended(world: World) -> None:
    epoch = await world.owner()
    await world.ledger.open(pending(epoch))
    await world.expire("prefill-1")
    with pytest.raises(FencedOut, match="prefill-1"):
        await world.ledger.commit([committed(epoch)])
    assert not await world.ledger.progress(replace(pending(epoch), ranks=(written(epoch, 0),)))
    assert await world.other.get_committed(pending(epoch).id) is None


async def test_commit_under_the_lease_before_the_last(world: World) -> None:
    old = await world.owner()
    await world.ledger.open(pending(old))
    await world.expire("prefill-1")
    new = await world.owner()
    assert new.lease != old.lease
    with pytest.raises(FencedOut):
        await world.ledger.commit([committed(old)])
    assert await world.ledger.lease_of("prefill-1") == new.lease
    assert (await commit(world, new)).epoch == new


# ---- lists


async def test_lists(world: World) -> None:
    one, two = await world.owner("prefill-1"), await world.owner("decode-2")
    first = await commit(world, one, created=10.0)
    await world.ledger.open(pending(two, owner="decode-2", created=20.0))
    third = await commit(world, replace(one, counter=one.counter + 10_000), created=30.0)
    assert [r.id for r in await world.other.list()] == [first.id, pending(two).id, third.id]
    assert await world.other.list_owned("prefill-1") == [first, third]
    assert await world.other.find(MODEL, first.prefix_hash) == [third, first]
    assert await world.other.find(MODEL, "ef" * 16) == []
    assert await world.other.find("cd" * 16, first.prefix_hash) == []


# ---- sweeping


class Removals:
    def __init__(self, fails: set[str] | None = None) -> None:
        self.keys: list[str] = []
        self.fails = fails or set()

    async def __call__(self, record: BoundaryRecord) -> None:
        if record.id in self.fails:
            raise TimeoutError("pool away")
        self.keys += [entry.key for entry in record.objects()]


async def test_sweep_takes_dead_owners_only(world: World) -> None:
    dead, living = await world.owner("prefill-1"), await world.owner("prefill-2")
    gone = await commit(world, dead, ranks=2)
    half = pending(replace(dead, counter=dead.counter + 1000))
    await world.ledger.open(half)
    kept = await commit(world, living, owner="prefill-2")
    await world.expire("prefill-1")
    removals = Removals()
    swept = await world.other.sweep({"prefill-2"}, removals)
    assert {r.id for r in swept} == {gone.id, half.id}
    assert removals.keys == [entry.key for entry in gone.objects()]
    assert await world.other.list() == [kept]
    with pytest.raises((FencedOut, CommitConflict)):
        await world.ledger.commit([committed(half.epoch)])


async def test_sweep_with_a_stale_view_spares_members(world: World) -> None:
    record = await commit(world, await world.owner())
    removals = Removals()
    assert await world.other.sweep(set(), removals) == []
    assert removals.keys == []
    assert await world.other.get_committed(record.id) == record


async def test_sweep_spares_an_owner_that_comes_back_meanwhile(world: World) -> None:
    record = await commit(world, await world.owner())
    await world.expire("prefill-1")

    async def come_back(_: BoundaryRecord) -> None:
        await world.owner("prefill-1")

    assert await world.other.sweep(set(), come_back) == []
    assert await world.other.get_committed(record.id) == record


async def test_what_cannot_be_removed_stays_for_the_next_sweep(world: World) -> None:
    epoch = await world.owner()
    one = await commit(world, epoch)
    two = await commit(world, replace(epoch, counter=epoch.counter + 1000))
    await world.expire("prefill-1")
    assert await world.other.sweep(set(), Removals({one.id})) == [two]
    assert await world.other.list() == [one]
    assert await world.other.sweep(set(), Removals()) == [one]


async def test_the_sweeper_waits_for_its_grace(world: World) -> None:
    record = await commit(world, await world.owner())
    await world.expire("prefill-1")
    removals = Removals()
    sweeper = Sweeper(world.other, removals, grace=0.3)
    assert await sweeper.step(set()) == []
    await asyncio.sleep(0.1)
    assert await sweeper.step(set()) == []
    assert removals.keys == []
    await asyncio.sleep(0.25)
    assert await sweeper.step(set()) == [record]
    with pytest.raises(ValueError, match="grace"):
        Sweeper(world.other, removals, grace=-1)


async def test_the_sweeper_forgets_an_absence_that_ended(world: World) -> None:
    record = await commit(world, await world.owner())
    await world.expire("prefill-1")
    sweeper = Sweeper(world.other, Removals(), grace=0.2)
    await sweeper.step(set())
    await world.owner("prefill-1")
    await asyncio.sleep(0.25)
    assert await sweeper.step(set()) == []
    await world.expire("prefill-1")
    assert await sweeper.step(set()) == [], "the grace starts anew"
    assert await world.other.get_committed(record.id) == record


# ---- etcd only


async def test_a_handoff_takes_two_writes(etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, worker = EtcdLedger(etcd_config), EtcdMembership(etcd_config)
    epoch = Epoch((await worker.join(member("prefill-1"))).lease, 1)
    calls: list[str] = []
    original = Etcd._call

    async def counting(self: Etcd, name: str, make: Any) -> Any:
        calls.append(name)
        return await original(self, name, make)

    monkeypatch.setattr(Etcd, "_call", counting)
    await ledger.open(pending(epoch, ranks=8))
    await ledger.commit([committed(epoch, ranks=8)])
    assert [name for name in calls if name != "keepalive"] == ["txn", "txn"]
    await ledger.close()
    await worker.close()


async def test_a_write_whose_answer_is_lost_is_recognised(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, worker = EtcdLedger(etcd_config), EtcdMembership(etcd_config)
    epoch = Epoch((await worker.join(member("prefill-1"))).lease, 1)
    original = Etcd.txn

    async def twice(self: Etcd, *parts: Any) -> Any:
        await original(self, *parts)
        return await original(self, *parts)

    monkeypatch.setattr(Etcd, "txn", twice)
    await ledger.open(pending(epoch))
    assert await ledger.progress(replace(pending(epoch), ranks=(written(epoch, 0),))) in (True, False)
    await ledger.commit([committed(epoch)])
    assert await ledger.get_committed(pending(epoch).id) == committed(epoch)
    await worker.leave()
    assert [r.id for r in await ledger.sweep(set(), Removals())] == [pending(epoch).id]
    await ledger.close()
    await worker.close()


async def test_racing_commits_have_one_winner(etcd_config: EtcdConfig) -> None:
    worker = EtcdMembership(etcd_config)
    epoch = Epoch((await worker.join(member("prefill-1"))).lease, 1)
    ledgers = [EtcdLedger(etcd_config) for _ in range(6)]
    await ledgers[0].open(pending(epoch))
    versions = [replace(committed(epoch), created=float(number)) for number in range(6)]
    results = await asyncio.gather(
        *(ledger.commit([version]) for ledger, version in zip(ledgers, versions, strict=True)),
        return_exceptions=True,
    )
    winners = [v for v, r in zip(versions, results, strict=True) if r is None]
    assert len(winners) == 1
    assert all(isinstance(r, CommitConflict) for r in results if r is not None)
    assert await ledgers[0].get_committed(pending(epoch).id) == winners[0]
    for one in (*ledgers, worker):
        await one.close()


async def test_a_record_that_cannot_be_read(etcd_config: EtcdConfig) -> None:
    ledger, etcd = EtcdLedger(etcd_config), Etcd(etcd_config)
    await etcd.put(f"{etcd_config.prefix}/boundaries/odd", '{"id": "odd"}')
    assert await ledger.list() == []
    with pytest.raises(BoundaryInvalid):
        await ledger.get("odd")
    await ledger.close()
    await etcd.close()


async def test_etcd_away_is_an_error_within_the_deadline(own_etcd: services.EtcdService) -> None:
    ledger = EtcdLedger(own_etcd.config("/l", timeout=0.5))
    assert await ledger.list() == []
    own_etcd.service.kill()
    began = time.monotonic()
    with pytest.raises(EtcdUnavailable):
        await ledger.get_committed("x")
    assert time.monotonic() - began < HUNG
    own_etcd.service.start()
    assert await ledger.list() == []
    await ledger.close()
