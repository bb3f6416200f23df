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
- The master gives the room of a session that nobody ends to others after a time. So no write begins, and none is waited
  for, later than `write_within` seconds after the room was asked for.
- The code of a read that failed is the same for a wrong size and for other reasons: the size is asked afterwards.
- A full store (-200) evicts behind the call, so it is asked again; what stays full is full of pinned objects.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    is_later,
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
from statestore.staging import Pin, Staging

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
    until: float
    """When its room may be others' (`time.monotonic`): no write is under way then."""
    written: int = 0
    calls: int = 0
    """Calls inside the library that concern it, late ones included."""
    ended: bool = False
    """Cancelled, or its start failed: the last call inside revokes it."""


class MooncakePool(Pool):
    """See the module's description."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        lend: bool = True,
        staging_bytes: int = 64 << 20,
        pin: Pin | None = None,
        write_within: float = math.inf,
    ) -> None:
        """Connects, within `StoreConfig.timeout` seconds. `lend=False`: lends the store no memory; `pin`: called with
        the staging memory when it is made; `write_within`: seconds from taking room to the end of the last write there,
        at most what the master waits (`--put_start_release_timeout_sec`).

        Raises PoolUnavailable when the master does not answer, ValueError for a segment that Mooncake refuses.
        """
        if lend and config.segment_bytes < LEAST_SEGMENT:
            raise ValueError(
                f"store.segment_bytes: {config.segment_bytes} a rank; Mooncake needs at least {LEAST_SEGMENT}"
            )
        self._timeout, self._write_within = config.timeout, write_within
        self._staging_bytes, self._pin = staging_bytes, pin
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
                self._staging = Staging(self, self._staging_bytes, self._pin)
            staging = self._staging
        with staging.slice(nbytes, timeout) as view:
            yield view

    # ---- writing

    def reserve(
        self, key: str, nbytes: int, preferred_segment: str = "", timeout: float | None = None
    ) -> Reservation:
        reservation = Reservation(key, nbytes, preferred_segment)
        self.reserve_all([reservation], timeout)
        return reservation

    def reserve_all(self, wanted: Sequence[Reservation], timeout: float | None = None) -> None:
        for one in wanted:
            _check_key(one.key)
            if one.nbytes <= 0:
                raise ValueError(f"nbytes: {one.nbytes} must be positive")
        self._link.guard("reserve")
        until = time.monotonic() + self._write_within
        sessions = {one.key: _Session(one.nbytes, until) for one in wanted}
        with self._lock:
            for key in sessions:
                if key in self._sessions:
                    raise KeyExists(f"reserve {key}: it is being written by this process", EXISTS)
            self._sessions.update(sessions)
        # Keys under which there may be a session of ours: after a call that came late, any.
        perhaps = set(sessions)
        try:
            deadline = self._deadline(timeout)
            work = self._inside(sessions, lambda: self._link.client.start_all(wanted))
            codes = self._link.run(f"reserve {wanted[0].key}", work, deadline)
            perhaps = {one.key for one, code in zip(wanted, codes, strict=True) if not code}
            for one, code in zip(wanted, codes, strict=True):
                if code:
                    perhaps |= {one.key} if code != EXISTS else set()
                    self._start_again(one, sessions[one.key], code, deadline)
        except BaseException:
            for key, session in sessions.items():
                self._end(key, session, revoke=key in perhaps)
            raise

    def write(self, reservation: Reservation, pieces: Pieces, timeout: float | None = None) -> None:
        key = reservation.key
        asked = self._check_pieces("write", pieces, reservation.nbytes)
        if not asked:
            return
        session = self._session("write", key)
        deadline = self._write_deadline("write", {key: session}, timeout)
        buffers = [buffer for _, buffer in pieces]
        work = self._inside({key: session}, lambda: self._link.client.write(key, pieces))
        done = self._link.once(f"write {key}", work, deadline - time.monotonic(), buffers)
        if done != asked:
            raise error_of("write", key, done if done < 0 else TRANSFER)
        with self._lock:
            session.written += asked

    def seal(self, reservation: Reservation, timeout: float | None = None) -> Placement:
        key, deadline = reservation.key, self._deadline(timeout)
        session = self._session("seal", key)
        if session.written != session.nbytes or session.calls:
            raise SizeMismatch(f"seal {key}: {session.written} of {session.nbytes} bytes have been written")
        self._seal(key, session, deadline)
        return self._placed(reservation, None, deadline)

    def _seal(self, key: str, session: _Session, deadline: float) -> None:
        work = self._inside({key: session}, lambda: self._link.client.end(key))
        code = self._link.run(f"seal {key}", work, deadline)
        if is_unreachable(code):
            raise error_of("seal", key, code)
        if code:
            raise PoolMissing(f"seal {key}: the reservation has been lost ({describe(code)})", code)

    def _placed(self, reservation: Reservation, found: tuple[int, str] | None, deadline: float) -> Placement:
        """Where a sealed object lies; `found`: what has been heard of that already."""
        key = reservation.key
        if found is None:
            answer = self._link.run(f"seal {key}", lambda: self._link.client.replica(key), deadline)
            if isinstance(answer, int):
                raise error_of("seal", key, answer)
            found = answer
        nbytes, endpoint = found
        if nbytes != reservation.nbytes:
            raise SizeMismatch(f"seal {key}: {nbytes} bytes are stored, {reservation.nbytes} were written")
        with self._lock:
            self._sessions.pop(key, None)
        wanted = reservation.preferred_segment
        preferred = not wanted or wanted.rpartition("@")[2] == endpoint
        segment = next((name for name in (wanted, self.segment_name) if name.endswith(f"@{endpoint}")), "")
        return Placement(key, nbytes, segment or f"@{endpoint}", preferred)

    def complete(
        self, last: Sequence[tuple[Reservation, Pieces]], timeout: float | None = None
    ) -> list[Placement]:
        deadline = self._deadline(timeout)
        sessions: dict[str, _Session] = {}
        asked: dict[str, int] = {}
        for reservation, pieces in last:
            key = reservation.key
            asked[key] = self._check_pieces("write", pieces, reservation.nbytes)
            session = sessions[key] = self._session("seal", key)
            if session.written + asked[key] != session.nbytes or session.calls:
                raise SizeMismatch(
                    f"seal {key}: {session.written + asked[key]} of {session.nbytes} bytes are written"
                )
        parts = [(reservation.key, pieces) for reservation, pieces in last if asked[reservation.key]]
        if parts:
            deadline = self._write_deadline("put", sessions, timeout)
        keys = list(sessions)

        def call() -> tuple[list[int], list[int], dict[str, tuple[int, str]]]:
            client = self._link.client
            done = client.write_all(parts)
            given_up = any(session.ended for session in sessions.values())
            if given_up or done != [asked[key] for key, _ in parts]:
                return done, [], {}
            codes = client.end_all(keys)
            return done, codes, {} if any(codes) else client.replicas(keys)

        buffers = [buffer for _, pieces in parts for _, buffer in pieces]
        work = self._inside(sessions, call)
        done, codes, found = self._link.once(f"put {keys[0]}", work, deadline - time.monotonic(), buffers)
        for (key, _), count in zip(parts, done, strict=True):
            if count != asked[key]:
                raise error_of("write", key, count if count < 0 else TRANSFER)
            with self._lock:
                sessions[key].written += count
        for key, code in zip(keys, codes, strict=True):
            if is_later(code) or is_unreachable(code):
                self._seal(key, sessions[key], deadline)
            elif code:
                raise PoolMissing(f"seal {key}: the reservation has been lost ({describe(code)})", code)
        return [self._placed(reservation, found.get(reservation.key), deadline) for reservation, _ in last]

    def cancel(self, reservation: Reservation) -> None:
        with self._lock:
            session = self._sessions.get(reservation.key)
        if session is not None:
            self._end(reservation.key, session, revoke=True)

    # ---- reading

    @contextlib.contextmanager
    def at_home(self, keys: Sequence[str], timeout: float | None = None) -> Iterator[dict[str, Bytes]]:
        with self._link.inside("locate"):
            work = partial(self._locate, list(dict.fromkeys(keys)))
            yield self._link.once("locate", work, self._deadline(timeout) - time.monotonic())

    def _locate(self, keys: list[str]) -> dict[str, Bytes]:
        return self._link.client.local(keys)

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

    def _write_deadline(self, what: str, sessions: Mapping[str, _Session], timeout: float | None) -> float:
        """The deadline of a write into these sessions. Raises PoolUnavailable when it is too late for one."""
        until = min(session.until for session in sessions.values())
        if time.monotonic() >= until:
            raise PoolUnavailable(
                f"{what} {next(iter(sessions))}: its room was taken more than {self._write_within:g} s ago and may be "
                "others' by now"
            )
        return min(self._deadline(timeout), until)

    def _start_again(self, wanted: Reservation, session: _Session, code: int, deadline: float) -> None:
        """Begin a session whose first attempt has given `code`, if that may change."""
        key = wanted.key
        for _ in range(_FULL_LOOKS - 1):
            if code != FULL or time.monotonic() + _FULL_PAUSE >= deadline:
                break
            time.sleep(_FULL_PAUSE * random.uniform(0.7, 1.0))
            code = self._start(wanted, session, deadline)
        if is_later(code) or is_unreachable(code):
            code = self._start(wanted, session, deadline)
        if code == FULL:
            raise PoolFull(f"reserve {key}: no segment has room for {wanted.nbytes} bytes", FULL)
        if code:
            raise error_of("reserve", key, code)

    def _start(self, wanted: Reservation, session: _Session, deadline: float) -> int:
        client = self._link.client
        work = self._inside(
            {wanted.key: session}, lambda: client.start(wanted.key, wanted.nbytes, wanted.preferred_segment)
        )
        return self._link.run(f"reserve {wanted.key}", work, deadline)

    def _session(self, what: str, key: str) -> _Session:
        self._link.guard(what)
        with self._lock:
            session = self._sessions.get(key)
        if session is None or session.ended:
            raise PoolMissing(f"{what} {key}: the reservation has ended")
        return session

    def _inside(self, sessions: Mapping[str, _Session], call: Callable[[], T]) -> Callable[[], T]:
        """The call, counted in its sessions. A session that has ended when it returns is revoked."""

        def work() -> T:
            with self._lock:
                for session in sessions.values():
                    session.calls += 1
            try:
                return call()
            finally:
                with self._lock:
                    for session in sessions.values():
                        session.calls -= 1
                    ended = [key for key, session in sessions.items() if session.ended and not session.calls]
                for key in ended:
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
