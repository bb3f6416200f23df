# SPDX-License-Identifier: Apache-2.0
"""Calls into a library that may block for longer than anybody wants to wait.

Each call runs on a thread of ours, and the caller waits for it as long as its deadline says. A call that outlives its
deadline is *late*: its thread is replaced by a fresh one, so that late calls do not use up the threads, and the memory
it was given counts as busy until it ends. When too many calls are late, new ones are refused at once instead of piling
up. Threads are daemons: one that never comes back does not keep the process from ending.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from statestore.pool import Bytes, PoolClosed, PoolUnavailable, extent

T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    work: Callable[[], Any]
    buffers: tuple[tuple[int, int], ...]
    """(first address, one past the last) of the memory that the call is given."""
    future: Future[Any] = field(default_factory=Future)


class BoundedCalls:
    """See the module's description. Safe to use from several threads."""

    def __init__(self, name: str, threads: int = 4, most_late: int = 16) -> None:
        self._name, self._threads, self._most_late = name, threads, most_late
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._offered = threading.Condition(lock)
        """A call waits for a thread, or there will be none any more. Only idle threads listen: a call that ends has
        nothing to say to them, and one that they all wake up for is a call that its caller hears of later."""
        self._pending: deque[_Job] = deque()
        self._running: set[_Job] = set()
        self._late: set[_Job] = set()
        self._workers = 0
        self._idle = 0
        self._closed = False

    def run(self, what: str, work: Callable[[], T], timeout: float, buffers: Sequence[Bytes] = ()) -> T:
        """Run `work` and return its result. Raises what it raises, and PoolUnavailable after `timeout` seconds."""
        job = _Job(work, tuple(extent(buffer) for buffer in buffers))
        with self._changed:
            if self._closed:
                raise PoolClosed(f"{what}: the pool has been closed")
            if len(self._late) >= self._most_late:
                raise PoolUnavailable(
                    f"{what}: {len(self._late)} earlier calls have not come back; not tried"
                )
            self._pending.append(job)
            self._staff()
            self._offered.notify()
        try:
            return job.future.result(max(timeout, 0.0))
        except TimeoutError:
            # The deadline's, or one that `work` raised.
            if self._give_up(job):
                raise PoolUnavailable(f"{what}: no answer within {timeout:.3g} s") from None
        return job.future.result()

    @property
    def late(self) -> int:
        """Calls that outlived their deadline and have not ended."""
        with self._changed:
            return len(self._late)

    def busy(self, buffer: Bytes) -> bool:
        """Whether a late call may touch this memory."""
        first, last = extent(buffer)
        with self._changed:
            return any(first < end and start < last for job in self._late for start, end in job.buffers)

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Work of the caller's own that counts as a call that runs: `drained` and `close` wait for it."""
        job = _Job(lambda: None, ())
        with self._changed:
            if self._closed:
                raise PoolClosed(f"{what}: the pool has been closed")
            self._running.add(job)
        try:
            yield
        finally:
            with self._changed:
                self._running.discard(job)
                self._changed.notify_all()

    def drained(self) -> Callable[[], bool]:
        """A question: have all calls that run at this moment ended?"""
        with self._changed:
            running = set(self._running)

        def ended() -> bool:
            with self._changed:
                return not running & self._running

        return ended

    def close(self, timeout: float) -> bool:
        """Refuse further calls and wait for those that run. Returns whether all of them have ended."""
        with self._changed:
            self._closed = True
            self._offered.notify_all()
            return self._changed.wait_for(lambda: not self._running and not self._pending, timeout)

    # ---- inside

    def _staff(self) -> None:
        """Start a thread when jobs wait and there may be one more. Called under the lock."""
        if len(self._pending) > self._idle and self._workers < self._threads:
            self._workers += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _give_up(self, job: _Job) -> bool:
        """Stop waiting for a job; False when it has ended meanwhile."""
        with self._changed:
            if job in self._pending:
                self._pending.remove(job)
                return True
            if job not in self._running:
                return False
            self._late.add(job)
            # Its thread no longer counts and will end with it; another takes its place.
            self._workers -= 1
            self._staff()
            return True

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._offered.wait_for(lambda: self._pending or self._closed)
                self._idle -= 1
                if not self._pending:
                    self._workers -= 1
                    return
                job = self._pending.popleft()
                self._running.add(job)
            result, error = None, None
            try:
                result = job.work()
            except BaseException as caught:
                error = caught
            with self._changed:
                self._running.discard(job)
                was_late = job in self._late
                self._late.discard(job)
                self._changed.notify_all()
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            if was_late:
                return
