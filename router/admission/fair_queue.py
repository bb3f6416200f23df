# SPDX-License-Identifier: Apache-2.0
"""Who is next: by priority, then by start-time fair queuing between keys.

Start-time fair queuing (Goyal, Vin, Chen 1996): an item of a key starts at max(virtual time, where the key's last item
finishes) and finishes `cost / weight` later; the item with the smallest start is next, and virtual time is the start of
the item that was taken last. So keys that wait share in proportion to their weights, whatever each of them sends, and a
key that was silent has saved nothing up.
"""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

from router.admission.keys import Key

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items with a key, a cost and a priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, T]] = []
        self._costs: dict[T, float] = {}
        self._finish: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._key_of: dict[T, str] = {}
        self._virtual = 0.0
        self._order = count()
        self.cost = 0.0
        """Of all that waits."""

    def push(self, item: T, key: Key, cost: float, priority: int) -> None:
        """Add an item, which must be hashable and not be here."""
        start = max(self._virtual, self._finish.get(key.name, 0.0))
        self._finish[key.name] = start + cost / key.weight
        heapq.heappush(self._heap, (priority, start, next(self._order), item))
        self._costs[item], self._key_of[item] = cost, key.name
        self._waiting[key.name] = self._waiting.get(key.name, 0) + 1
        self.cost += cost

    def pop(self) -> T | None:
        """Take the next item; None when nothing waits."""
        while self._heap:
            _, start, _, item = heapq.heappop(self._heap)
            if item in self._costs:
                self._virtual = max(self._virtual, start)
                self._forget(item)
                return item
        return None

    def remove(self, item: T) -> bool:
        """Take an item out, wherever it is. Returns whether it was here."""
        if item not in self._costs:
            return False
        self._forget(item)
        return True

    def ahead(self, key: Key, priority: int) -> float:
        """Cost of what would be served before an item that `key` pushed now. Takes time in proportion to the queue."""
        start = max(self._virtual, self._finish.get(key.name, 0.0))
        return sum(
            self._costs[item]
            for other, begins, _, item in self._heap
            if item in self._costs and (other, begins) <= (priority, start)
        )

    def __len__(self) -> int:
        return len(self._costs)

    def _forget(self, item: T) -> None:
        self.cost = max(0.0, self.cost - self._costs.pop(item))
        name = self._key_of.pop(item)
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name]
            if self._finish[name] <= self._virtual:
                del self._finish[name]  # a key that was served in full starts afresh
        if not self._costs:
            self._heap.clear()
            self._finish.clear()
            self.cost = self._virtual = 0.0
