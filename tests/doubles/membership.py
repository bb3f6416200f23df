# SPDX-License-Identifier: Apache-2.0
"""A register in memory: members, leases that end when told to, and the switch that takes the whole register away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count

from deltaserve.membership import DrainOrder, Member, Membership, View, member_key


class Register:
    """What several `MembershipDouble`s and `LedgerDouble`s share."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.orders: dict[str, DrainOrder] = {}
        """Who was asked to drain, by worker."""
        self.away = False
        self._leases = count(0x1000)
        self._changed = asyncio.Condition()
        self._joined: dict[str, MembershipDouble] = {}

    async def set_away(self, away: bool) -> None:
        """Take the register away, or bring it back."""
        self.away = away
        await self.notify()

    async def expire(self, worker_id: str, come_back: bool = False) -> None:
        """End a member's lease; `come_back`: it registers again under a new one, as a living worker does."""
        self.members.pop(worker_id, None)
        double = self._joined.get(worker_id)
        if come_back and double is not None:
            await double.register_again()
        await self.notify()

    def new_lease(self) -> int:
        """An id that was never given before."""
        return next(self._leases)

    def require(self) -> None:
        """Raises ConnectionError while the register is away."""
        if self.away:
            raise ConnectionError("register: away")

    async def notify(self) -> None:
        """Wake the watchers."""
        async with self._changed:
            self._changed.notify_all()

    async def changed(self) -> None:
        """Wait for the next `notify`."""
        async with self._changed:
            await self._changed.wait()


class MembershipDouble(Membership):
    """One role's seat in a `Register`."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._member: Member | None = None

    async def join(self, member: Member) -> Member:
        if self._member is not None:
            raise ValueError("member: this membership has joined already; leave first")
        self._register.require()
        member_key(member.worker_id)
        self._member = replace(member, lease=self._register.new_lease())
        self._register.members[member.worker_id] = self._member
        self._register._joined[member.worker_id] = self
        await self._register.notify()
        return self._member

    async def register_again(self) -> None:
        """A new lease, as after an absence of the register."""
        assert self._member is not None
        self._member = replace(self._member, lease=self._register.new_lease())
        self._register.members[self._member.worker_id] = self._member
        if self.on_lease is not None:
            result = self.on_lease(self._member.lease)
            if result is not None:
                await result

    async def update(self, member: Member) -> None:
        self._register.require()
        if self._member is None or self._member.worker_id != member.worker_id:
            raise ValueError(f"worker_id: {member.worker_id!r} has not joined here")
        self._member = replace(member, lease=self._member.lease)
        self._register.members[member.worker_id] = self._member
        await self._register.notify()

    async def drain_order(self) -> DrainOrder:
        assert self._member is not None
        while (order := self._register.orders.get(self._member.worker_id)) is None:
            await self._register.changed()
        return order

    async def drained(self, moved: int) -> None:
        if self._member is not None and self._member.worker_id in self._register.orders:
            self._register.orders[self._member.worker_id] = DrainOrder(done=True, moved=moved)
            await self._register.notify()

    async def leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            self._register._joined.pop(member.worker_id, None)
            self._register.members.pop(member.worker_id, None)
            await self._register.notify()

    async def watch(self) -> AsyncIterator[View]:
        shown: View | None = None
        while True:
            if self._register.away:
                view = View(shown.members if shown else (), connected=False)
            else:
                view = View(tuple(m for _, m in sorted(self._register.members.items())), connected=True)
            if view != shown:
                shown = view
                yield view
            else:
                await self._register.changed()

    async def close(self) -> None:
        await self.leave()
