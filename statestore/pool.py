# SPDX-License-Identifier: Apache-2.0
"""The pool: where the bytes of boundaries lie. The seam; `statestore.mooncake_pool` is the real one.

Objects are immutable. A key is written once, hard-pinned, in one replica, and stays until it is removed:

    reserve ─▶ write* ─▶ seal ─▶ read* ─▶ remove           put = reserve, write, seal
                  └─ cancel (the object never existed)

`reserve` takes the bytes out of a segment before anything is computed, so that a full store is known early; `write` may
come in pieces while later ones are still being computed; nobody reads before `seal`, which also tells where the object
really lies, for a store may put it elsewhere than asked without a word. A key that exists is refused (KeyExists).

Every call has a deadline of ours (`timeout` seconds, by default `StoreConfig.timeout`) and raises PoolUnavailable when
it passes. The call in the library may go on behind our back, and write into its buffers later: `busy(buffer)` says so,
and `Staging` keeps such memory out of use until it is quiet. Buffers are contiguous numpy arrays of bytes inside
memory that has been registered; use `staging`.

A read that succeeds is no proof: after a forced removal a store may hand out another object's bytes. Check digests.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

Pieces = Sequence[tuple[int, Bytes]]
"""(offset in the object, buffer): buffers to write there, or to read into from there."""


def extent(buffer: Bytes) -> tuple[int, int]:
    """First address of a contiguous buffer, and one past its last. (`buffer.ctypes` takes ten times as long.)"""
    first: int = buffer.__array_interface__["data"][0]
    return first, first + buffer.nbytes


class PoolError(Exception):
    """A call that failed. `code` is the library's number; 0 when it is our own refusal."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class PoolFull(PoolError):
    """No room for the object; evict something, or do without the store."""


class PoolMissing(PoolError):
    """No such object: never written, removed, or lost with the process that lent the memory."""


class KeyExists(PoolError):
    """The key has been written, or is being written. Objects are immutable: use a new epoch."""


class SizeMismatch(PoolError):
    """The object is shorter or longer than what was asked for: truncated, or not the one that was meant."""


class PoolUnavailable(PoolError, TimeoutError):
    """The store, or the process that holds the object, did not answer in time."""


class PoolClosed(PoolError):
    """Used after close."""


@dataclass(frozen=True)
class Placement:
    """Where an object lies."""

    key: str
    nbytes: int
    segment: str
    """Name of the segment; begins with @ when it belongs to somebody whose full name this pool does not know."""
    preferred: bool
    """True: where it was asked to lie, or nothing was asked."""


@dataclass(frozen=True)
class Reservation:
    """Room for an object that is being written."""

    key: str
    nbytes: int
    preferred_segment: str


class Pool(ABC):
    """See the module's description. Safe to use from several threads."""

    @property
    @abstractmethod
    def segment_name(self) -> str:
        """Name under which others ask for placement in the memory that this pool lends; empty: it lends none."""

    @property
    @abstractmethod
    def available(self) -> bool:
        """Whether calls have a chance now: False while the store is known to be away, and after close."""

    @abstractmethod
    def register(self, buffer: Bytes) -> None:
        """Make memory usable as buffers. It must stay alive until `unregister` or `close`."""

    @abstractmethod
    def unregister(self, buffer: Bytes) -> None:
        """Undo `register`. Never raises."""

    @abstractmethod
    def reserve(
        self, key: str, nbytes: int, preferred_segment: str = "", timeout: float | None = None
    ) -> Reservation:
        """Take room, in the preferred segment when there is. Raises PoolFull, KeyExists, PoolUnavailable."""

    @abstractmethod
    def write(self, reservation: Reservation, pieces: Pieces, timeout: float | None = None) -> None:
        """Write pieces of a reserved object. Raises PoolUnavailable, SizeMismatch for a piece outside it."""

    @abstractmethod
    def seal(self, reservation: Reservation, timeout: float | None = None) -> Placement:
        """Make the object readable. Raises PoolUnavailable, PoolMissing when the reservation has been lost."""

    @abstractmethod
    def cancel(self, reservation: Reservation) -> None:
        """Give the room back, whatever has been written. Never raises."""

    def put(
        self,
        key: str,
        buffers: Sequence[Bytes],
        preferred_segment: str = "",
        timeout: float | None = None,
    ) -> Placement:
        """Write a whole object from buffers that follow one another in it. Raises what its three steps raise."""
        pieces: list[tuple[int, Bytes]] = []
        nbytes = 0
        for buffer in buffers:
            pieces.append((nbytes, buffer))
            nbytes += buffer.nbytes
        reservation = self.reserve(key, nbytes, preferred_segment, timeout)
        try:
            self.write(reservation, pieces, timeout)
            return self.seal(reservation, timeout)
        except BaseException:
            self.cancel(reservation)
            raise

    def reserve_all(self, wanted: Sequence[Reservation], timeout: float | None = None) -> None:
        """Take room for several objects: for all of them, or for none. Raises what `reserve` raises."""
        done: list[Reservation] = []
        try:
            for one in wanted:
                done.append(self.reserve(one.key, one.nbytes, one.preferred_segment, timeout))
        except BaseException:
            for one in done:
                self.cancel(one)
            raise

    def complete(
        self, last: Sequence[tuple[Reservation, Pieces]], timeout: float | None = None
    ) -> list[Placement]:
        """Write what is left of several reserved objects, and seal them. Raises what `write` and `seal` raise.

        When it raises, some of them may have been sealed: cancel all, and remove their keys.
        """
        for reservation, pieces in last:
            self.write(reservation, pieces, timeout)
        return [self.seal(reservation, timeout) for reservation, _ in last]

    @contextlib.contextmanager
    def at_home(self, keys: Sequence[str], timeout: float | None = None) -> Iterator[dict[str, Bytes]]:
        """Of these objects, those that lie in the memory that this pool lends: their bytes, where they lie, read-only.

        For the time of a `with`. As with any read, what lies there may become another object's: copy, then check the
        copy. Raises PoolUnavailable.
        """
        yield {}

    @abstractmethod
    def get_into(self, key: str, buffers: Sequence[Bytes], timeout: float | None = None) -> None:
        """Read a whole object into buffers that together have its size.

        Raises PoolMissing, SizeMismatch, PoolUnavailable; the buffers then hold anything.
        """

    @abstractmethod
    def get_ranges(self, key: str, pieces: Pieces, timeout: float | None = None) -> None:
        """Read parts of an object. Raises PoolMissing, SizeMismatch for a part outside it, PoolUnavailable."""

    @abstractmethod
    def remove(self, keys: Sequence[str], timeout: float | None = None) -> list[str]:
        """Remove objects, pinned or not; those that are not there count as removed.

        Returns the keys that could not be removed yet (a dead writer's half-written object); try them again later.
        Raises PoolUnavailable.
        """

    @abstractmethod
    def size(self, key: str, timeout: float | None = None) -> int:
        """Bytes of an object. Raises PoolMissing, PoolUnavailable."""

    @abstractmethod
    def busy(self, buffer: Bytes) -> bool:
        """Whether a call that outlived its deadline may still touch this memory."""

    @abstractmethod
    @contextlib.contextmanager
    def staging(self, nbytes: int, timeout: float) -> Iterator[Bytes]:
        """Registered memory for the time of a `with`. Raises PoolUnavailable when none is free in time."""

    @abstractmethod
    def close(self, timeout: float = 5.0) -> None:
        """Give everything back, within `timeout` seconds. Never raises; every later call raises PoolClosed."""
