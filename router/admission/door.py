# SPDX-License-Identifier: Apache-2.0
"""The door: a request enters, waits, or is refused at once. docs/overload.md has the protocol.

Everything runs on one event loop. What a request takes (a slot, a place in the queue, its key's counts) is given back
by its `Permit`, or by the exception that ends its wait, whatever that is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from router.admission.fair_queue import FairQueue
from router.admission.keys import Key
from router.admission.pace import Pace

MAX_TRACKED = 4096
"""Keys without a request of which the rate is remembered."""


PROMPT_SEEN: ContextVar[Callable[[int], None] | None] = ContextVar("PROMPT_SEEN", default=None)
"""Set by the gateway while it serves a request; whoever tokenises the prompt calls it with the number of tokens."""


class Refused(Exception):
    """A request that does not enter. `retry_after`: whole seconds, 0: no use in saying."""

    def __init__(self, status: int, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


@dataclass(eq=False)
class _Waiting:
    future: asyncio.Future[None]
    deadline: float


@dataclass
class _Counts:
    running: int = 0
    tokens: float = 0.0
    """Of the rate's bucket; one a request, at most a second's worth."""
    filled: float = 0.0


class Permit:
    """A slot; `leave` gives it back, once however often it is called."""

    def __init__(self, door: Door, key: Key, cost: float, entered: float) -> None:
        self._door, self.key, self.cost, self.entered = door, key, cost, entered
        self._first = self._left = False

    def first_byte(self) -> None:
        """The answer has begun."""
        if not self._first:
            self._first = True
            self._door.pace.first(self._door.clock() - self.entered)

    def leave(self) -> None:
        """The request has ended, however it did."""
        if not self._left:
            self._left = True
            self._door._leave(self)


class Door:
    """See the module's description. `slots()` says how many requests may be inside now."""

    def __init__(
        self,
        slots: Callable[[], int],
        max_queued: int,
        slo: float = 0.0,
        nobody_wait: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slo`: seconds to the first token for requests that name no deadline; 0: none. `nobody_wait`: seconds."""
        self._slots, self._max_queued, self._slo, self.clock = slots, max_queued, slo, clock
        self._nobody_wait = nobody_wait
        self._nobody_timer: asyncio.TimerHandle | None = None
        self.pace = Pace()
        self.inside = 0
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._counts: dict[str, _Counts] = {}

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    async def enter(
        self, key: Key, cost: float, priority: int | None = None, deadline: float | None = None
    ) -> Permit:
        """Return when the request may go on. Raises Refused.

        `cost` in tokens; `priority` smaller is sooner, never more urgent than the key allows; `deadline` seconds from
        now to the first token, None: the configured one.
        """
        now = self.clock()
        counts = self._admit(key, now)
        try:
            limit = deadline if deadline is not None else self._slo or math.inf
            urgency = max(key.priority, key.priority if priority is None else priority)
            if self.inside >= self._slots() or self._queue:
                await self._wait(key, cost, urgency, limit, now)
            else:
                self._in_time(0.0, limit)
                self.inside += 1
        except BaseException:
            counts.running -= 1
            raise
        return Permit(self, key, cost, self.clock())

    def pump(self) -> None:
        """Let in what there is room for; to be called when workers have come or gone."""
        now = self.clock()
        if not self._slots() and self._queue and self._nobody_timer is None:
            loop = asyncio.get_running_loop()
            self._nobody_timer = loop.call_later(self._nobody_wait, self._nobody)
        while self.inside < self._slots():
            waiting = self._queue.pop()
            if waiting is None:
                return
            if waiting.future.done():
                continue
            if now + self.pace.first_token > waiting.deadline:
                # It would be late: the slot goes to one that is not.
                waiting.future.set_exception(self._late(0.0, waiting.deadline - now))
                continue
            self.inside += 1
            waiting.future.set_result(None)

    # ---- inside

    def _admit(self, key: Key, now: float) -> _Counts:
        """Count a request of a key. Raises Refused when the key has reached a limit of its own."""
        counts = self._counts.get(key.name)
        if counts is None:
            if len(self._counts) >= MAX_TRACKED:
                self._counts = {name: held for name, held in self._counts.items() if held.running}
            counts = self._counts[key.name] = _Counts(tokens=max(1.0, key.requests_per_second), filled=now)
        if key.concurrency and counts.running >= key.concurrency:
            raise Refused(429, f"{key.name} has {counts.running} requests under way, its limit", 1)
        rate = key.requests_per_second
        if rate:
            counts.tokens = min(max(1.0, rate), counts.tokens + (now - counts.filled) * rate)
            counts.filled = now
            if counts.tokens < 1:
                wait = math.ceil((1 - counts.tokens) / rate)
                raise Refused(429, f"{key.name} may send {rate:g} requests a second", wait)
            counts.tokens -= 1
        counts.running += 1
        return counts

    async def _wait(self, key: Key, cost: float, priority: int, limit: float, now: float) -> None:
        if len(self._queue) >= self._max_queued:
            wait = self.pace.wait(self._queue.cost)
            raise Refused(429, f"{len(self._queue)} requests wait already", max(1, math.ceil(wait)))
        self._in_time(self._queue.ahead(key, priority) + cost if self._slots() else 0.0, limit)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), now + limit)
        self._queue.push(waiting, key, cost, priority)
        self.pump()
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                await waiting.future
        except TimeoutError:
            self._give_up(waiting)
            raise self._late(0.0, limit) from None
        except BaseException:
            self._give_up(waiting)
            raise

    def _nobody(self) -> None:
        """Nobody has served for `nobody_wait` seconds, unless somebody does now."""
        self._nobody_timer = None
        if self._slots():
            self.pump()
            return
        while (waiting := self._queue.pop()) is not None:
            if not waiting.future.done():
                message = "no decode worker is reachable; GET /health says what is missing"
                waiting.future.set_exception(Refused(503, message, 1))

    def _give_up(self, waiting: _Waiting) -> None:
        """The waiter goes; a slot that it was just given goes to the next."""
        given = waiting.future.done() and not waiting.future.cancelled() and not waiting.future.exception()
        if not self._queue.remove(waiting) and given:
            self.inside -= 1
            self.pump()

    def _in_time(self, ahead: float, limit: float) -> None:
        predicted = self.pace.until_first_token(ahead)
        if predicted > limit:
            raise self._late(predicted, limit)

    def _late(self, predicted: float, limit: float) -> Refused:
        if predicted:
            text = f"the first token would come after {predicted:.1f} s, later than {limit:.1f} s"
            return Refused(429, text, max(1, math.ceil(predicted - limit)))
        return Refused(429, "no slot came free in time", max(1, math.ceil(self.pace.wait(self._queue.cost))))

    def _leave(self, permit: Permit) -> None:
        self.inside -= 1
        self._counts[permit.key.name].running -= 1
        self.pace.left(permit.cost, self.clock(), bool(self._queue))
        self.pump()
