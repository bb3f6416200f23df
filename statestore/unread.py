# SPDX-License-Identifier: Apache-2.0
"""Boundaries of requests that lie in one worker's memory, or may come to lie there: what it must not take with it.

A prefill worker writes into the memory of the decode worker that is to read. When that one drains, such boundaries are
read by others, from its memory. Checkpoints do not count: they are a cache.
"""

from __future__ import annotations

from collections.abc import Collection

from statestore.ledger import Ledger


class Unread:
    """Counts them. The first count should come when routers know that the worker drains."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._begun: frozenset[str] | None = None

    async def count(self, segments: Collection[str]) -> int:
        """Boundaries that lie in these segments of the store, and publishes that may still end there.

        Those are the ones that were under way at the first count.

        Raises LedgerError, ConnectionError or TimeoutError.
        """
        records = [record for record in await self._ledger.list() if not record.reusable]
        pending = frozenset(record.id for record in records if record.state == "pending")
        if self._begun is None:
            self._begun = pending
        endpoints = {_endpoint(name) for name in segments}
        here = sum(
            any(_endpoint(entry.segment) in endpoints for entry in record.objects())
            for record in records
            if record.state == "committed"
        )
        return here + len(self._begun & pending)


def _endpoint(segment: str) -> str:
    """Of `name@endpoint`, what is known of a segment even where its name is not."""
    return segment.rpartition("@")[2]
