# SPDX-License-Identifier: Apache-2.0
"""A worker that was told to go finishes what it holds: the worker's side of docs/drain.md.

    its record says draining ─▶ wait until it has been idle for SETTLE_SECONDS, or the time is up, or somebody hurries

Idle: no request, no boundary published here that a router still holds, no boundary of a request in this worker's memory
that somebody may still read. What is left when the time is up, routers move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from deltaserve.membership import Member, Membership

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5
"""A router that has not heard yet may still send something for so long."""
LOOK_SECONDS = 0.05
MEMORY_LOOK_SECONDS = 0.5
"""Between looks into the ledger, which are made only when nothing else is held."""
LAST_LOOK_SECONDS = 1.0
"""For the look that only says what is left behind."""


class Holder(Protocol):
    """What a drain asks the worker's service."""

    @property
    def held(self) -> int:
        """Requests, and published boundaries that routers hold."""

    @property
    def routers(self) -> int:
        """Streams of routers."""


async def finish(
    membership: Membership,
    member: Member,
    holder: Holder,
    unread: Callable[[], Awaitable[int]],
    seconds: float,
    hurry: asyncio.Event,
) -> int:
    """Tell the cluster that this worker drains, and wait until it holds nothing, for at most `seconds`.

    `unread`: boundaries of requests in this worker's memory. `hurry` ends the waiting. Returns how much is still held.
    Never raises: a worker that was told to go goes.
    """
    log.info("draining for at most %.0f s", seconds)
    try:
        await membership.update(replace(member, draining=True))
    except (ConnectionError, ValueError) as error:
        log.warning("routers are not told of the drain, they will see the streams end: %s", error)
    waiting = asyncio.ensure_future(_idle(holder, unread))
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({waiting, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if waiting.done():
        log.info("drained")
        return 0
    waiting.cancel()
    left = holder.held or await _last_look(unread)
    log.info("the drain is over; %d requests and boundaries that are held are left to the routers", left)
    return left


async def _last_look(unread: Callable[[], Awaitable[int]]) -> int:
    """Boundaries in this worker's memory that go with it; 0 where nobody can say it in time."""
    try:
        return await asyncio.wait_for(unread(), LAST_LOOK_SECONDS)
    except Exception as error:
        log.warning("what lies in this worker's memory cannot be looked up: %s", error)
        return 0


async def _idle(holder: Holder, unread: Callable[[], Awaitable[int]]) -> None:
    """Return once nothing is held, and has not been for SETTLE_SECONDS."""
    clock = asyncio.get_running_loop().time
    since = clock()
    while True:
        if holder.held:
            since = clock()
        elif clock() - since >= SETTLE_SECONDS or not holder.routers:
            try:
                if not await unread():
                    return
            except Exception as error:  # the ledger is away: nobody can find a boundary either
                log.warning("what lies in this worker's memory cannot be looked up: %s", error)
                return
            await asyncio.sleep(MEMORY_LOOK_SECONDS)
        await asyncio.sleep(LOOK_SECONDS)
