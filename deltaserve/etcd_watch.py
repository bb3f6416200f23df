# SPDX-License-Identifier: Apache-2.0
"""A watch that cannot lose a change: it follows the state of a prefix, not the events.

The stream of watch responses is a hint. It may end, be cancelled because its revision has been compacted, or be silent
because nobody answers. So the prefix is listed first, the stream's events are laid over the
listing, and the prefix is listed again every `relist` seconds, and at once when the stream ends or reports a
compaction. Events older than what is known are dropped (by mod_revision), so a late one never undoes a newer one.

    list ─▶ yield ─▶ stream from revision+1 ─▶ lay over, yield ... ─▶ after `relist` seconds: list ─▶ changed? yield
                          └─ ended, compacted or found wrong by a listing ─▶ list, new stream
    etcd away: yield once with connected=False and the last state, go on trying with jitter, for ever
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from deltaserve.etcd_channel import EtcdUnavailable
from deltaserve.etcd_client import Etcd, KeyValue, Listing, key_value, words

log = logging.getLogger(__name__)

RELIST = 2.0
"""Seconds after which the prefix is listed again: what a change can be late when a stream is silent."""

_PAUSE_MAX = 2.0


@dataclass(frozen=True)
class Watched:
    """The state of the prefix after a change."""

    items: dict[str, KeyValue]
    revision: int
    connected: bool
    """False: etcd does not answer, and `items` is what was seen last."""


async def watch(
    etcd: Etcd, prefix: str, relist: float = RELIST, hold: float = 0.0
) -> AsyncGenerator[Watched, None]:
    """Yield the state of the prefix now and after each change, for ever; only `aclose` or cancelling ends it.

    `hold`: seconds for which keys stay in the state that vanished while etcd did not answer. Leases end while it is
    away, through no fault of their owners, who write their keys again as soon as they can.

    Raises EtcdUnavailable only when `etcd` has been closed.
    """
    clock = asyncio.get_running_loop().time
    known = Listing({}, 0)
    shown: dict[str, KeyValue] | None = None
    held = _Held(hold)
    connected = True
    pause = 0.1
    stream: _Stream | None = None
    try:
        while True:
            try:
                listing = await etcd.list(prefix)
            except EtcdUnavailable as error:
                if etcd.closed:
                    raise
                if stream is not None:
                    await stream.close()
                    stream = None
                if connected:
                    log.warning("watch of %s: %s", prefix, error)
                    connected = False
                    shown = held.over(known)
                    yield Watched(shown, known.revision, False)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, _PAUSE_MAX)
                continue
            pause = 0.1
            if not connected:
                held.keep(known, listing)
            elif stream is not None and not _same(listing.items, known.items):
                # The stream should have told us. It is not to be trusted any more.
                await stream.close()
                stream = None
            known, items = listing, held.over(listing)
            if shown is None or not connected or not _same(items, shown):
                connected, shown = True, items
                yield Watched(items, known.revision, True)
            if stream is None:
                stream = _Stream(etcd, prefix, known.revision + 1)
            until = min(clock() + relist, held.until)
            while (response := await stream.next(until)) is not None:
                fresh = _laid_over(known, response)
                if fresh is not None:
                    known, shown = fresh, held.over(fresh)
                    yield Watched(shown, known.revision, True)
            if stream.ended:
                await stream.close()
                stream = None
                # One that ends at once, time after time, must not make this a busy loop.
                await asyncio.sleep(random.uniform(0.05, 0.1))
    finally:
        if stream is not None:
            await stream.close()


class _Held:
    """Keys that vanished while etcd was away, until their time is over or they come back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._keys: dict[str, KeyValue] = {}
        self.until = math.inf

    def keep(self, before: Listing, now: Listing) -> None:
        """Hold what was there before and is not now, and what is held already."""
        self._keys = {**self._keys, **before.items}
        self._keys = {key: kv for key, kv in self._keys.items() if key not in now.items}
        self.until = asyncio.get_running_loop().time() + self._seconds if self._keys else math.inf

    def over(self, listing: Listing) -> dict[str, KeyValue]:
        """The listing with the held keys that are not in it."""
        if asyncio.get_running_loop().time() >= self.until:
            self._keys, self.until = {}, math.inf
        for key in listing.items:
            self._keys.pop(key, None)
        return {**self._keys, **listing.items}


def _same(left: dict[str, KeyValue], right: dict[str, KeyValue]) -> bool:
    return left.keys() == right.keys() and all(
        kv.mod_revision == right[key].mod_revision for key, kv in left.items()
    )


class _Stream:
    """One stream of watch responses, read by a task of its own so that waiting for it can be bounded."""

    def __init__(self, etcd: Etcd, prefix: str, start_revision: int) -> None:
        self.ended = False
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._pump(etcd, prefix, start_revision))

    async def next(self, until: float) -> Any:
        """The next response; None at the loop's time `until`, and when the stream has ended (`ended`)."""
        try:
            async with asyncio.timeout_at(until):
                response = await self._queue.get()
        except TimeoutError:
            return None
        self.ended = response is None
        return response

    async def close(self) -> None:
        """End the stream; never raises."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _pump(self, etcd: Etcd, prefix: str, start_revision: int) -> None:
        try:
            async with contextlib.aclosing(etcd.raw_watch(prefix, start_revision)) as responses:
                async for response in responses:
                    if response.canceled or response.compact_revision:
                        why = response.cancel_reason or "compacted"
                        log.info("watch of %s: cancelled by etcd (%s)", prefix, why)
                        return
                    await self._queue.put(response)
        except Exception as error:
            log.info("watch of %s ended: %s", prefix, words(error))
        finally:
            self._queue.put_nowait(None)


def _laid_over(known: Listing, response: Any) -> Listing | None:
    """`known` with the response's events laid over it; None when they change nothing."""
    items = dict(known.items)
    changed = False
    for event in response.events:
        kv = event.kv
        if kv.mod_revision <= known.revision:
            continue
        key = kv.key.decode()
        if event.type == event.DELETE:
            changed |= items.pop(key, None) is not None
        else:
            items[key] = key_value(kv)
            changed = True
    return Listing(items, int(response.header.revision)) if changed else None
