# SPDX-License-Identifier: Apache-2.0
"""A ledger for synchronous code: an event loop that runs while something is asked of it, on the thread that asks.

A worker's service has its ledger in the loop that hears of a publish, so no change of threads belongs to a handoff.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from statestore.ledger import Ledger

T = TypeVar("T")

SECONDS = 30.0
"""What one call may take."""


class LedgerLoop:
    """`loop.run(loop.ledger.commit(record))` blocks until it is done. Belongs to one thread."""

    def __init__(self, make: Callable[[], Ledger]) -> None:
        """`make` runs inside the loop. Raises what it raises."""
        self._loop = asyncio.new_event_loop()

        async def build() -> Ledger:
            return make()

        self.ledger = self.run(build())

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop. Raises what it raises, TimeoutError after `SECONDS`."""
        return self._loop.run_until_complete(asyncio.wait_for(coro, SECONDS))

    def close(self) -> None:
        """Close the ledger and the loop."""
        self.run(self.ledger.close())
        self._loop.close()
