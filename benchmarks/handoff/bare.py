# SPDX-License-Identifier: Apache-2.0
"""The peer: Mooncake's own batch put and get, and nothing else.

A client of its own on either side, memory registered once and touched before, one batch call for all objects, no
digest, no check, no cache, no record. The objects are those that the handoff writes (KDA state, MLA rows), pinned, in
one replica, in memory that the reading client lends, as the handoff prefers it: the put crosses the transport, the get
does not.
"""

from __future__ import annotations

import itertools
import mmap
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltaserve.config import StoreConfig

_PATTERN = 0x5B


class BareError(RuntimeError):
    """Mooncake did not do what was asked; the message has its numbers."""


class Bare:
    """One client."""

    def __init__(self, config: StoreConfig, lend: bool) -> None:
        """Connects. `lend`: lend the store `StoreConfig.segment_bytes`. Raises BareError."""
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            config.hostname,
            config.metadata,
            config.segment_bytes if lend else 0,
            0,
            config.protocol,
            config.rdma_devices,
            config.master,
        )
        if code:
            raise BareError(f"set-up: code {code}")
        self._replicate = ReplicateConfig
        self._sizes: list[int] = []
        self._addresses: list[int] = []
        self._memory: list[npt.NDArray[np.uint8]] = []

    def take(self, sizes: Sequence[int]) -> None:
        """Have registered memory for objects of these sizes, one after the other. Raises BareError."""
        memory = np.frombuffer(mmap.mmap(-1, sum(sizes)), dtype=np.uint8)
        memory[:] = _PATTERN
        base = memory.__array_interface__["data"][0]
        if self._store.register_buffer(base, memory.nbytes):
            raise BareError("register_buffer failed")
        self._memory.append(memory)
        self._sizes = list(sizes)
        self._addresses = [base + at for at in itertools.accumulate([0, *sizes[:-1]])]

    @property
    def segment(self) -> str:
        """Name of the memory lent."""
        return str(self._store.get_hostname())

    def put(self, keys: list[str], segment: str) -> float:
        """Put every object; returns seconds. Raises BareError."""
        replicate = self._replicate()
        replicate.replica_num = 1
        replicate.with_hard_pin = True
        replicate.preferred_segment = segment
        began = time.monotonic()
        codes = self._store.batch_put_from(keys, self._addresses, self._sizes, replicate)
        seconds = time.monotonic() - began
        if any(codes):
            raise BareError(f"batch_put_from: codes {codes}")
        return seconds

    def get(self, keys: list[str]) -> float:
        """Get every object; returns seconds. Raises BareError."""
        began = time.monotonic()
        done = self._store.batch_get_into(keys, self._addresses, self._sizes)
        seconds = time.monotonic() - began
        if list(done) != self._sizes:
            raise BareError(f"batch_get_into: {done} of {self._sizes} bytes")
        return seconds

    def remove(self, keys: list[str]) -> None:
        """Remove objects. Raises BareError."""
        codes = self._store.batch_remove(keys, True)
        if any(codes):
            raise BareError(f"batch_remove: codes {codes}")

    def close(self) -> None:
        """Leave the store."""
        self._store.close()
