# SPDX-License-Identifier: Apache-2.0
"""A pool in memory with the contract of the real one (tests/unit/statestore/test_pool.py runs over both)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from statestore.bounded_calls import BoundedCalls
from statestore.pool import (
    Bytes,
    KeyExists,
    Pieces,
    Placement,
    Pool,
    PoolClosed,
    PoolFull,
    PoolMissing,
    PoolUnavailable,
    Reservation,
    SizeMismatch,
)
from statestore.staging import Staging


@dataclass
class Stored:
    """One object."""

    data: Bytes
    segment: str
    sealed: bool = False
    written: int = 0
    writer: object = None
    """The pool that reserved it; what it has not sealed goes when it closes."""


@dataclass
class Store:
    """What several `PoolDouble`s share: the objects, room for them by segment, and faults to inject.

    `before` is called with (operation, key) at the start of every call, without the lock: let it sleep or raise. The
    key of the operation "staging" is the segment of the pool that is asked. `calls` counts the operations.
    """

    objects: dict[str, Stored] = field(default_factory=dict)
    room: dict[str, int] = field(default_factory=dict)
    away: bool = False
    before: Callable[[str, str], None] = lambda operation, key: None
    lock: threading.RLock = field(default_factory=threading.RLock)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def used(self) -> int:
        """Bytes of all objects, half-written ones included."""
        return sum(stored.data.nbytes for stored in self.objects.values())

    def lose(self, segment: str) -> None:
        """The process that lent a segment has died."""
        with self.lock:
            self.room.pop(segment, None)
            self.objects = {key: o for key, o in self.objects.items() if o.segment != segment}


class PoolDouble(Pool):
    """One process's view of a `Store`."""

    _names = iter(range(1, 1 << 30))

    def __init__(
        self,
        store: Store,
        segment_bytes: int = 64 << 20,
        staging_bytes: int = 4 << 20,
        shows_home: bool = False,
    ) -> None:
        """`shows_home`: `at_home` gives what lies in this pool's segment; else every read is a `get`."""
        self.store, self._shows_home = store, shows_home
        number = next(self._names)
        self._segment = f"127.0.0.1:{number}@127.0.0.1:{number + 100_000}" if segment_bytes else ""
        if segment_bytes:
            store.room[self._segment] = segment_bytes
        self._registered: dict[int, Bytes] = {}
        self._busy: list[Bytes] = []
        self._closed = False
        self._staging = Staging(self, staging_bytes)

    @property
    def segment_name(self) -> str:
        return self._segment

    @property
    def available(self) -> bool:
        return not self._closed and not self.store.away

    def register(self, buffer: Bytes) -> None:
        if not buffer.flags.c_contiguous or buffer.nbytes == 0:
            raise ValueError("buffer: must be contiguous and not empty")
        if self._covers(buffer):
            raise ValueError("buffer: this memory has been registered already")
        self._registered[buffer.ctypes.data] = buffer

    def unregister(self, buffer: Bytes) -> None:
        self._registered.pop(buffer.ctypes.data, None)

    def reserve(
        self, key: str, nbytes: int, preferred_segment: str = "", timeout: float | None = None
    ) -> Reservation:
        if not key or any(c.isspace() for c in key):
            raise ValueError(f"key: {key!r} must be 1 to 400 characters without spaces")
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} must be positive")
        self._enter("reserve", key)
        with self.store.lock:
            if key in self.store.objects:
                raise KeyExists(f"reserve {key}: exists")
            for segment in (preferred_segment, *self.store.room):
                if self._left(segment) >= nbytes:
                    self.store.objects[key] = Stored(np.zeros(nbytes, np.uint8), segment, writer=self)
                    return Reservation(key, nbytes, preferred_segment)
        raise PoolFull(f"reserve {key}: no segment has room for {nbytes} bytes")

    def write(self, reservation: Reservation, pieces: Pieces, timeout: float | None = None) -> None:
        self._check(pieces, reservation.nbytes)
        self._enter("write", reservation.key)
        with self.store.lock:
            stored = self._pending(reservation.key)
            for offset, buffer in pieces:
                stored.data[offset : offset + buffer.nbytes] = buffer
                stored.written += buffer.nbytes

    def seal(self, reservation: Reservation, timeout: float | None = None) -> Placement:
        key = reservation.key
        self._enter("seal", key)
        with self.store.lock:
            stored = self._pending(key)
            if stored.written != reservation.nbytes:
                raise SizeMismatch(f"seal {key}: {stored.written} of {reservation.nbytes} bytes written")
            stored.sealed = True
            wanted = reservation.preferred_segment
            return Placement(key, reservation.nbytes, stored.segment, not wanted or wanted == stored.segment)

    def cancel(self, reservation: Reservation) -> None:
        with self.store.lock:
            stored = self.store.objects.get(reservation.key)
            if stored is not None and not stored.sealed:
                del self.store.objects[reservation.key]

    @contextlib.contextmanager
    def at_home(self, keys: Sequence[str], timeout: float | None = None) -> Iterator[dict[str, Bytes]]:
        found: dict[str, Bytes] = {}
        for key in keys if self._shows_home else ():
            self._enter("home", key)
            stored = self.store.objects.get(key)
            if stored is not None and stored.sealed and stored.segment == self._segment:
                found[key] = stored.data.view()
                found[key].flags.writeable = False
        yield found

    def get_into(self, key: str, buffers: Sequence[Bytes], timeout: float | None = None) -> None:
        total = sum(buffer.nbytes for buffer in buffers)
        self._check([(0, buffer) for buffer in buffers], None)
        self._enter("get", key)
        data = self._sealed("get", key).data
        if data.nbytes != total:
            raise SizeMismatch(f"get {key}: {data.nbytes} bytes are stored, {total} were asked for")
        at = 0
        for buffer in buffers:
            buffer[:] = data[at : at + buffer.nbytes]
            at += buffer.nbytes

    def get_ranges(self, key: str, pieces: Pieces, timeout: float | None = None) -> None:
        self._check(pieces, None)
        if not pieces:
            return
        self._enter("get", key)
        data = self._sealed("get", key).data
        for offset, buffer in pieces:
            if offset + buffer.nbytes > data.nbytes:
                raise SizeMismatch(f"get {key}: {data.nbytes} bytes are stored")
            buffer[:] = data[offset : offset + buffer.nbytes]

    def remove(self, keys: Sequence[str], timeout: float | None = None) -> list[str]:
        kept = []
        for key in dict.fromkeys(keys):
            self._enter("remove", key)
            with self.store.lock:
                stored = self.store.objects.get(key)
                if stored is not None and not stored.sealed:
                    kept.append(key)
                else:
                    self.store.objects.pop(key, None)
        return kept

    def size(self, key: str, timeout: float | None = None) -> int:
        self._enter("size", key)
        return int(self._sealed("size", key).data.nbytes)

    def busy(self, buffer: Bytes) -> bool:
        return any(np.shares_memory(buffer, late) for late in self._busy)

    def set_busy(self, buffers: list[Bytes]) -> None:
        """Pretend that late calls still touch this memory."""
        self._busy = buffers

    @contextlib.contextmanager
    def staging(self, nbytes: int, timeout: float) -> Iterator[Bytes]:
        if self._closed:
            raise PoolClosed("staging: the pool has been closed")
        self.store.calls["staging"] += 1
        self.store.before("staging", self._segment)
        with self._staging.slice(nbytes, timeout) as view:
            yield view

    @property
    def staging_free(self) -> int:
        """Bytes of staging memory that nobody has, and no late call may touch."""
        return self._staging.free_bytes

    def close(self, timeout: float = 5.0) -> None:
        if not self._closed:
            self._closed = True
            self._staging.close()
            self.store.lose(self._segment)
            with self.store.lock:
                for key in [k for k, o in self.store.objects.items() if o.writer is self and not o.sealed]:
                    del self.store.objects[key]

    # ---- inside

    def _enter(self, operation: str, key: str) -> None:
        if self._closed:
            raise PoolClosed(f"{operation}: the pool has been closed")
        if self.store.away:
            time.sleep(0.001)
            raise PoolUnavailable(f"{operation} {key}: the store is away")
        self.store.calls[operation] += 1
        self.store.before(operation, key)

    def _left(self, segment: str) -> int:
        used = sum(o.data.nbytes for o in self.store.objects.values() if o.segment == segment)
        return self.store.room.get(segment, -1) - used

    def _pending(self, key: str) -> Stored:
        stored = self.store.objects.get(key)
        if stored is None or stored.sealed:
            raise PoolMissing(f"{key}: the reservation has ended")
        return stored

    def _sealed(self, what: str, key: str) -> Stored:
        with self.store.lock:
            stored = self.store.objects.get(key)
        if stored is None or not stored.sealed:
            raise PoolMissing(f"{what} {key}: no such object")
        return stored

    def _covers(self, buffer: Bytes) -> bool:
        first, last = buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes
        return any(at <= first and last <= at + memory.nbytes for at, memory in self._registered.items())

    def _check(self, pieces: Pieces, limit: int | None) -> None:
        if self._closed:
            raise PoolClosed("the pool has been closed")
        for offset, buffer in pieces:
            if not self._covers(buffer):
                raise ValueError("a buffer lies outside registered memory; use staging or register")
            if offset < 0 or (limit is not None and offset + buffer.nbytes > limit):
                raise SizeMismatch(f"bytes {offset} to {offset + buffer.nbytes} of an object of {limit}")


class DeadlinePool(PoolDouble):
    """A pool double whose transfers run in `BoundedCalls`, as the real one's: they have a deadline, and what comes late
    goes on behind the caller's back and writes into its buffers."""

    def __init__(
        self, store: Store, segment_bytes: int = 64 << 20, staging_bytes: int = 4 << 20, timeout: float = 5.0
    ) -> None:
        self._timeout = timeout
        self._calls = BoundedCalls("pool-double", threads=8)
        super().__init__(store, segment_bytes, staging_bytes)

    def write(self, reservation: Reservation, pieces: Pieces, timeout: float | None = None) -> None:
        buffers = [buffer for _, buffer in pieces]
        self._bounded("write", lambda: super(DeadlinePool, self).write(reservation, pieces), timeout, buffers)

    def get_into(self, key: str, buffers: Sequence[Bytes], timeout: float | None = None) -> None:
        self._bounded("get", lambda: super(DeadlinePool, self).get_into(key, buffers), timeout, buffers)

    def get_ranges(self, key: str, pieces: Pieces, timeout: float | None = None) -> None:
        buffers = [buffer for _, buffer in pieces]
        self._bounded("get", lambda: super(DeadlinePool, self).get_ranges(key, pieces), timeout, buffers)

    def busy(self, buffer: Bytes) -> bool:
        return self._calls.busy(buffer)

    def _bounded(
        self, what: str, work: Callable[[], None], timeout: float | None, buffers: Sequence[Bytes]
    ) -> None:
        self._calls.run(what, work, self._timeout if timeout is None else timeout, buffers)
