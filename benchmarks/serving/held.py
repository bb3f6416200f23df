# SPDX-License-Identifier: Apache-2.0
"""Something that takes long to start, started and kept by a thread of its own: several of them start at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """A context that its thread enters, holds and leaves: what ends with the thread that began it stays till then."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._made: Future[T] = Future()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(make,), daemon=True)
        self._thread.start()

    def value(self) -> T:
        """What the context gives, once it has been entered; raises what entering it has raised."""
        return self._made.result()

    def close(self, timeout: float) -> None:
        """Leave the context, and return when it has been left, or after `timeout` seconds."""
        self._end.set()
        self._thread.join(timeout)

    def _hold(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        try:
            with make() as value:
                self._made.set_result(value)
                self._end.wait()
        except BaseException as error:
            if self._made.done():
                raise
            self._made.set_exception(error)
