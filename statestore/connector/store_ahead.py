# SPDX-License-Identifier: Apache-2.0
"""Store calls that run beside the work on the bytes: puts that follow their gather, gets that run ahead of their check.

Both hand the pieces in order to threads, puts to `WRITERS` an object and gets to one, and both have ended, well or
badly, when their `with` ends: staging may be given back then.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from statestore.boundary import ObjectEntry
from statestore.pool import Bytes, Placement, Pool, PoolError, Reservation, SizeMismatch
from statestore.reshard import ObjectRead, ReadPlan

log = logging.getLogger(__name__)

PIECE = 8 << 20
"""Bytes of one read, about: its fixed cost is small beside them, and they are checked before they leave the caches."""

PUT_PIECE = 4 << 20
"""Bytes of one write, about, for the same reason."""

WRITERS = max(1, min(3, len(os.sched_getaffinity(0)) // 5))
"""Threads that write one object: a call of some MiB waits for its answer longer than its bytes take on the wire, so
where there are cores the next call goes out meanwhile."""

Pieces = list[tuple[int, Bytes]]
"""Of one object: (byte in the object, data)."""


class StreamedPuts:
    """A put of several objects: room taken first, pieces written as they come, all of them sealed together.

    Pieces of an object may come in any order and from several threads. They wait until there are `PUT_PIECE` bytes of
    them, or for `flush`; the last ones are written by the call that seals, so that what is small takes one call.
    Objects are written beside each other. `undo` gives back what has not been sealed, and takes away what has.
    """

    def __init__(self, pool: Pool, objects: Sequence[Reservation]) -> None:
        self._pool, self._objects = pool, list(objects)
        self._waiting: list[list[tuple[int, Bytes]]] = [[] for _ in objects]
        self._waiting_bytes = [0 for _ in objects]
        self._reserved = False
        self._lock = threading.Lock()
        """Of what waits, and of the lanes."""
        self._lanes: dict[int, tuple[list[threading.Thread], queue.SimpleQueue[Pieces | None]]] = {}
        """By object: who write it, and what is to be written."""
        self._error: BaseException | None = None
        self._stop = False

    def reserve(self) -> None:
        """Take room for every object. Raises what `Pool.reserve_all` raises; nothing has been taken then."""
        self._pool.reserve_all(self._objects)
        self._reserved = True

    def write(self, number: int, at: int, data: Bytes) -> None:
        """Have `data` written to byte `at` of an object; it must not change any more. Raises what a write raised."""
        if self._error is not None:
            raise self._error
        with self._lock:
            self._waiting[number].append((at, data))
            self._waiting_bytes[number] += data.nbytes
            if self._waiting_bytes[number] < PUT_PIECE:
                return
            self._send(number)

    def flush(self) -> None:
        """What is too little for a call of its own goes all the same: what follows is some time away."""
        with self._lock:
            for number, waiting in enumerate(self._waiting):
                if waiting:
                    self._send(number)

    def _send(self, number: int) -> None:
        if number not in self._lanes:
            self._lanes[number] = self._start(self._objects[number])
        self._lanes[number][1].put(self._waiting[number])
        self._waiting[number], self._waiting_bytes[number] = [], 0

    def seal(self) -> list[Placement]:
        """Where the objects lie, once all of them have been written. Raises what `Pool.complete` raises."""
        self._join()
        if self._error is not None:
            raise self._error
        waiting, self._waiting = self._waiting, [[] for _ in self._objects]
        return self._pool.complete(list(zip(self._objects, waiting, strict=True)))

    def undo(self) -> list[str]:
        """Nothing comes of it; returns the keys that could not be removed yet. Never raises."""
        self._stop = True
        self._join()
        if not self._reserved:
            # Under a key that was there already lies somebody else's object.
            return []
        for one in self._objects:
            self._pool.cancel(one)
        keys = [one.key for one in self._objects]
        try:
            return self._pool.remove(keys)
        except PoolError as error:
            log.warning("objects of a failed publish cannot be removed yet: %s", error)
            return keys

    def __enter__(self) -> StreamedPuts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._stop = error is not None
        self._join()

    def _start(
        self, reservation: Reservation
    ) -> tuple[list[threading.Thread], queue.SimpleQueue[Pieces | None]]:
        work: queue.SimpleQueue[Pieces | None] = queue.SimpleQueue()
        count = min(WRITERS, -(-reservation.nbytes // PUT_PIECE))
        threads = [
            threading.Thread(target=self._run, args=(reservation, work), name="state-put", daemon=True)
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        return threads, work

    def _join(self) -> None:
        for threads, work in self._lanes.values():
            for _ in threads:
                work.put(None)
        for threads, _ in self._lanes.values():
            for thread in threads:
                thread.join()
        self._lanes.clear()

    def _run(self, reservation: Reservation, work: queue.SimpleQueue[Pieces | None]) -> None:
        try:
            while (pieces := work.get()) is not None and not self._stop and self._error is None:
                self._pool.write(reservation, pieces)
        except BaseException as error:
            self._error = error


class ReadAhead:
    """The reads of a plan, one object after the other, in pieces; `wait(end)` returns when so much has been read."""

    def __init__(
        self, pool: Pool, plan: ReadPlan, staging: Bytes, without: Container[str] = frozenset()
    ) -> None:
        """`without`: keys of objects that are not read here; their place in staging is left alone."""
        reads = [read for read in plan.reads() if read.entry.key not in without]
        self._calls: list[tuple[Callable[[], None], int]] = list(_calls(pool, reads, staging))
        self._changed = threading.Condition()
        self._filled = 0
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="state-get", daemon=True)
        if self._calls:
            self._thread.start()

    def wait(self, end: int) -> None:
        """Return when the first `end` bytes of staging have been read. Raises what the pool raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._filled >= end or self._error is not None)
            if self._filled < end:
                assert self._error is not None
                raise self._error

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop = True
        if self._calls:
            self._thread.join()

    def _run(self) -> None:
        try:
            for call, end in self._calls:
                if self._stop:
                    return
                call()
                with self._changed:
                    self._filled = end
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _calls(
    pool: Pool, reads: Sequence[ObjectRead], staging: Bytes
) -> Iterator[tuple[Callable[[], None], int]]:
    """Store calls in the order of staging, each with the end of what it fills."""
    for read in reads:
        if read.whole and read.entry.nbytes <= PIECE:
            ((_, at, nbytes),) = read.ranges
            yield _whole(pool, read.entry, staging[at : at + nbytes]), at + nbytes
            continue
        if read.whole:
            # A read of ranges takes an object that is longer for the right one.
            yield _size(pool, read.entry), read.ranges[0][1]
        pieces: list[tuple[int, Bytes]] = []
        room = PIECE
        for source, at, nbytes in read.ranges:
            for low in range(0, nbytes, PIECE):
                high = min(low + PIECE, nbytes)
                if pieces and high - low > room:
                    yield _ranges(pool, read.entry, pieces), at + low
                    pieces, room = [], PIECE
                pieces.append((source + low, staging[at + low : at + high]))
                room -= high - low
        last = read.ranges[-1]
        yield _ranges(pool, read.entry, pieces), last[1] + last[2]


def _whole(pool: Pool, entry: ObjectEntry, buffer: Bytes) -> Callable[[], None]:
    return lambda: pool.get_into(entry.key, [buffer])


def _ranges(pool: Pool, entry: ObjectEntry, pieces: Sequence[tuple[int, Bytes]]) -> Callable[[], None]:
    return lambda: pool.get_ranges(entry.key, pieces)


def _size(pool: Pool, entry: ObjectEntry) -> Callable[[], None]:
    def look() -> None:
        size = pool.size(entry.key)
        if size != entry.nbytes:
            raise SizeMismatch(f"get {entry.key}: {size} bytes are stored, {entry.nbytes} were written")

    return look
