# SPDX-License-Identifier: Apache-2.0
"""Staging: registered host memory, handed out in slices.

One mapping a pool, touched by nobody until a slice is used, so that it costs memory only as far as it is needed (all of
it where it is pinned for a device). Slices are given first fit, in the order in which they were asked for, so that a
large one is not starved by small ones. What is larger than the whole mapping gets one of its own, one at a time.

A slice that a late call may still write into is not given out again before the pool says that the call has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from statestore.pool import Bytes, Pool, PoolClosed, PoolUnavailable

ALIGN = 4096
"""Slices start at multiples of it and take multiples of it, so that no two share a page."""

_POLL = 0.02
"""Seconds between looks at slices that wait for a late call."""


Pin = Callable[[Bytes], Callable[[], None]]
"""Locks memory for a device's copies; what it returns undoes that."""


@dataclass(frozen=True, eq=False)
class Slice:
    """A piece of staging memory; `view` has exactly the bytes that were asked for."""

    view: Bytes
    offset: int
    """In the mapping; -1: it has a mapping of its own."""
    length: int
    """Bytes taken, a multiple of ALIGN."""
    whole: Bytes
    """The mapping that it lies in."""


class Staging:
    """See the module's description. Safe to use from several threads."""

    def __init__(self, pool: Pool, nbytes: int = 64 << 20, pin: Pin | None = None) -> None:
        """Maps and registers `nbytes`, rounded up to pages; `pin` is called with them once, before. Raises what it and
        `Pool.register` raise."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} must be positive")
        self._pool = pool
        self.nbytes = _round_up(nbytes)
        self._memory = _map(self.nbytes)
        self._unpin = None if pin is None else pin(self._memory)
        try:
            pool.register(self._memory)
        except BaseException:
            if self._unpin is not None:
                self._unpin()
            raise
        self._free = [(0, self.nbytes)]
        self._waiting: deque[object] = deque()
        self._quarantine: list[Slice] = []
        self._changed = threading.Condition()
        self._oversize = threading.Semaphore(1)
        self._closed = False

    def acquire(self, nbytes: int, timeout: float) -> Slice:
        """A slice of `nbytes` bytes; its content is anything. Raises PoolUnavailable after `timeout` seconds."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} must be positive")
        deadline = time.monotonic() + timeout
        length = _round_up(nbytes)
        if length > self.nbytes:
            return self._acquire_oversize(nbytes, length, deadline)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while True:
                    if self._closed:
                        raise PoolClosed("staging: used after close")
                    self._reclaim()
                    if self._waiting[0] is ticket and (offset := self._take(length)) is not None:
                        view = self._memory[offset : offset + nbytes]
                        return Slice(view, offset, length, self._memory)
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise PoolUnavailable(
                            f"staging: no {nbytes} of {self.nbytes} bytes became free in {timeout:g} s"
                        )
                    self._changed.wait(min(remaining, _POLL) if self._quarantine else remaining)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def release(self, piece: Slice) -> None:
        """Give a slice back. One that a late call may still touch is kept aside until that call has ended."""
        with self._changed:
            self._quarantine.append(piece)
            self._reclaim()
            self._changed.notify_all()

    @contextlib.contextmanager
    def slice(self, nbytes: int, timeout: float) -> Iterator[Bytes]:
        """`acquire` and `release` around a `with`."""
        piece = self.acquire(nbytes, timeout)
        try:
            yield piece.view
        finally:
            self.release(piece)

    @property
    def free_bytes(self) -> int:
        """Bytes that could be handed out now, in all."""
        with self._changed:
            self._reclaim()
            return sum(length for _, length in self._free)

    def close(self) -> None:
        """Refuse further use and unregister the memory. Never raises."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.unregister(self._memory)
        if self._unpin is not None:
            self._unpin()

    # ---- inside

    def _acquire_oversize(self, nbytes: int, length: int, deadline: float) -> Slice:
        while not self._oversize.acquire(timeout=_POLL):
            if self._closed:
                raise PoolClosed("staging: used after close")
            with self._changed:
                self._reclaim()
            if time.monotonic() >= deadline:
                raise PoolUnavailable(
                    f"staging: {nbytes} bytes exceed the {self.nbytes} of the staging memory, and another such "
                    "slice is in use; make the staging memory larger"
                )
        try:
            memory = _map(length)
            self._pool.register(memory)
        except BaseException:
            self._oversize.release()
            raise
        return Slice(memory[:nbytes], -1, length, memory)

    def _take(self, length: int) -> int | None:
        for number, (offset, size) in enumerate(self._free):
            if size >= length:
                if size == length:
                    del self._free[number]
                else:
                    self._free[number] = (offset + length, size - length)
                return offset
        return None

    def _reclaim(self) -> None:
        """Return quiet slices to the free list, joined with their neighbours. Called under the lock."""
        late = []
        for piece in self._quarantine:
            if self._pool.busy(piece.view):
                late.append(piece)
            elif piece.offset < 0:
                self._pool.unregister(piece.whole)
                self._oversize.release()
            else:
                self._free.append((piece.offset, piece.length))
        self._quarantine = late
        joined: list[tuple[int, int]] = []
        for offset, length in sorted(self._free):
            if joined and joined[-1][0] + joined[-1][1] == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((offset, length))
        self._free = joined


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _map(nbytes: int) -> Bytes:
    """Zero pages that cost nothing until they are touched, starting at a page."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
