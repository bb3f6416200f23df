# SPDX-License-Identifier: Apache-2.0
"""What workers are believed to hold of a prompt: the prefixes that they have computed or loaded, youngest first.

A belief: a worker may have dropped what it held. Then it computes more than was expected, and nothing is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from router.policy.base import PREFIX_UNIT, Prompt

PREFIXES_PER_WORKER = 4096
"""Prefixes remembered of each worker: a million tokens."""


class Warmth:
    """Prefixes by worker, and workers by prefix."""

    def __init__(self, capacity: int = PREFIXES_PER_WORKER) -> None:
        self._capacity = capacity
        self._of_worker: dict[str, OrderedDict[bytes, None]] = {}
        self._holders: dict[bytes, set[str]] = {}

    def add(self, worker_id: str, prompt: Prompt) -> None:
        """The worker holds this prompt now."""
        held = self._of_worker.setdefault(worker_id, OrderedDict())
        for prefix in prompt.prefixes:
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
        for number, prefix in enumerate(prompt.prefixes, 1):
            holders = self._holders.get(prefix)
            if holders is None:
                break  # whoever holds a longer prefix holds this one too, or has begun to drop it
            for worker_id in holders:
                found[worker_id] = number * PREFIX_UNIT
        return found

    def _drop(self, worker_id: str, prefix: bytes) -> None:
        holders = self._holders.get(prefix)
        if holders is not None:
            holders.discard(worker_id)
            if not holders:
                del self._holders[prefix]
