# SPDX-License-Identifier: Apache-2.0
"""Membership over etcd, and the names of the adapter that the other packages use.

Life of a member: grant a lease, put the record under it, renew the lease every third of its time to live. A renewal
that etcd answers with "unknown" means that the lease has ended and the record with it: the member gets a new lease,
is put again, and `on_lease` hears of it, because epochs and fences carry the lease. While etcd does not answer, the
renewals go on with jitter, so that a cluster of workers does not fall upon an etcd that has just come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from deltaserve.config import EtcdConfig
from deltaserve.etcd_channel import EtcdUnavailable
from deltaserve.etcd_client import (
    Compare,
    Etcd,
    EtcdDenied,
    EtcdLeaseGone,
    EtcdVersionRefused,
    KeyValue,
    Listing,
    Op,
    TxnResult,
    check_version,
)
from deltaserve.etcd_watch import Watched, watch
from deltaserve.membership import DrainOrder, Member, Membership, View, drain_key, member_key

__all__ = [
    "Compare",
    "Etcd",
    "EtcdDenied",
    "EtcdLeaseGone",
    "EtcdMembership",
    "EtcdUnavailable",
    "EtcdVersionRefused",
    "KeyValue",
    "Listing",
    "Op",
    "TxnResult",
    "Watched",
    "check_version",
    "watch",
]

log = logging.getLogger(__name__)

_PAUSE_MAX = 2.0
"""Seconds between renewals while etcd is away; they start at a fifth of a second and double."""


class EtcdMembership(Membership):
    """`Membership` over etcd. Belongs to one event loop."""

    def __init__(
        self, config: EtcdConfig, on_lease: Callable[[int], Awaitable[None] | None] | None = None
    ) -> None:
        self._etcd = Etcd(config)
        self._ttl = config.lease_ttl
        self._prefix = config.prefix.rstrip("/")
        self.on_lease = on_lease
        self._member: Member | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._renewed = 0.0
        self._unwritten = False
        self._order: KeyValue | None = None

    async def join(self, member: Member) -> Member:
        """See `Membership.join`. Also refuses a server whose version loses data (EtcdVersionRefused)."""
        if self._keeper is not None:
            raise ValueError("member: this membership has joined already; leave first")
        check_version(await self._etcd.server_version())
        joined = await self._register(member)
        self._keeper = asyncio.create_task(self._keep(), name=f"lease of {member.worker_id}")
        return joined

    @property
    def lease(self) -> int:
        """The lease of the joined member; 0: not joined, or not renewed for so long that it must have ended."""
        if self._member is None:
            return 0
        overdue = asyncio.get_running_loop().time() - self._renewed > self._ttl
        return 0 if overdue else self._member.lease

    async def update(self, member: Member) -> None:
        """See `Membership.update`. Raises ConnectionError; the record is then replaced with the next renewal."""
        async with self._writing:
            if self._member is None or self._member.worker_id != member.worker_id:
                raise ValueError(f"worker_id: {member.worker_id!r} has not joined here")
            self._member = replace(member, lease=self._member.lease)
            self._unwritten = True
            await self._put(self._member)

    async def drain_order(self) -> DrainOrder:
        """See `Membership.drain_order`."""
        if self._member is None:
            raise ValueError("member: it has not joined, so nobody can ask it to drain")
        key = f"{self._prefix}/{drain_key(self._member.worker_id)}"
        async with contextlib.aclosing(watch(self._etcd, key)) as states:
            async for state in states:
                if (kv := state.items.get(key)) is None:
                    continue
                try:
                    order = DrainOrder.from_json(kv.value)
                except ValueError as error:
                    log.error("%s: %s", key, error)
                    continue
                self._order = kv
                return order
        raise EtcdUnavailable("the watch of drain orders has ended")

    async def drained(self, moved: int) -> None:
        """See `Membership.drained`."""
        if self._order is None:
            return
        try:
            await self._etcd.put(
                self._order.key, DrainOrder(done=True, moved=moved).to_json(), lease=self._order.lease
            )
        except EtcdUnavailable as error:
            log.warning("whoever asked for the drain is not told of its end: %s", error)

    async def leave(self) -> None:
        """See `Membership.leave`."""
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None
        member, self._member = self._member, None
        if member is not None:
            try:
                await self._etcd.revoke(member.lease)
            except EtcdUnavailable as error:
                log.warning("the record of %s stays until its lease ends: %s", member.worker_id, error)

    async def watch(self) -> AsyncIterator[View]:
        """See `Membership.watch`."""
        seen: set[str] = set()
        # Every living worker renews, and so registers again, within a third of the time to live.
        states = watch(self._etcd, f"{self._prefix}/members/", hold=self._ttl)
        async with contextlib.aclosing(states):
            async for state in states:
                members = []
                for key, kv in sorted(state.items.items()):
                    try:
                        # The record is written under its lease, so etcd's own word for it is the better one.
                        members.append(replace(Member.from_json(kv.value), lease=kv.lease))
                    except ValueError as error:
                        if key not in seen:
                            log.error("member %s is left out: %s", key, error)
                        seen.add(key)
                yield View(tuple(members), state.connected)

    async def close(self) -> None:
        """See `Membership.close`; leaves first when that has not been done."""
        await self.leave()
        with contextlib.suppress(Exception):
            await self._etcd.close()

    # ---- inside

    async def _register(self, member: Member) -> Member:
        async with self._writing:
            joined = replace(member, lease=await self._etcd.grant(self._ttl))
            await self._put(joined)
            self._member = joined
            self._renewed = asyncio.get_running_loop().time()
            return joined

    async def _put(self, member: Member) -> None:
        key = f"{self._prefix}/{member_key(member.worker_id)}"
        await self._etcd.put(key, member.to_json(), lease=member.lease)
        self._unwritten = False

    async def _keep(self) -> None:
        pause = self._ttl / 3
        away = False
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            member = self._member
            if member is None:
                return
            began = asyncio.get_running_loop().time()
            try:
                if await self._etcd.keepalive(member.lease):
                    self._renewed = began
                    if away or self._unwritten:
                        await self._put_again()
                else:
                    await self._register_again(member)
            except EtcdLeaseGone:
                pause = 0.0
                continue
            except EtcdUnavailable as error:
                if not away:
                    log.warning("the lease of %s cannot be renewed: %s", member.worker_id, error)
                pause = min(pause * 2, _PAUSE_MAX) if away else 0.2
                away = True
                continue
            if away:
                log.info("etcd answers again; %s is registered", member.worker_id)
            away = False
            pause = self._ttl / 3

    async def _put_again(self) -> None:
        """An update may have failed while etcd was away; and a restored etcd may know the lease but not the key."""
        async with self._writing:
            if self._member is not None:
                await self._put(self._member)

    async def _register_again(self, member: Member) -> None:
        log.warning("the lease of %s has ended; registering again", member.worker_id)
        joined = await self._register(self._member or member)
        if self.on_lease is not None:
            try:
                result = self.on_lease(joined.lease)
                if inspect.isawaitable(result):
                    await result
            except Exception:
                log.exception("on_lease failed for lease %d", joined.lease)
