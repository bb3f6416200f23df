# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a drain: what is waited for, what ends the waiting, and what is said to whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deltaserve.engine import drain
from deltaserve.membership import Member
from statestore.boundary import BoundaryRecord, Epoch, RankEntry
from statestore.unread import Unread
from tests.doubles.ledger import LedgerDouble
from tests.doubles.membership import MembershipDouble, Register
from tests.support.chains import link_record

MEMBER = Member("decode-1", "decode", "127.0.0.1:1", "digest", "geometry", 0)


class Holding:
    """A worker's service that holds what a test says."""

    def __init__(self, held: int = 0, routers: int = 1, unread: int = 0) -> None:
        self.held, self.routers, self.left = held, routers, unread
        self.looks = 0

    async def unread(self) -> int:
        self.looks += 1
        return self.left


class Rig:
    """A joined member whose drain runs in a task."""

    def __init__(self, register: Register, membership: MembershipDouble, member: Member) -> None:
        self.register, self.membership, self.member = register, membership, member
        self.hurry = asyncio.Event()

    def drain(self, holding: Holding, seconds: float = 60.0) -> asyncio.Task[int]:
        return asyncio.create_task(
            drain.finish(self.membership, self.member, holding, holding.unread, seconds, self.hurry)
        )


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(drain, "LOOK_SECONDS", 0.005)
    monkeypatch.setattr(drain, "SETTLE_SECONDS", 0.02)
    monkeypatch.setattr(drain, "MEMORY_LOOK_SECONDS", 0.005)
    register = Register()
    membership = MembershipDouble(register)
    return Rig(register, membership, await membership.join(MEMBER))


async def still_running(task: asyncio.Task[int]) -> bool:
    """Whether a drain waits on, well after it would have found everything idle."""
    await asyncio.sleep(0.15)
    return not task.done()


async def test_routers_are_told_before_anything_is_waited_for(rig: Rig) -> None:
    holding = Holding(held=1)
    task = rig.drain(holding)
    assert await still_running(task)
    assert rig.register.members["decode-1"].draining
    assert holding.looks == 0, "the ledger is not asked while requests run"
    holding.held = 0
    assert await asyncio.wait_for(task, 30) == 0


async def test_a_boundary_in_its_memory_is_waited_for(rig: Rig) -> None:
    holding = Holding(unread=2)
    task = rig.drain(holding)
    assert await still_running(task)
    holding.left = 0
    assert await asyncio.wait_for(task, 30) == 0
    assert holding.looks > 1


@pytest.mark.parametrize("how", ["time", "signal"])
async def test_what_is_left_when_the_time_is_up(rig: Rig, how: str) -> None:
    task = rig.drain(Holding(held=3), seconds=0.05 if how == "time" else 60)
    if how == "signal":
        assert await still_running(task)
        rig.hurry.set()
    assert await asyncio.wait_for(task, 30) == 3


@pytest.mark.parametrize("what", [{"held": 2}, {"unread": 2}, {}])
async def test_no_seconds_move_everything_at_once(rig: Rig, what: dict[str, int]) -> None:
    patient = rig.drain(Holding(**what))
    assert await still_running(patient) == bool(what), "the control: with time, what is held is waited for"
    patient.cancel()
    assert await asyncio.wait_for(rig.drain(Holding(**what), seconds=0), 30) == sum(what.values())


async def test_a_ledger_that_is_away_does_not_keep_a_worker_whose_time_is_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain, "LAST_LOOK_SECONDS", 0.01)

    class Silent(Holding):
        async def unread(self) -> int:
            await asyncio.Event().wait()
            raise AssertionError

    assert await asyncio.wait_for(rig.drain(Silent(), seconds=0), 30) == 0


async def test_without_routers_nobody_can_send_anything(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "SETTLE_SECONDS", 3600)
    assert await asyncio.wait_for(rig.drain(Holding(routers=0)), 30) == 0
    alone = rig.drain(Holding(routers=0, unread=1))
    among = rig.drain(Holding(routers=1))  # the control: one that is there may still send something
    assert await still_running(among)
    assert not alone.done(), "a boundary in its memory may be found by a router that comes back"
    rig.hurry.set()
    assert await asyncio.wait_for(asyncio.gather(alone, among), 30) == [1, 0]


async def test_a_register_or_a_ledger_that_is_away_holds_nobody(rig: Rig) -> None:
    await rig.register.set_away(True)

    class Away(Holding):
        async def unread(self) -> int:
            raise ConnectionError("away")

    assert await asyncio.wait_for(rig.drain(Away()), 30) == 0
    assert await still_running(rig.drain(Holding(unread=1))), "the control: a ledger that answers is believed"
    assert await still_running(rig.drain(Away(held=1))), "what it holds itself it knows without anybody"


# ---- what lies in a worker's memory


def committed(number: int, segment: str, reusable: bool = False) -> BoundaryRecord:
    """A committed record whose objects lie in one segment."""
    record = link_record(Epoch(7, number), 0, 0, 100, reusable=reusable, story=number)
    ranks = [
        replace(rank, objects=tuple(replace(entry, segment=segment) for entry in rank.objects))
        for rank in record.ranks
    ]
    return replace(record, ranks=tuple(ranks))


def pending(number: int) -> BoundaryRecord:
    """A record whose publish is under way."""
    record = link_record(Epoch(7, number), 0, 0, 100, reusable=False, story=number)
    return replace(record, state="pending", ranks=(RankEntry(0),))


async def test_only_requests_boundaries_in_its_own_memory_count() -> None:
    ledger = LedgerDouble(Register())
    for record in (
        committed(1, "here:1"),
        committed(2, "there:1"),
        committed(3, "here:1", reusable=True),
        committed(4, "name@here:2"),
        committed(5, "@here:2"),
        committed(6, "here:2@there:2"),
    ):
        ledger.records[record.id] = record.to_json()
    assert await Unread(ledger).count(["here:1", "name@here:2"]) == 3
    assert await Unread(ledger).count(["nowhere"]) == 0


async def test_a_publish_that_was_under_way_counts_until_it_is_known_where_it_lies() -> None:
    ledger = LedgerDouble(Register())
    first = pending(1)
    ledger.records[first.id] = first.to_json()
    unread = Unread(ledger)
    assert await unread.count(["here"]) == 1
    later = pending(2)
    ledger.records[later.id] = later.to_json()
    assert await unread.count(["here"]) == 1, "routers knew by then: it cannot be for this worker"
    ledger.records[first.id] = replace(committed(1, "there"), id=first.id).to_json()
    assert await unread.count(["here"]) == 0
