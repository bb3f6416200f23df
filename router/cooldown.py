# SPDX-License-Identifier: Apache-2.0
"""Leave a worker out for a while after failures in a row."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

THRESHOLD = 3
"""Failures in a row before a worker is left out."""
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 10.0


class Named(Protocol):
    """A worker."""

    @property
    def worker_id(self) -> str: ...


W = TypeVar("W", bound=Named)


@dataclass
class _Record:
    failures: int = 0
    until: float = 0.0


class Cooldown:
    """Counts failures in a row by worker. After the pause one attempt is let through; a failure doubles the pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def allows(self, worker_id: str) -> bool:
        """True unless the worker is being left out."""
        record = self._records.get(worker_id)
        return record is None or self._clock() >= record.until

    def allowed(self, workers: list[W]) -> list[W]:
        """Those workers that are not being left out."""
        return [w for w in workers if self.allows(w.worker_id)] if self._records else workers

    def failed(self, worker_id: str) -> None:
        """The worker failed once more."""
        record = self._records.setdefault(worker_id, _Record())
        record.failures += 1
        if record.failures >= THRESHOLD:
            doublings = min(record.failures - THRESHOLD, 8)
            record.until = self._clock() + min(FIRST_SECONDS * 2**doublings, LONGEST_SECONDS)

    def forget(self, worker_id: str) -> None:
        """The worker succeeded, or is a new one."""
        self._records.pop(worker_id, None)
