# SPDX-License-Identifier: Apache-2.0
"""A ledger for synchronous code: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from statestore.ledger import Ledger

T = TypeVar("T")

SECONDS = 30.0
"""What one call may take."""


class LedgerLoop:
    """`loop.run(loop.ledger.commit(record))` blocks until it is done."""

    def __init__(self, make: Callable[[], Ledger]) -> None:
        """`make` runs inside the loop. Raises what it raises."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ledger", daemon=True)
        self._thread.start()

        async def build() -> Ledger:
            return make()

        self.ledger = self.run(build())

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop. Raises what it raises, TimeoutError after `SECONDS`."""
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result(SECONDS)

    def close(self) -> None:
        """Close the ledger, end the thread."""
        self.run(self.ledger.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
