# SPDX-License-Identifier: Apache-2.0
"""The pool over Mooncake's store (0.3.13 and 0.3.14). `statestore.mooncake_link` owns the connection.

What Mooncake does, and what is made of it here:

- `put` on a key that exists keeps the old value and reports success. Put sessions (start, ranges, end) refuse it, and
  give the reservations and the early writes that the pool promises. A session that was not written is sealed all the
  same, so bytes are counted here.
- `preferred_segment` falls back to another segment without a word: the placement is read back after the seal.
- Memory is lent under one name (`host:port` of the client) and replicas tell another (the transfer engine's endpoint).
  `segment_name` carries both, as `name@endpoint`; one's own endpoint is learnt by storing a few bytes there.
- Revoking a session gives its room to others while a late write may still land in it. So a session with a call inside
  is revoked by that call's end.
- The code of a read that failed is the same for a wrong size and for other reasons: the size is asked afterwards.
- A full store (-200) evicts behind the call, so it is asked again; what stays full is full of pinned objects.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltaserve.config import StoreConfig
from statestore.mooncake_client import (
    EXISTS,
    FULL,
    MISSING,
    PARAMS,
    TRANSFER,
    describe,
    error_of,
    is_unreachable,
)
from statestore.mooncake_link import Link
from statestore.pool import (
    Bytes,
    KeyExists,
    Pieces,
    Placement,
    Pool,
    PoolError,
    PoolFull,
    PoolMissing,
    PoolUnavailable,
    Reservation,
    SizeMismatch,
)
from statestore.staging import Staging

T = TypeVar("T")

log = logging.getLogger(__name__)

LEAST_SEGMENT = 16 << 20
"""Bytes of the smallest segment that Mooncake mounts."""

_FULL_LOOKS = 3
_FULL_PAUSE = 0.1
"""A full store is asked that often, that many seconds apart."""


@dataclass(eq=False)
class _Session:
    """An object between reserve and seal."""

    nbytes: int
    written: int = 0
    calls: int = 0
    """Calls inside the library that concern it, late ones included."""
    ended: bool = False
    """Cancelled, or its start failed: the last call inside revokes it."""


class MooncakePool(Pool):
    """See the module's description."""

    def __init__(self, config: StoreConfig, *, lend: bool = True, staging_bytes: int = 64 << 20) -> None:
        """Connects, within `StoreConfig.timeout` seconds. `lend=False`: lends the store no memory.

        Raises PoolUnavailable when the master does not answer, ValueError for a segment that Mooncake refuses.
        """
        if lend and config.segment_bytes < LEAST_SEGMENT:
            raise ValueError(
                f"store.segment_bytes: {config.segment_bytes} a rank; Mooncake needs at least {LEAST_SEGMENT}"
            )
        self._timeout = config.timeout
        self._staging_bytes = staging_bytes
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._leftovers: set[str] = set()
        self._staging: Staging | None = None
        self._link = Link(config, config.segment_bytes if lend else 0, self._remove_leftovers)

    @property
    def segment_name(self) -> str:
        return self._link.client.segment_name

    @property
    def available(self) -> bool:
        return self._link.available

    # ---- memory

    def register(self, buffer: Bytes) -> None:
        if not buffer.flags.c_contiguous or buffer.nbytes == 0:
            raise ValueError("buffer: must be contiguous and not empty")
        self._link.register(buffer)

    def unregister(self, buffer: Bytes) -> None:
        self._link.unregister(buffer)

    def busy(self, buffer: Bytes) -> bool:
        return self._link.busy(buffer)

    @contextlib.contextmanager
    def staging(self, nbytes: int, timeout: float) -> Iterator[Bytes]:
        self._link.guard("staging")
        with self._lock:
            if self._staging is None:
                self._staging = Staging(self, self._staging_bytes)
            staging = self._staging
        with staging.slice(nbytes, timeout) as view:
            yield view

    # ---- writing

    def reserve(
        self, key: str, nbytes: int, preferred_segment: str = "", timeout: float | None = None
    ) -> Reservation:
        _check_key(key)
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} must be positive")
        self._link.guard("reserve")
        session = _Session(nbytes)
        with self._lock:
            if key in self._sessions:
                raise KeyExists(f"reserve {key}: it is being written by this process", EXISTS)
            self._sessions[key] = session
        try:
            self._start(key, session, preferred_segment, self._deadline(timeout))
        except BaseException as error:
            # After a call that came late the session may exist all the same.
            self._end(key, session, revoke=isinstance(error, PoolUnavailable))
            raise
        return Reservation(key, nbytes, preferred_segment)

    def write(self, reservation: Reservation, pieces: Pieces, timeout: float | None = None) -> None:
        key = reservation.key
        asked = self._check_pieces("write", pieces, reservation.nbytes)
        if not asked:
            return
        session = self._session("write", key)
        buffers = [buffer for _, buffer in pieces]
        work = self._inside(key, session, lambda: self._link.client.write(key, pieces))
        done = self._link.once(f"write {key}", work, self._deadline(timeout) - time.monotonic(), buffers)
        if done != asked:
            raise error_of("write", key, done if done < 0 else TRANSFER)
        with self._lock:
            session.written += asked

    def seal(self, reservation: Reservation, timeout: float | None = None) -> Placement:
        key, deadline = reservation.key, self._deadline(timeout)
        session = self._session("seal", key)
        if session.written != session.nbytes or session.calls:
            raise SizeMismatch(f"seal {key}: {session.written} of {session.nbytes} bytes have been written")
        work = self._inside(key, session, lambda: self._link.client.end(key))
        code = self._link.run(f"seal {key}", work, deadline)
        if is_unreachable(code):
            raise error_of("seal", key, code)
        if code:
            raise PoolMissing(f"seal {key}: the reservation has been lost ({describe(code)})", code)
        found = self._link.run(f"seal {key}", lambda: self._link.client.replica(key), deadline)
        if isinstance(found, int):
            raise error_of("seal", key, found)
        nbytes, endpoint = found
        if nbytes != reservation.nbytes:
            raise SizeMismatch(f"seal {key}: {nbytes} bytes are stored, {reservation.nbytes} were written")
        with self._lock:
            self._sessions.pop(key, None)
        wanted = reservation.preferred_segment
        preferred = not wanted or wanted.rpartition("@")[2] == endpoint
        segment = next((name for name in (wanted, self.segment_name) if name.endswith(f"@{endpoint}")), "")
        return Placement(key, nbytes, segment or f"@{endpoint}", preferred)

    def cancel(self, reservation: Reservation) -> None:
        with self._lock:
            session = self._sessions.get(reservation.key)
        if session is not None:
            self._end(reservation.key, session, revoke=True)

    # ---- reading

    def get_into(self, key: str, buffers: Sequence[Bytes], timeout: float | None = None) -> None:
        pieces: list[tuple[int, Bytes]] = []
        nbytes = 0
        for buffer in buffers:
            pieces.append((nbytes, buffer))
            nbytes += buffer.nbytes
        self._check_pieces("get", pieces, nbytes)
        deadline = self._deadline(timeout)
        done = self._link.run(
            f"get {key}", lambda: self._link.client.read_whole(key, buffers), deadline, buffers
        )
        if done != nbytes:
            raise self._read_error(key, nbytes, done, deadline, whole=True)

    def get_ranges(self, key: str, pieces: Pieces, timeout: float | None = None) -> None:
        asked = self._check_pieces("get", pieces, None)
        if not asked:
            return
        deadline = self._deadline(timeout)
        buffers = [buffer for _, buffer in pieces]
        done = self._link.run(
            f"get {key}", lambda: self._link.client.read_ranges(key, pieces), deadline, buffers
        )
        if done != asked:
            end = max(offset + buffer.nbytes for offset, buffer in pieces)
            raise self._read_error(key, end, done, deadline, whole=False)

    def size(self, key: str, timeout: float | None = None) -> int:
        done = self._link.run(f"size {key}", lambda: self._link.client.size(key), self._deadline(timeout))
        if done < 0:
            raise error_of("size", key, done)
        return done

    # ---- removing, and the end

    def remove(self, keys: Sequence[str], timeout: float | None = None) -> list[str]:
        wanted = list(dict.fromkeys(keys))
        for key in wanted:
            _check_key(key)
        if not wanted:
            return []
        deadline = self._deadline(timeout)
        codes = self._link.run(
            f"remove {len(wanted)} keys", lambda: self._link.client.remove(wanted), deadline
        )
        kept = []
        for key, code in zip(wanted, codes, strict=True):
            if code in (0, MISSING):
                continue
            if is_unreachable(code):
                self._link.suspect()
                raise error_of("remove", key, code)
            log.info("remove %s: %s; later", key, describe(code))
            kept.append(key)
        return kept

    def close(self, timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        with self._lock:
            staging, sessions = self._staging, dict(self._sessions)
        for key, session in sessions.items():
            self._end(key, session, revoke=True)
        if staging is not None:
            staging.close()
        self._link.close(max(0.1, deadline - time.monotonic()))

    # ---- inside

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self._timeout if timeout is None else timeout)

    def _start(self, key: str, session: _Session, preferred_segment: str, deadline: float) -> None:
        for look in range(1, _FULL_LOOKS + 1):
            work = self._inside(
                key, session, lambda: self._link.client.start(key, session.nbytes, preferred_segment)
            )
            code = self._link.run(f"reserve {key}", work, deadline)
            if code == 0:
                return
            if code != FULL:
                raise error_of("reserve", key, code)
            if look == _FULL_LOOKS or time.monotonic() + _FULL_PAUSE >= deadline:
                break
            time.sleep(_FULL_PAUSE * random.uniform(0.7, 1.0))
        raise PoolFull(f"reserve {key}: no segment has room for {session.nbytes} bytes", FULL)

    def _session(self, what: str, key: str) -> _Session:
        self._link.guard(what)
        with self._lock:
            session = self._sessions.get(key)
        if session is None or session.ended:
            raise PoolMissing(f"{what} {key}: the reservation has ended")
        return session

    def _inside(self, key: str, session: _Session, call: Callable[[], T]) -> Callable[[], T]:
        """The call, counted in its session. If the session has ended when it returns, it revokes the session."""

        def work() -> T:
            with self._lock:
                session.calls += 1
            try:
                return call()
            finally:
                with self._lock:
                    session.calls -= 1
                    last = session.ended and session.calls == 0
                if last:
                    self._link.client.revoke(key)
                    self._forget(key, leftover=True)

        return work

    def _end(self, key: str, session: _Session, revoke: bool) -> None:
        """End a session; `revoke`: there may be one at the master, or an object whose seal was not heard of."""
        with self._lock:
            if session.ended:
                return
            session.ended = True
            if session.calls:
                return
        if not revoke:
            self._forget(key, leftover=False)
            return
        clean = False
        if self._link.available:
            with contextlib.suppress(PoolError):
                self._link.once(
                    f"cancel {key}", lambda: self._link.client.revoke(key), min(self._timeout, 1.0)
                )
                clean = not self.remove([key], min(self._timeout, 1.0))
        self._forget(key, leftover=not clean)

    def _forget(self, key: str, leftover: bool) -> None:
        with self._lock:
            self._sessions.pop(key, None)
            if leftover:
                self._leftovers.add(key)
        if leftover:
            self._link.suspect()

    def _remove_leftovers(self) -> bool:
        """Remove what sessions without a clean end left behind; whether all of it is gone."""
        with self._lock:
            keys = sorted(self._leftovers - self._sessions.keys())
        try:
            kept = set(self.remove(keys))
        except PoolError as error:
            log.warning("%d half-written objects stay for now: %s", len(keys), error)
            return False
        with self._lock:
            self._leftovers -= set(keys) - kept
            return not self._leftovers

    def _check_pieces(self, what: str, pieces: Pieces, limit: int | None) -> int:
        """Bytes in all. Raises ValueError for memory that is not registered, SizeMismatch outside the object."""
        self._link.guard(what)
        if not self._link.registered([buffer for _, buffer in pieces]):
            raise ValueError(f"{what}: a buffer lies outside registered memory; use staging or register")
        total = 0
        for offset, buffer in pieces:
            if not buffer.flags.c_contiguous:
                raise ValueError(f"{what}: a buffer is not contiguous")
            if offset < 0 or (limit is not None and offset + buffer.nbytes > limit):
                raise SizeMismatch(
                    f"{what}: bytes {offset} to {offset + buffer.nbytes} of an object of {limit}"
                )
            total += buffer.nbytes
        return total

    def _read_error(self, key: str, asked: int, code: int, deadline: float, whole: bool) -> PoolError:
        if code in (PARAMS, TRANSFER) or code >= 0:
            size = self._link.run(f"get {key}", lambda: self._link.client.size(key), deadline)
            if size == MISSING:
                code = MISSING
            elif size >= 0 and (size < asked or (whole and size != asked)):
                return SizeMismatch(f"get {key}: {size} bytes are stored, {asked} were asked for", code)
        return error_of("get", key, code if code < 0 else TRANSFER)


def _check_key(key: str) -> None:
    if not key or len(key) > 400 or any(c.isspace() for c in key):
        raise ValueError(f"key: {key!r} must be 1 to 400 characters without spaces")
