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
from router.admission.share import Counts, Share

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


class Permit:
    """A slot; `leave` gives it back, once however often it is called."""

    def __init__(self, door: Door, key: Key, cost: float, entered: float, counts: Counts) -> None:
        self._door, self.key, self.cost, self.entered, self.counts = door, key, cost, entered, counts
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
        share: Share | None = None,
    ) -> None:
        """`slo`: seconds to the first token for requests that name no deadline; 0: none. `nobody_wait`: seconds.
        `share`: with the doors of other processes."""
        self._slots, self._max_queued, self._slo, self.clock = slots, max_queued, slo, clock
        self._nobody_wait = nobody_wait
        self._nobody_timer: asyncio.TimerHandle | None = None
        self.pace = Pace()
        self.inside = 0
        self._queue: FairQueue[_Waiting] = FairQueue()
        self._share = share or Share()
        self._counts: dict[str, Counts] = {}

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
            if self._queue or not self._share.room(self.inside, self._slots()):
                await self._wait(key, cost, urgency, limit, now)
            else:
                self._in_time(0.0, limit)
                self.inside += 1
                self._note()
        except BaseException:
            counts.add(-1)
            raise
        return Permit(self, key, cost, self.clock(), counts)

    def pump(self) -> None:
        """Let in what there is room for; to be called when workers have come or gone."""
        now, slots = self.clock(), self._slots()
        if not slots and self._queue and self._nobody_timer is None:
            loop = asyncio.get_running_loop()
            self._nobody_timer = loop.call_later(self._nobody_wait, self._nobody)
        while self._queue and self._share.room(self.inside, slots):
            waiting = self._queue.pop()
            if waiting is None:
                break
            if waiting.future.done():
                continue
            if now + self.pace.first_token > waiting.deadline:
                # It would be late: the slot goes to one that is not.
                waiting.future.set_exception(self._late(0.0, waiting.deadline - now))
                continue
            self.inside += 1
            self._note()
            waiting.future.set_result(None)
        self._note()
        self._share.freed(slots)

    # ---- inside

    def _note(self) -> None:
        self._share.note(self.inside, len(self._queue))

    def _admit(self, key: Key, now: float) -> Counts:
        """Count a request of a key. Raises Refused when the key has reached a limit of its own."""
        counts = self._counts.get(key.name)
        if counts is None:
            if len(self._counts) >= MAX_TRACKED:
                self._counts = {name: held for name, held in self._counts.items() if held.running}
            counts = self._counts[key.name] = self._share.counts(key.name)
        rate = key.requests_per_second
        if not rate and not key.concurrency:
            counts.add(1)
            return counts
        with counts.locked():
            if key.concurrency and (running := counts.everywhere) >= key.concurrency:
                raise Refused(429, f"{key.name} has {running} requests under way, its limit", 1)
            if rate:
                tokens = counts.refill(rate, now)
                if tokens < 1:
                    counts.keep(tokens, now)
                    wait = math.ceil((1 - tokens) / rate)
                    raise Refused(429, f"{key.name} may send {rate:g} requests a second", wait)
                counts.keep(tokens - 1, now)
            counts.add(1)
        return counts

    async def _wait(self, key: Key, cost: float, priority: int, limit: float, now: float) -> None:
        if (queued := self._share.queued(len(self._queue))) >= self._max_queued:
            wait = self.pace.wait(self._queue.cost)
            raise Refused(429, f"{queued} requests wait already", max(1, math.ceil(wait)))
        self._in_time(self._queue.ahead(key, priority) + cost if self._slots() else 0.0, limit)
        waiting = _Waiting(asyncio.get_running_loop().create_future(), now + limit)
        self._queue.push(waiting, key, cost, priority)
        self._note()  # before another look for room: who frees a place meanwhile sees that somebody waits
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
        self._note()
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
        permit.counts.add(-1)
        self.pace.left(permit.cost, self.clock(), bool(self._queue))
        self.pump()
