# SPDX-License-Identifier: Apache-2.0
"""A trace through two pools of workers, replica by replica, under a policy that sets their sizes.

    arrival ─▶ prefill worker with the fewest outstanding tokens, one prompt after another ─▶ handoff
            ─▶ decode worker with the fewest requests: waits for a slot and for room, then a token a step

A policy is asked every `INTERVAL` seconds with an `Observation` of the interval that ended, and answers with replicas.
More: workers start, and serve after `start_seconds`. Fewer: workers that still start are dropped first; then those
with the least work drain, which means that they take nothing new, finish what they hold, and end. A replica costs
from the decision that starts it until it has ended.

The decode worker is a fluid: all its running requests advance at one token a step, so one number, the tokens that each
has got since the beginning, orders all ends. Steps change only when a request comes or goes.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

from benchmarks.scaling.model import Slo, WorkerModel
from benchmarks.scaling.traces import Trace

INTERVAL = 5.0
"""Seconds between two decisions, of whichever policy."""


@dataclass(frozen=True)
class PoolView:
    """One pool at the end of an interval: what a cluster's metrics say."""

    ready: int
    starting: int
    draining: int
    requests: int
    """In the pool: waiting and running, on ready workers and on draining ones."""
    waiting: int
    queued_tokens: int
    """Prefill: prompt tokens not yet computed. Decode: those of requests that wait for a slot."""
    arrived_requests: int
    """During the interval."""
    arrived_tokens: int
    busy: float
    """Prefill: share of the interval that ready workers computed. Decode: share of slots taken, now."""
    kv_usage: float
    """Decode: share of the cache taken, now; prefill: 0."""
    latencies: tuple[float, ...]
    """Of requests in the interval. Prefill: seconds to the first token; decode: seconds a token."""


@dataclass(frozen=True)
class Observation:
    """Both pools."""

    now: float
    prefill: PoolView
    decode: PoolView


Policy = Callable[[Observation], tuple[int, int]]
"""Replicas of prefill and decode wanted from now on."""


@dataclass(frozen=True)
class Result:
    """What a policy made of a trace."""

    requests: int
    attained: float
    """Share of requests that met both limits."""
    ttft_met: float
    tpot_met: float
    gpu_hours: float
    ended_early: bool
    ttfts: list[float] = field(repr=False)
    tpots: list[float] = field(repr=False)
    sizes: list[tuple[float, int, int]] = field(repr=False)
    """(second, prefill, decode) replicas that cost, at each decision."""


State = Literal["starting", "ready", "draining", "ended"]


class _Prefill:
    def __init__(self, created: float) -> None:
        self.created = created
        self.state: State = "starting"
        self.queue: deque[int] = deque()
        self.outstanding = 0
        self.begun = -1.0
        """When the prompt at the head began; below 0: idle."""
        self.busy = 0.0
        """Seconds of computing since the last look."""

    @property
    def idle(self) -> bool:
        return not self.queue


class _Decode:
    def __init__(self, created: float) -> None:
        self.created = created
        self.state: State = "starting"
        self.running: list[tuple[float, int]] = []
        """Heap of (progress at which it ends, request)."""
        self.waiting: deque[int] = deque()
        self.progress = 0.0
        """Tokens that a request running since the beginning would have."""
        self.at = 0.0
        self.step = 0.0
        self.context = 0.0
        self.reserved = 0
        self.version = 0

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting


_Worker = TypeVar("_Worker", _Prefill, _Decode)


class Simulator:
    """One run. `policy` may keep state; make a new one for each run."""

    def __init__(
        self,
        trace: Trace,
        worker: WorkerModel,
        slo: Slo,
        policy: Policy,
        start: tuple[int, int],
        gpus: int = 1,
        most_violations: int | None = None,
    ) -> None:
        """`start`: replicas of prefill and decode that are ready at second 0.

        The run ends early after more than `most_violations` requests missed a limit.
        """
        self._most_violations = len(trace.arrivals) if most_violations is None else most_violations
        self._violations = 0
        self._trace, self._worker, self._slo, self._policy, self._gpus = trace, worker, slo, policy, gpus
        self._prefills = [_Prefill(0.0) for _ in range(start[0])]
        self._decodes = [_Decode(0.0) for _ in range(start[1])]
        for replica in (*self._prefills, *self._decodes):
            replica.state = "ready"
        self._ids = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        number = len(trace.arrivals)
        self._first = [0.0] * number
        self._end = [0.0] * number
        self._cost = 0.0
        """Replica-seconds of the replicas that have ended."""
        self._now = 0.0
        self._left = number
        self._ttfts: list[float] = []
        self._tpots: list[float] = []
        self._arrived = [0, 0]
        self._handed = [0, 0]
        self._sizes: list[tuple[float, int, int]] = []

    def run(self) -> Result:
        """Until the last request has its last token."""
        arrivals = self._trace.arrivals
        self._at(INTERVAL, self._decide)
        index, number = 0, len(arrivals)
        while self._left and not self._over():
            if index < number and (not self._events or arrivals[index] <= self._events[0][0]):
                self._arrive(arrivals[index], index)
                index += 1
                continue
            now, _, action = heapq.heappop(self._events)
            self._now = now
            action(now)
        finish = self._now if self._left else max(self._end, default=0.0)
        for replica in (*self._prefills, *self._decodes):
            self._cost += max(0.0, finish - replica.created)
        return self._result()

    def _over(self) -> bool:
        return self._violations > self._most_violations

    def _result(self) -> Result:
        if self._left:
            number = len(self._trace.arrivals)
            lost = self._violations / number
            hours = self._cost * self._gpus / 3600.0
            return Result(number, 1 - lost, 1.0, 1.0, hours, True, [], [], self._sizes)
        trace, slo = self._trace, self._slo
        ttfts = [first - arrival for first, arrival in zip(self._first, trace.arrivals, strict=True)]
        tpots = [
            (end - first) / (length - 1)
            for end, first, length in zip(self._end, self._first, trace.outputs, strict=True)
        ]
        number = max(1, len(ttfts))
        good = sum(a <= slo.ttft and b <= slo.tpot for a, b in zip(ttfts, tpots, strict=True))
        return Result(
            requests=len(ttfts),
            attained=good / number,
            ttft_met=sum(a <= slo.ttft for a in ttfts) / number,
            tpot_met=sum(b <= slo.tpot for b in tpots) / number,
            gpu_hours=self._cost * self._gpus / 3600.0,
            ended_early=False,
            ttfts=ttfts,
            tpots=tpots,
            sizes=self._sizes,
        )

    def _at(self, time: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ids), action))

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _arrive(self, now: float, index: int) -> None:
        tokens = self._trace.prompts[index]
        self._arrived[0] += 1
        self._arrived[1] += tokens
        chosen = min((w for w in self._prefills if w.state == "ready"), key=lambda w: w.outstanding)
        chosen.queue.append(index)
        chosen.outstanding += tokens
        if chosen.begun < 0:
            self._compute(now, chosen)

    def _compute(self, now: float, worker: _Prefill) -> None:
        worker.begun = now
        index = worker.queue[0]
        self._at(
            now + self._worker.prefill_seconds(self._trace.prompts[index]),
            lambda t: self._computed(t, worker),
        )

    def _computed(self, now: float, worker: _Prefill) -> None:
        index = worker.queue.popleft()
        tokens = self._trace.prompts[index]
        worker.outstanding -= tokens
        worker.busy += now - worker.begun
        worker.begun = -1.0
        self._at(now + self._worker.handoff_seconds(tokens), lambda t: self._hand(t, index))
        if worker.queue:
            self._compute(now, worker)
        elif worker.state == "draining":
            self._finish(now, worker)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _hand(self, now: float, index: int) -> None:
        self._handed[0] += 1
        self._handed[1] += self._trace.outputs[index]
        ready = (w for w in self._decodes if w.state == "ready")
        chosen = min(ready, key=lambda w: len(w.running) + len(w.waiting))
        chosen.waiting.append(index)
        self._advance(now, chosen)

    def _size(self, index: int) -> int:
        return self._trace.prompts[index] + self._trace.outputs[index]

    def _advance(self, now: float, worker: _Decode) -> None:
        """Bring a worker to `now`: end what has ended, let in what fits, and note when the next one ends."""
        if worker.running and worker.step > 0:
            worker.progress += (now - worker.at) / worker.step
        worker.at = now
        while worker.running and worker.running[0][0] <= worker.progress + 1e-9:
            _, index = heapq.heappop(worker.running)
            worker.reserved -= self._size(index)
            worker.context -= self._context(index)
            self._end[index] = now
            self._left -= 1
            tpot = (now - self._first[index]) / (self._trace.outputs[index] - 1)
            self._tpots.append(tpot)
            late = self._first[index] - self._trace.arrivals[index] > self._slo.ttft
            self._violations += late or tpot > self._slo.tpot
        entered: list[int] = []
        while worker.waiting and len(worker.running) < self._worker.slots:
            index = worker.waiting[0]
            if worker.running and worker.reserved + self._size(index) > self._worker.kv_tokens:
                break
            worker.waiting.popleft()
            worker.reserved += self._size(index)
            worker.context += self._context(index)
            heapq.heappush(worker.running, (worker.progress + self._trace.outputs[index], index))
            entered.append(index)
        if worker.running:
            worker.step = self._worker.step_seconds(len(worker.running), worker.context)
            worker.version += 1
            version = worker.version
            wait = max(0.0, (worker.running[0][0] - worker.progress) * worker.step)
            self._at(now + wait, lambda t: self._advance(t, worker) if worker.version == version else None)
        for index in entered:  # the first token is the first step's
            self._first[index] = now + worker.step
            self._ttfts.append(self._first[index] - self._trace.arrivals[index])
        if worker.state == "draining" and worker.idle:
            self._finish(now, worker)

    def _context(self, index: int) -> float:
        return self._trace.prompts[index] + self._trace.outputs[index] / 2

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _finish(self, now: float, worker: _Prefill | _Decode) -> None:
        if worker.state == "ended":
            return
        worker.state = "ended"
        self._cost += now - worker.created
        if isinstance(worker, _Prefill):
            self._prefills.remove(worker)
        else:
            self._decodes.remove(worker)

    def _decide(self, now: float) -> None:
        wanted = self._policy(Observation(now, self._prefill_view(now), self._decode_view()))
        self._resize(now, self._prefills, wanted[0], _Prefill)
        self._resize(now, self._decodes, wanted[1], _Decode)
        self._sizes.append((now, len(self._prefills), len(self._decodes)))
        self._at(now + INTERVAL, self._decide)

    def _resize(
        self,
        now: float,
        pool: list[_Worker],
        wanted: int,
        kind: type[_Worker],
    ) -> None:
        if wanted < 1:
            raise ValueError(f"replicas {wanted}: a pool needs at least one")
        current = [w for w in pool if w.state in ("starting", "ready")]
        for _ in range(wanted - len(current)):
            worker = kind(now)
            pool.append(worker)
            self._at(now + self._worker.start_seconds, partial(self._started, worker))
        surplus = len(current) - wanted
        for worker in [w for w in current if w.state == "starting"][::-1][: max(0, surplus)]:
            self._finish(now, worker)
            surplus -= 1
        ready = sorted((w for w in current if w.state == "ready"), key=_work)
        for worker in ready[: max(0, min(surplus, len(ready) - 1))]:
            worker.state = "draining"
            if worker.idle:
                self._finish(now, worker)

    @staticmethod
    def _started(worker: _Prefill | _Decode, now: float) -> None:
        if worker.state == "starting":
            worker.state = "ready"

    # -- what a policy sees ------------------------------------------------------------------------------------------

    def _prefill_view(self, now: float) -> PoolView:
        pool = self._prefills
        ready = [w for w in pool if w.state == "ready"]
        busy = 0.0
        for worker in pool:
            if worker.begun >= 0:
                worker.busy += now - worker.begun
                worker.begun = now
            if worker.state == "ready":
                busy += worker.busy
            worker.busy = 0.0
        view = PoolView(
            ready=len(ready),
            starting=sum(w.state == "starting" for w in pool),
            draining=sum(w.state == "draining" for w in pool),
            requests=sum(len(w.queue) for w in pool),
            waiting=sum(max(0, len(w.queue) - 1) for w in pool),
            queued_tokens=sum(w.outstanding for w in pool),
            arrived_requests=self._arrived[0],
            arrived_tokens=self._arrived[1],
            busy=min(1.0, busy / (INTERVAL * len(ready))),
            kv_usage=0.0,
            latencies=tuple(self._ttfts),
        )
        self._arrived, self._ttfts = [0, 0], []
        return view

    def _decode_view(self) -> PoolView:
        pool = self._decodes
        ready = [w for w in pool if w.state == "ready"]
        running = sum(len(w.running) for w in ready)
        reserved = sum(w.reserved for w in ready)
        view = PoolView(
            ready=len(ready),
            starting=sum(w.state == "starting" for w in pool),
            draining=sum(w.state == "draining" for w in pool),
            requests=sum(len(w.running) + len(w.waiting) for w in pool),
            waiting=sum(len(w.waiting) for w in pool),
            queued_tokens=sum(self._size(i) for w in pool for i in w.waiting),
            arrived_requests=self._handed[0],
            arrived_tokens=self._handed[1],
            busy=running / (self._worker.slots * len(ready)),
            kv_usage=reserved / (self._worker.kv_tokens * len(ready)),
            latencies=tuple(self._tpots),
        )
        self._handed, self._tpots = [0, 0], []
        return view


def _work(worker: _Prefill | _Decode) -> int:
    return worker.outstanding if isinstance(worker, _Prefill) else len(worker.running) + len(worker.waiting)
