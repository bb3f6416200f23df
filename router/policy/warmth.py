# SPDX-License-Identifier: Apache-2.0
"""What workers are believed to hold of a prompt: the prefixes that they have computed or loaded, youngest first.

A belief: a worker may have dropped what it held. Then it computes more than was expected, and nothing is wrong.

Of two prefixes of one prompt the longer one is always the older one here, so it is forgotten first: whoever holds a
prefix holds all shorter ones. A look-up therefore ends at the first prefix that nobody holds, and where as many hold a
prefix as the next longer one, they are the same workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence

from router.policy.base import PREFIX_UNIT, Prompt, Worker

PREFIXES_PER_WORKER = 4096
"""Prefixes remembered of each worker: a million tokens."""


class Warmth:
    """Prefixes by worker, and workers by prefix."""

    def __init__(self, capacity: int = PREFIXES_PER_WORKER) -> None:
        self._capacity = capacity
        self._of_worker: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, set[str]] = {}

    def add(self, worker_id: str, prompt: Prompt) -> None:
        """The worker holds this prompt now."""
        held = self._of_worker.setdefault(worker_id, OrderedDict())
        for prefix in reversed(prompt.prefixes):
            if prefix in held:
                held.move_to_end(prefix)
                continue
            held[prefix] = None
            self._holders.setdefault(prefix, set()).add(worker_id)
        while len(held) > self._capacity:
            self._drop(worker_id, held.popitem(last=False)[0])

    def forget(self, worker_ids: Collection[str]) -> None:
        """These workers hold nothing."""
        for worker_id in worker_ids:
            for prefix in self._of_worker.pop(worker_id, ()):
                self._drop(worker_id, prefix)

    def tokens(self, prompt: Prompt) -> dict[str, int]:
        """Tokens of the prompt that each worker is believed to hold; workers that hold none are left out."""
        found: dict[str, int] = {}
        above: set[str] = set()
        length = 0
        for number in range(1, prompt.units + 1):
            holders = self._holders.get(prompt.prefix(number))
            if holders is None:
                break
            if len(holders) != len(above):
                for worker_id in above - holders:
                    found[worker_id] = length
            above, length = holders, number * PREFIX_UNIT
        for worker_id in above:
            found[worker_id] = length
        return found

    def _drop(self, worker_id: str, prefix: int) -> None:
        holders = self._holders.get(prefix)
        if holders is not None:
            holders.discard(worker_id)
            if not holders:
                del self._holders[prefix]


def warmest(workers: Sequence[Worker], warm: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """Of `Warmth.tokens`, what concerns these workers: the place of each that holds something, and its tokens."""
    if warm:
        for number, worker in enumerate(workers):
            if worker.worker_id in warm:
                yield number, warm[worker.worker_id]
