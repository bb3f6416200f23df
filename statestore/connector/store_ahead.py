# SPDX-License-Identifier: Apache-2.0
"""Store calls that run beside the work on the bytes: a put that follows its gather, a get that runs ahead of its check.

Both hand one thread the pieces in order, so that the bytes of one object meet the store in one sequence of calls, and
both have ended, well or badly, when their `with` ends: staging may be given back then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from statestore.boundary import ObjectEntry
from statestore.pool import Bytes, Pieces, Placement, Pool, SizeMismatch
from statestore.reshard import ReadPlan

PIECE = 8 << 20
"""Bytes of one read, about: its fixed cost is small beside them, and they are checked before they leave the caches."""

LEAST_PIECE = 1 << 20
"""Bytes of one write, at least: what its fixed cost is worth."""


class StreamedPut:
    """A put of one object: reserved at once, written in pieces as they come, sealed by `placement`."""

    def __init__(self, pool: Pool, key: str, nbytes: int, segment: str) -> None:
        self.key = key
        self._pool, self._nbytes, self._segment = pool, nbytes, segment
        self._pieces: queue.SimpleQueue[Pieces | None] = queue.SimpleQueue()
        self._sealed: Future[Placement] = Future()
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name="state-put", daemon=True)
        self._thread.start()

    def write(self, pieces: Pieces) -> None:
        """Have these written; their bytes must not change any more. Raises what an earlier step raised."""
        if self._sealed.done():
            self._sealed.result()
        self._pieces.put(pieces)

    def finish(self) -> None:
        """Have the object sealed once all has been written."""
        self._pieces.put(None)

    @property
    def sealed(self) -> bool:
        """Whether the object is in the store; final once the `with` has ended."""
        return self._sealed.done() and self._sealed.exception() is None

    def placement(self) -> Placement:
        """Where the object lies, after `finish`. Raises what `Pool.put` raises."""
        return self._sealed.result()

    def __enter__(self) -> StreamedPut:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandoned = not self._sealed.done()
        self._pieces.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            reservation = self._pool.reserve(self.key, self._nbytes, self._segment)
            try:
                while (pieces := self._pieces.get()) is not None:
                    self._pool.write(reservation, pieces)
                if self._abandoned:
                    raise RuntimeError(f"put {self.key}: given up")
                placement = self._pool.seal(reservation)
            except BaseException:
                self._pool.cancel(reservation)
                raise
            self._sealed.set_result(placement)
        except BaseException as error:
            self._sealed.set_exception(error)


class ReadAhead:
    """The reads of a plan, one object after the other, in pieces; `wait(end)` returns when so much has been read."""

    def __init__(self, pool: Pool, plan: ReadPlan, staging: Bytes) -> None:
        self._pool = pool
        self._calls: list[tuple[Callable[[], None], int]] = list(_calls(pool, plan, staging))
        self._changed = threading.Condition()
        self._filled = 0
        self._error: BaseException | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="state-get", daemon=True)
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


def _calls(pool: Pool, plan: ReadPlan, staging: Bytes) -> Iterator[tuple[Callable[[], None], int]]:
    """Store calls in the order of staging, each with the end of what it fills."""
    for read in plan.reads():
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
