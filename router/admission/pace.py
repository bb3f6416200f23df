# SPDX-License-Identifier: Apache-2.0
"""How long a request will wait: learned from the pace at which slots come free, and from first tokens seen lately.

While something waits, what leaves makes room: the pace is the cost that has left over the time that it took, averaged
over the last HORIZON seconds. While nothing waits a slot is there at once, and there is nothing to learn.
"""

from __future__ import annotations

from math import exp, inf

HORIZON = 20.0
"""Seconds after which an observation counts for a third."""
FIRST_TOKEN_WEIGHT = 0.1
BYTES_PER_TOKEN = 4.0
"""Of a body, before any prompt has been seen."""


class Pace:
    """All times are the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._seconds = 0.0
        self._since: float | None = None
        self.first_token = 0.0
        """Seconds from entering to the first byte of an answer, lately."""
        self.bytes_per_token = BYTES_PER_TOKEN

    def left(self, cost: float, now: float, waiting: bool) -> None:
        """A request of this cost has left its slot; `waiting`: another one was waiting for it."""
        if not waiting:
            self._since = None
            return
        if self._since is not None:
            passed = max(0.0, now - self._since)
            fade = exp(-passed / HORIZON)
            self._cost = self._cost * fade + cost
            self._seconds = self._seconds * fade + passed
        self._since = now

    def first(self, seconds: float) -> None:
        """A request that had entered got its first byte after so many seconds."""
        if not self.first_token:
            self.first_token = seconds
        else:
            self.first_token += FIRST_TOKEN_WEIGHT * (seconds - self.first_token)

    def seen(self, nbytes: int, tokens: int) -> None:
        """A body of so many bytes had a prompt of so many tokens."""
        if tokens > 0:
            self.bytes_per_token += FIRST_TOKEN_WEIGHT * (max(0.5, nbytes / tokens) - self.bytes_per_token)

    @property
    def per_second(self) -> float:
        """Cost that leaves in a second while others wait; 0: not known yet."""
        return self._cost / self._seconds if self._seconds > 0 else 0.0

    def wait(self, ahead: float) -> float:
        """Seconds until `ahead` has been served; 0 while nothing is known, since nobody is refused for a guess."""
        pace = self.per_second
        return ahead / pace if pace else 0.0

    def until_first_token(self, ahead: float) -> float:
        """Seconds that a request with `ahead` before it will wait for its first token."""
        return min(inf, self.wait(ahead) + self.first_token)
