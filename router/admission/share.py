# SPDX-License-Identifier: Apache-2.0
"""What a door shares with the doors of other processes of the same router. This one is alone, and shares nothing.

router/processes/tally.py has the other one. Both are asked on every request, so nothing here waits.
"""

from __future__ import annotations

import contextlib
import math


class Counts:
    """What a key has under way, and its bucket of requests a second."""

    def __init__(self) -> None:
        self.running = 0
        """Requests of this process."""
        self._tokens, self._filled = 0.0, -math.inf

    @property
    def everywhere(self) -> int:
        """Requests under way in all processes."""
        return self.running

    def add(self, number: int) -> None:
        """Count requests of this process."""
        self.running += number

    def refill(self, rate: float, now: float) -> float:
        """Tokens in the bucket now: one a request, at most a second's worth; a new bucket is full."""
        return min(max(1.0, rate), self._tokens + max(0.0, now - self._filled) * rate)

    def keep(self, tokens: float, now: float) -> None:
        """So many are left in the bucket."""
        self._tokens, self._filled = tokens, now

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Between a check and what it allows, nobody else may come."""
        return contextlib.nullcontext()


class Share:
    """See the module's description."""

    def counts(self, name: str) -> Counts:
        """The counts of a key that has just been met for the first time."""
        return Counts()

    def note(self, inside: int, queued: int) -> None:
        """Requests that this door has let in, and that wait at it."""

    def queued(self, own: int) -> int:
        """Requests that wait at all doors, `own` of them at this one."""
        return own

    def room(self, inside: int, slots: int) -> bool:
        """Whether this door may let in one more, of `slots` for all; it has let in `inside`."""
        return inside < slots

    def freed(self, slots: int) -> None:
        """This door has let in what it may. Where a place is left, those at other doors may look."""
