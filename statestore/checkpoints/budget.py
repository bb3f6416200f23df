# SPDX-License-Identifier: Apache-2.0
"""How many bytes one worker keeps in the store: publishes on their way, boundaries that are read, checkpoints.

Every worker may use as much as it lends, so that all of them together fit; its checkpoints have a limit of their own.
A publish is admitted before its prefill starts, by the bytes that its geometry says, and counted by what was written
once that is known.
"""

from __future__ import annotations

from collections.abc import Mapping

from statestore.boundary import BoundaryRecord
from statestore.geometry import Geometry
from statestore.reshard import stored_row_bytes


def publish_bytes(geometry: Geometry, base: int, length: int, checkpoints: int = 0) -> int:
    """Bytes that a publish of the tokens [base, length) with so many checkpoints on the way writes."""
    sizes = geometry.sizes
    return (1 + checkpoints) * sizes.kda + (length - base) * stored_row_bytes(geometry)


class Budget:
    """See the module's description. Plain bookkeeping."""

    def __init__(self, capacity: int, checkpoint_limit: int) -> None:
        """Bytes that this worker may have in the store, and of them in checkpoints."""
        self.capacity, self.checkpoint_limit = capacity, checkpoint_limit
        self._held: dict[str, int] = {}
        self._promised: dict[str, int] = {}
        self._checkpoints: dict[str, BoundaryRecord] = {}
        self._checkpoint_bytes = 0

    @property
    def checkpoints(self) -> Mapping[str, BoundaryRecord]:
        """This worker's own, by id."""
        return self._checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the checkpoints."""
        return self._checkpoint_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of publishes on their way, and of boundaries that belong to requests."""
        return sum(self._held.values())

    @property
    def used(self) -> int:
        """Bytes of everything."""
        return self.held_bytes + self._checkpoint_bytes

    def hold(self, name: str, nbytes: int, kept: int = 0) -> None:
        """Something takes bytes, or takes another number of them now; `kept` of them will be checkpoints."""
        self._held[name] = nbytes
        self._promised[name] = kept

    def free(self, name: str) -> None:
        """It is gone."""
        self._held.pop(name, None)
        self._promised.pop(name, None)

    def held(self, name: str) -> int:
        """Bytes that it takes."""
        return self._held.get(name, 0)

    def keep(self, record: BoundaryRecord) -> None:
        """A checkpoint of this worker was committed."""
        if record.id not in self._checkpoints:
            self._checkpoints[record.id] = record
            self._checkpoint_bytes += record.nbytes

    def drop(self, boundary: str) -> None:
        """A checkpoint of this worker is gone."""
        record = self._checkpoints.pop(boundary, None)
        if record is not None:
            self._checkpoint_bytes -= record.nbytes

    def fits(self, nbytes: int) -> bool:
        """Whether so many bytes more are within the capacity."""
        return self.used + nbytes <= self.capacity

    def excess(self, nbytes: int = 0, kept: int = 0) -> int:
        """Bytes of checkpoints that have to go so that `nbytes` more fit, `kept` of them as checkpoints."""
        over_limit = self._checkpoint_bytes + sum(self._promised.values()) + kept - self.checkpoint_limit
        return max(over_limit, self.used + nbytes - self.capacity, 0)
