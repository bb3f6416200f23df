# SPDX-License-Identifier: Apache-2.0
"""Counts that all processes of one router see: a page of memory that the parent maps before it forks.

Every process has a row of its own and writes nowhere else, so a sum over rows needs no lock, and the parent takes back
what a dead process held by clearing its row. Only what is checked and then taken (a key's concurrency, its bucket of
requests a second) happens under a lock: a POSIX record lock, which the kernel opens when its holder dies, however that
comes. A process that is stopped while it holds it keeps the others waiting for LOCK_SECONDS a request and no longer;
they go on without, and a limit may then be passed by the number of processes less one.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence

from router.admission.share import Counts, Share

LOCK_SECONDS = 0.002
INSIDE, QUEUED = 0, 1
_FIELDS = 2


class Tally:
    """Made by the parent; `seat` gives a process its view."""

    def __init__(self, processes: int, keys: Sequence[str] = ()) -> None:
        """`keys`: names of the API keys that have limits."""
        self.processes = processes
        self._keys = {name: number for number, name in enumerate(keys)}
        self._width = _FIELDS + len(keys)
        rows, buckets = processes * self._width, 2 * len(keys)
        self._memory = mmap.mmap(-1, 8 * (rows + max(1, buckets)))
        view = memoryview(self._memory)
        self._rows = view[: 8 * rows].cast("q")
        self._buckets = view[8 * rows : 8 * (rows + buckets)].cast("d")
        for key in range(len(keys)):
            self.set_bucket(key, 0.0, -math.inf)
        self._lock = os.memfd_create("deltaserve-tally")
        self._wakers = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(processes)]

    def seat(self, index: int) -> Seat:
        """The view of process `index`."""
        return Seat(self, index)

    def clear(self, index: int) -> None:
        """Process `index` is gone: what it held is free, and who waits may look."""
        start = index * self._width
        for field in range(start, start + self._width):
            self._rows[field] = 0
        for other in range(self.processes):
            self.wake(other)

    def total(self, field: int) -> int:
        """A field's sum over the processes."""
        return sum(self._rows[field :: self._width])

    def get(self, index: int, field: int) -> int:
        """A field of one process."""
        return self._rows[index * self._width + field]

    def set(self, index: int, field: int, value: int) -> None:
        """Write a field of one process; only that process does."""
        self._rows[index * self._width + field] = value

    def key(self, name: str) -> int | None:
        """The number of an API key with limits; None: it has none."""
        return self._keys.get(name)

    def bucket(self, key: int) -> tuple[float, float]:
        """Tokens of a key's bucket, and when (monotonic seconds) they were counted; -inf: never yet."""
        return self._buckets[2 * key], self._buckets[2 * key + 1]

    def set_bucket(self, key: int, tokens: float, filled: float) -> None:
        """Write a key's bucket."""
        self._buckets[2 * key], self._buckets[2 * key + 1] = tokens, filled

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock, or after LOCK_SECONDS go on without."""
        end = time.monotonic() + LOCK_SECONDS
        held = False
        while not held:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except OSError:
                if time.monotonic() > end:
                    break
                os.sched_yield()
        try:
            yield
        finally:
            if held:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def wake(self, index: int) -> None:
        """Have a process look at its queue."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wakers[index], 1)

    def waker(self, index: int) -> int:
        """The descriptor that becomes readable when somebody has called `wake`."""
        return self._wakers[index]


class _KeyCounts(Counts):
    """A key's counts over all processes."""

    def __init__(self, tally: Tally, index: int, key: int) -> None:
        super().__init__()
        self._tally, self._index, self._key, self._field = tally, index, key, _FIELDS + key

    @property
    def everywhere(self) -> int:
        return self._tally.total(self._field)

    def add(self, number: int) -> None:
        self.running += number
        self._tally.set(self._index, self._field, self.running)

    def refill(self, rate: float, now: float) -> float:
        tokens, filled = self._tally.bucket(self._key)
        return min(max(1.0, rate), tokens + max(0.0, now - filled) * rate)

    def keep(self, tokens: float, now: float) -> None:
        self._tally.set_bucket(self._key, tokens, now)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return self._tally.locked()


class Seat(Share):
    """One process's view, for its door."""

    def __init__(self, tally: Tally, index: int) -> None:
        self._tally, self._index = tally, index

    def counts(self, name: str) -> Counts:
        key = self._tally.key(name)
        return Counts() if key is None else _KeyCounts(self._tally, self._index, key)

    def note(self, inside: int, queued: int) -> None:
        self._tally.set(self._index, INSIDE, inside)
        self._tally.set(self._index, QUEUED, queued)

    def queued(self, own: int) -> int:
        return self._tally.total(QUEUED)

    def room(self, inside: int, slots: int) -> bool:
        tally = self._tally
        if tally.total(INSIDE) >= slots:
            return False
        share = slots / tally.processes
        if inside < share:
            return True
        # Above its share a process takes nothing that another one waits for below its own.
        return not any(
            tally.get(other, QUEUED) and tally.get(other, INSIDE) < share
            for other in range(tally.processes)
            if other != self._index
        )

    def freed(self, slots: int) -> None:
        tally = self._tally
        if tally.total(INSIDE) >= slots:
            return
        waiting = [
            other for other in range(tally.processes) if other != self._index and tally.get(other, QUEUED)
        ]
        share = slots / tally.processes
        first = [other for other in waiting if tally.get(other, INSIDE) < share]
        for other in first or waiting:
            tally.wake(other)
