# SPDX-License-Identifier: Apache-2.0
"""A register that is a list: tests change it with `set`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

from deltaserve.membership import DrainOrder, Member, Membership, View


class StaticMembership(Membership):
    """Every watcher sees the members now, and after each `set`."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._view = View(tuple(members), connected=True)
        self._changed = asyncio.Condition()
        self._version = 0

    async def set(self, members: Iterable[Member], connected: bool = True) -> None:
        """Replace the members."""
        async with self._changed:
            self._view = View(tuple(members), connected)
            self._version += 1
            self._changed.notify_all()

    async def join(self, member: Member) -> Member:
        await self.set([*self._view.members, member])
        return member

    async def update(self, member: Member) -> None:
        await self.set([member if m.worker_id == member.worker_id else m for m in self._view.members])

    async def drain_order(self) -> DrainOrder:
        await asyncio.Event().wait()
        raise AssertionError("nobody asks here")

    async def drained(self, moved: int) -> None:
        return

    async def leave(self) -> None:
        return

    async def watch(self) -> AsyncIterator[View]:
        seen = -1
        while True:
            async with self._changed:
                while self._version == seen:
                    await self._changed.wait()
                seen, view = self._version, self._view
            yield view

    async def close(self) -> None:
        return
