# SPDX-License-Identifier: Apache-2.0
"""A watch that cannot lose a change: it follows the state of a prefix, not the events.

The stream of watch responses is a hint. It may end, hang after its revision has been compacted, skip events when it
reconnects, or be silent because nobody answers. So the prefix is listed first, the stream's events are laid over the
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
import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from deltaserve.etcd_client import Etcd, EtcdUnavailable, KeyValue, Listing, key_value

log = logging.getLogger(__name__)

RELIST = 2.0
"""Seconds after which the prefix is listed again: what a change that the stream skipped can be late."""

_PAUSE_MAX = 2.0


@dataclass(frozen=True)
class Watched:
    """The state of the prefix after a change."""

    items: dict[str, KeyValue]
    revision: int
    connected: bool
    """False: etcd does not answer, and `items` is what was seen last."""


async def watch(etcd: Etcd, prefix: str, relist: float = RELIST) -> AsyncGenerator[Watched, None]:
    """Yield the state of the prefix now and after each change, for ever; only `aclose` or cancelling ends it.

    Raises EtcdUnavailable only when `etcd` has been closed.
    """
    known: Listing | None = None
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
                    yield Watched(known.items if known else {}, known.revision if known else 0, False)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, _PAUSE_MAX)
                continue
            pause = 0.1
            if known is not None and listing.revision < known.revision and connected:
                # A lagging member or a restored etcd. Believe it only when it says so again after a silence.
                connected = False
                await asyncio.sleep(random.uniform(0.1, 0.2))
                continue
            changed = known is None or not connected or not _same(listing.items, known.items)
            if changed and stream is not None:
                # The stream should have told us. It is not to be trusted any more.
                await stream.close()
                stream = None
            known, connected = listing, True
            if changed:
                yield Watched(dict(known.items), known.revision, True)
            if stream is None:
                stream = _Stream(etcd, prefix, known.revision + 1)
            until = asyncio.get_running_loop().time() + relist
            while (response := await stream.next(until)) is not None:
                fresh = _laid_over(known, response)
                if fresh is not None:
                    known = fresh
                    yield Watched(dict(known.items), known.revision, True)
            if stream.ended:
                await stream.close()
                stream = None
                # One that ends at once, time after time, must not make this a busy loop.
                await asyncio.sleep(random.uniform(0.05, 0.1))
    finally:
        if stream is not None:
            await stream.close()


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
        responses = etcd.raw_watch(prefix, start_revision)
        try:
            async for response in responses:
                if response.canceled or response.compact_revision:
                    log.info(
                        "watch of %s: cancelled by etcd (%s)", prefix, response.cancel_reason or "compacted"
                    )
                    return
                await self._queue.put(response)
        except Exception as error:
            log.info("watch of %s ended: %s", prefix, error)
        finally:
            self._queue.put_nowait(None)
            with contextlib.suppress(Exception):
                await responses.aclose()


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
