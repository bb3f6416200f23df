# SPDX-License-Identifier: Apache-2.0
"""Mooncake's Python client and its numbers, and nothing else: no deadlines, no states. See `statestore.mooncake_pool`.

Every method blocks as long as the library does, releases the interpreter lock while it does, and returns the library's
numbers: bytes or 0 when all went well, a negative code when not. The codes are those of Mooncake 0.3.13.

The library's own patience is 30 s for a master or a peer that has stopped. It reads its settings from the environment,
once a process; `setup` brings them near the configured timeout, where the operator has not set them, so that calls that
outlive our deadlines end soon after.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from deltaserve.config import StoreConfig
from statestore.pool import (
    Bytes,
    KeyExists,
    Pieces,
    PoolError,
    PoolFull,
    PoolMissing,
    PoolUnavailable,
    Reservation,
    extent,
)

FULL = -200
PARAMS = -600
ILLEGAL_CLIENT = -601
NOT_READY = -703
MISSING = -704
EXISTS = -705
TRANSFER = -800

_WORDS = {
    -1: "internal error",
    -101: "no segment",
    -103: "the master does not know this client",
    FULL: "no space",
    -400: "bad key",
    PARAMS: "bad parameters",
    ILLEGAL_CLIENT: "belongs to another client",
    NOT_READY: "being written",
    MISSING: "no such object",
    EXISTS: "exists",
    -706: "leased",
    -707: "lease expired",
    -714: "busy",
    TRANSFER: "transfer failed",
    -900: "no connection to the master",
    -901: "the master did not answer in time",
    -1010: "not possible in this state",
}

_LATER = {-101, -103, NOT_READY, -706, -707, -714, -1010}
"""Worth another try soon: a client that registers again, an object that is being finished, a lease that ends."""

_UNREACHABLE = {-900, -901}

PROBE_SECONDS = 15.0
"""What a probe may take; the import of the library is most of it."""


def _settings(config: StoreConfig) -> dict[str, str]:
    """Settings of the library that have no argument."""
    seconds = max(1, math.ceil(config.timeout))
    return {
        "MC_LOG_LEVEL": "WARNING",
        # Twenty by default, the interpreter lock held all the while: 90 s with a dead master. We try again ourselves.
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": str(seconds * 1000),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(seconds),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(seconds),
        "MC_TCP_ADMISSION_TIMEOUT_MS": str(seconds * 1000),
    }


def describe(code: int) -> str:
    """A code in words."""
    return f"{_WORDS.get(code, 'error')}, code {code}"


def is_later(code: int) -> bool:
    """Whether the same call may succeed soon."""
    return code in _LATER


def is_unreachable(code: int) -> bool:
    """Whether the code says that the master is away."""
    return code in _UNREACHABLE


def error_of(what: str, key: str, code: int) -> PoolError:
    """The error for a code."""
    kinds: dict[int, type[PoolError]] = {
        FULL: PoolFull,
        MISSING: PoolMissing,
        NOT_READY: PoolMissing,
        EXISTS: KeyExists,
        TRANSFER: PoolUnavailable,
        -101: PoolUnavailable,
        -103: PoolUnavailable,
        -707: PoolUnavailable,
        -714: PoolUnavailable,
        -900: PoolUnavailable,
        -901: PoolUnavailable,
        -1010: PoolUnavailable,
    }
    return kinds.get(code, PoolError)(f"{what} {key}: {describe(code)}", code)


class Client:
    """One client of the store. Nothing but `setup` may be called before it has returned 0, nothing after `close`."""

    def __init__(self) -> None:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._replicate = ReplicateConfig
        self._store: Any = MooncakeDistributedStore()
        self._name = ""
        self._endpoint = ""
        self._lent = (0, 0)
        self._leaves = True

    @property
    def segment_name(self) -> str:
        """`name@endpoint` of the memory lent; empty when there is none."""
        return f"{self._name}@{self._endpoint}" if self._endpoint else ""

    def setup(self, config: StoreConfig, segment_bytes: int) -> int:
        """Connect, and lend `segment_bytes` (0: none)."""
        for name, value in _settings(config).items():
            os.environ.setdefault(name, value)
        # With HA the library's close keeps the interpreter lock for 30 s: all threads of the process stand still.
        self._leaves = "://" not in config.master
        # No buffer of the library's own: every call here is zero-copy.
        code = self._store.setup(
            config.hostname,
            config.metadata,
            segment_bytes,
            0,
            config.protocol,
            config.rdma_devices,
            config.master,
        )
        if code == 0 and segment_bytes:
            self._name = str(self._store.get_hostname())
        return int(code)

    def learn_endpoint(self) -> None:
        """Find out how replicas name the memory lent: store a few bytes there and look."""
        if not self._name:
            return
        probe = np.ones(64, dtype=np.uint8)
        key = f"ds/probe/{uuid.uuid4().hex}"
        if self.register(probe):
            return
        try:
            if self.start(key, probe.nbytes, self._name) == 0:
                self.write(key, [(0, probe)])
                self.end(key)
                for replica in self._memory_replicas(key):
                    self._endpoint = str(replica.transport_endpoint)
                    self._lent = _mapping_of(int(replica.buffer_address))
                self.remove([key])
        finally:
            self.unregister(probe)

    def register(self, buffer: Bytes) -> int:
        """Announce memory."""
        return int(self._store.register_buffer(extent(buffer)[0], buffer.nbytes))

    def unregister(self, buffer: Bytes) -> int:
        """Take memory back."""
        return int(self._store.unregister_buffer(extent(buffer)[0]))

    def start(self, key: str, nbytes: int, preferred_segment: str) -> int:
        """Begin a put session: reserve the bytes, hard-pinned, one replica."""
        return self.start_all([Reservation(key, nbytes, preferred_segment)])[0]

    def start_all(self, wanted: Sequence[Reservation]) -> list[int]:
        """Begin several, one call a segment; one code a key."""
        codes: dict[str, int] = {}
        for segment in dict.fromkeys(one.preferred_segment for one in wanted):
            replicate = self._replicate()
            replicate.replica_num = 1
            replicate.with_hard_pin = True
            replicate.preferred_segment = segment.partition("@")[0]
            those = [one for one in wanted if one.preferred_segment == segment]
            keys = [one.key for one in those]
            found = self._store.batch_put_session_start(keys, [one.nbytes for one in those], replicate)
            codes.update(zip(keys, map(int, found), strict=True))
        return [codes[one.key] for one in wanted]

    def write(self, key: str, pieces: Pieces) -> int:
        """Write ranges inside a put session; returns bytes."""
        return self.write_all([(key, pieces)])[0]

    def write_all(self, parts: Sequence[tuple[str, Pieces]]) -> list[int]:
        """Write ranges inside several put sessions; bytes or a code a key."""
        if not parts:
            return []
        done = self._store.batch_put_from_multi_buffer_ranges(
            [key for key, _ in parts],
            [[extent(buffer)[0] for _, buffer in pieces] for _, pieces in parts],
            [[buffer.nbytes for _, buffer in pieces] for _, pieces in parts],
            [[offset for offset, _ in pieces] for _, pieces in parts],
        )
        return [int(count) for count in done]

    def end(self, key: str) -> int:
        """End a put session; the object is readable from here."""
        return self.end_all([key])[0]

    def end_all(self, keys: Sequence[str]) -> list[int]:
        """End several; one code a key."""
        return [int(code) for code in self._store.batch_put_session_end(list(keys))]

    def revoke(self, key: str) -> int:
        """End a put session without an object."""
        return int(self._store.batch_put_session_revoke([key])[0])

    def replica(self, key: str) -> tuple[int, str] | int:
        """(bytes, endpoint) of the object's replica, or a code."""
        for buffer in self._memory_replicas(key):
            return int(buffer.size), str(buffer.transport_endpoint)
        # An empty answer is a missing object as well as a master that is away.
        code = self.size(key)
        return code if code < 0 else MISSING

    def replicas(self, keys: Sequence[str]) -> dict[str, tuple[int, str]]:
        """(bytes, endpoint) of those of the objects that are there, in one call."""
        found = self._store.batch_get_replica_desc(list(keys))
        buffers = {key: _in_memory(replicas) for key, replicas in found.items()}
        return {
            key: (int(of_key[0].size), str(of_key[0].transport_endpoint))
            for key, of_key in buffers.items()
            if of_key
        }

    def local(self, keys: Sequence[str]) -> dict[str, Bytes]:
        """Those of the objects that lie in the memory that this client lends, in one call; see `_home`."""
        if self._lent[0] == self._lent[1]:
            return {}
        found = self._store.batch_get_replica_desc(list(keys))
        homes = {key: self._home(_in_memory(replicas)) for key, replicas in found.items()}
        return {key: home for key, home in homes.items() if home is not None}

    def read_whole(self, key: str, buffers: Sequence[Bytes]) -> int:
        """Read an object into buffers that follow one another; returns bytes."""
        local = self._local(key)
        if local is not None:
            ends = list(itertools.accumulate(buffer.nbytes for buffer in buffers))
            if local.nbytes != (ends[-1] if ends else 0):
                return PARAMS
            pieces = [(end - buffer.nbytes, buffer) for end, buffer in zip(ends, buffers, strict=True)]
            return _copy(local, pieces)
        return int(
            self._store.batch_get_into_multi_buffers(
                [key],
                [[extent(buffer)[0] for buffer in buffers]],
                [[buffer.nbytes for buffer in buffers]],
                False,
            )[0]
        )

    def read_ranges(self, key: str, pieces: Pieces) -> int:
        """Read ranges; returns bytes, or the code of the first that failed.

        The library sends ranges over the transport even where the object lies in this process's own memory, at a
        fifth of the speed of a copy: there they are copied here.
        """
        local = self._local(key)
        if local is not None:
            if any(offset + buffer.nbytes > local.nbytes for offset, buffer in pieces):
                return PARAMS
            return _copy(local, pieces)
        results = self._store.get_into_ranges(
            [extent(buffer)[0] for _, buffer in pieces],
            [[key]] * len(pieces),
            [[[0]]] * len(pieces),
            [[[offset]] for offset, _ in pieces],
            [[[buffer.nbytes]] for _, buffer in pieces],
        )
        counts = [int(count) for of_buffer in results for of_key in of_buffer for count in of_key]
        return next((count for count in counts if count < 0), sum(counts))

    def _memory_replicas(self, key: str) -> list[Any]:
        """Buffer descriptors of the replicas in memory."""
        return _in_memory(self._store.get_replica_desc(key))

    def _local(self, key: str) -> Bytes | None:
        """The object's bytes where they lie, when that is in the memory that this client lends; see `_home`."""
        if self._lent[0] == self._lent[1]:
            return None
        return self._home(self._memory_replicas(key))

    def _home(self, buffers: Sequence[Any]) -> Bytes | None:
        """The bytes of the first of these buffers that lies in the memory that this client lends.

        Another process may have had the same endpoint before, so the address is compared too. As with the library's
        own reads, what lies there may be another object's by the time it is read, if the object is being removed.
        """
        first, last = self._lent
        for buffer in buffers:
            address, nbytes = int(buffer.buffer_address), int(buffer.size)
            at_home = str(buffer.transport_endpoint) == self._endpoint
            if at_home and first <= address and address + nbytes <= last:
                return np.asarray(_Memory(address, nbytes))
        return None

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return int(self._store.get_size(key))

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove objects whether leased and pinned or not; one code a key."""
        return [int(code) for code in self._store.batch_remove(list(keys), True)]

    def health(self) -> int:
        """0: well; 2: the master is out of reach."""
        return int(self._store.health_check())

    def close(self) -> None:
        """Leave the store; what is lent goes. Blocks up to 20 s when the master is away.

        With HA nothing is done: the master misses this client when its time to live is over, as after a crash.
        """
        with contextlib.suppress(Exception):
            if self._leaves:
                self._store.close()


def _in_memory(replicas: Sequence[Any]) -> list[Any]:
    """Buffer descriptors of those replicas that lie in memory."""
    return [r.get_memory_descriptor().buffer_descriptor for r in replicas if r.is_memory_replica()]


class _Memory:
    """Memory as numpy takes it, read-only."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _copy(source: Bytes, pieces: Pieces) -> int:
    """Copy ranges; returns bytes. The interpreter lock is released meanwhile."""
    done = 0
    for offset, buffer in pieces:
        np.copyto(buffer, source[offset : offset + buffer.nbytes])
        done += buffer.nbytes
    return done


def _mapping_of(address: int) -> tuple[int, int]:
    """First address, and one past the last, of the mapping of this process that holds `address`; (0, 0): unknown."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            first, _, last = line.partition(" ")[0].partition("-")
            if int(first, 16) <= address < int(last, 16):
                return int(first, 16), int(last, 16)
    return 0, 0


def probe(config: StoreConfig) -> bool:
    """Whether the master takes new clients; asked in a process of its own, because a set-up cannot be interrupted."""
    command = [sys.executable, "-m", "statestore.mooncake_client", config.model_dump_json()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=PROBE_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


if __name__ == "__main__":
    code = Client().setup(StoreConfig.model_validate_json(sys.argv[1]), 0)
    # The library's threads need not end by themselves.
    os._exit(1 if code else 0)
