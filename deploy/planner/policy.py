# SPDX-License-Identifier: Apache-2.0
"""From load to replicas. Arithmetic and memory only: no clock, no network.

Prefill demand is work: worker-seconds of prompts that arrive in a second, by the worker's profile. Decode demand is
requests at once: arrivals a second times the seconds a request stays (Little's law), because arrivals move before
occupancy does. Each is forecast to the moment when a worker started now serves (forecast.py), and

    prefill = (expected + reserve + backlog / patience) / utilization
    decode  = (expected + reserve) / requests that one worker runs within the promised time a token

`patience` is what the promised time to the first token leaves for waiting. The profile is corrected by what is seen:
slower tokens than it says mean fewer requests a worker. Late first tokens over a queue ask for one more at once.

More is done at once. Fewer only when every wish within `window` was lower, `cooldown` seconds after the pool last
changed, and only as far as those that stay can take everything that is in the pool now: a drain must neither wait nor
move what nobody has room for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from deploy.planner.forecast import Forecast, Judge
from deploy.planner.load import DecodeLoad, Load, PrefillLoad, Profile, Promise

CORRECTION_SECONDS = 120.0
"""Time constant of the correction of the profile."""
CORRECTIONS = (0.5, 3.0)
"""Bounds of the correction: observed over predicted time a token."""


@dataclass(frozen=True)
class Settings:
    """How careful the planner is; the same for every trace (docs/scaling.md has the tuning)."""

    lowest: int = 2
    highest: int = 16
    utilization: float = 1.0
    """Share of a prefill worker's time that is planned for; the reserve comes on top."""
    filling: float = 0.74
    """Share of the requests a decode worker can run in time that is planned for."""
    spread: float = 1.0
    """Standard deviations of the number of requests at once, taken as Poisson's, that decode keeps room for."""
    prefill_level: float = 25.0
    """Seconds: time constant of the level of prefill's demand ..."""
    decode_level: float = 35.0
    """... and of decode's."""
    doubt: float = 1.75
    """Standard errors taken off a trend."""
    judged: float = 20.0
    """Seconds: time constant of the demand that forecasts are judged by."""
    quantile: float = 0.999
    """Of missed forecasts, kept in reserve ..."""
    prefill_caution: float = 1.5
    """... so many times over: the next miss may be worse ..."""
    decode_caution: float = 1.5
    """... for either role."""
    memory: float = 900.0
    """Seconds a miss is remembered."""
    catch_up: float = 20.0
    """Seconds beyond the patience within which a queue that is too long shall be gone."""
    window: float = 30.0
    """Seconds within which the highest wish counts."""
    cooldown: float = 10.0
    """Seconds between two changes of a pool of which the later one is to fewer."""
    hysteresis: float = 0.1
    """Part of a worker that a wish must be below a whole number to count as lower."""
    learning: float = 60.0
    """Seconds at the start in which nothing is scaled away."""


@dataclass(frozen=True)
class Wish:
    """What one role needs, and why."""

    replicas: int
    why: str


@dataclass(frozen=True)
class Plan:
    """Replicas from now on."""

    prefill: Wish
    decode: Wish


@dataclass
class _Memory:
    """One pool's recent wishes and changes."""

    wishes: deque[tuple[float, float]] = field(default_factory=deque)
    changed: float = -math.inf


class Planner:
    """Keeps what it has seen; one for each cluster. Feed it at even intervals."""

    def __init__(self, profile: Profile, promise: Promise, settings: Settings | None = None) -> None:
        """`profile` is what a worker can do; it need not be exact."""
        self._profile = profile
        self._promise = promise
        self._settings = settings or Settings()
        s = self._settings
        self._prefill, self._decode = (
            Forecast(profile.start_seconds, level, s.doubt, Judge(s.judged, s.quantile, caution, s.memory))
            for level, caution in (
                (s.prefill_level, s.prefill_caution),
                (s.decode_level, s.decode_caution),
            )
        )
        self._began: float | None = None
        self._memories = {"prefill": _Memory(), "decode": _Memory()}
        self._stay = _Mean(60.0)
        self._rate = _Mean(60.0)
        self._context = _Mean(30.0)
        self._correction = _Mean(CORRECTION_SECONDS, 1.0)

    @property
    def correction(self) -> float:
        """Observed over predicted time a token."""
        return self._correction.value

    def plan(self, load: Load) -> Plan:
        """What the load asks for."""
        self._began = load.now if self._began is None else self._began
        return Plan(self._plan_prefill(load), self._plan_decode(load))

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _plan_prefill(self, load: Load) -> Wish:
        pool, s = load.prefill, self._settings
        work = self._work(pool.arrived_requests, pool.arrived_tokens)
        self._prefill.add(load.now, load.interval, work / load.interval)
        backlog = self._work(pool.queued_requests, pool.queued_tokens)
        patience = self._patience(pool)
        demand = self._prefill.expected + self._prefill.reserve
        excess = max(0.0, backlog - pool.ready * patience / 2)
        need = (demand + excess / (patience + s.catch_up)) / s.utilization
        current = pool.ready + pool.starting
        why = (
            f"{self._prefill.level:.2f} workers busy, {self._prefill.expected:.2f} expected, "
            f"{self._prefill.reserve:.2f} in reserve, {backlog:.1f} s queued"
        )
        late = pool.ttft_late > 1 - self._promise.target and backlog > patience * pool.ready / 2
        if late and not pool.starting:
            need = max(need, current + 0.5)
            why += "; first tokens are late"
        # Those that stay must get through the queue in time.
        safe = math.ceil(backlog / patience)
        return self._settle("prefill", load.now, need, current, safe, why)

    def _work(self, requests: float, tokens: float) -> float:
        return requests * self._profile.prefill_fixed + tokens * self._profile.prefill_token

    def _patience(self, pool: PrefillLoad) -> float:
        """Seconds that a prompt may wait, its own computing and handoff left out; at least a tenth of the promise."""
        number = max(1.0, pool.arrived_requests)
        own = self._profile.prefill_fixed + self._profile.prefill_token * pool.arrived_tokens / number
        left = self._promise.ttft - own - self._profile.handoff_fixed
        return max(self._promise.ttft / 10, left)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _plan_decode(self, load: Load) -> Wish:
        pool, s = load.decode, self._settings
        self._learn(load, pool)
        rate = pool.arrived_requests / load.interval
        # Until a stay is known, what is there stands for what will come.
        demand = rate * self._stay.value if self._stay.value > 0 else float(pool.requests)
        self._decode.add(load.now, load.interval, demand)
        per_worker = self._per_worker() * s.filling
        expected = self._decode.expected
        spread = s.spread * math.sqrt(self._decode.level)
        need = (expected + max(spread, self._decode.reserve)) / per_worker
        why = (
            f"{pool.requests} requests, {self._decode.expected:.1f} expected, {self._decode.reserve:.1f} in reserve, "
            f"{per_worker:.1f} a worker, cache {pool.kv_usage:.0%}"
        )
        current = pool.ready + pool.starting
        if pool.waiting and not pool.starting:
            need = max(need, current + 0.5)
            why += f"; {pool.waiting} wait"
        safe = math.ceil(pool.requests / self._per_worker())
        return self._settle("decode", load.now, need, current, safe, why)

    def _learn(self, load: Load, pool: DecodeLoad) -> None:
        """How long a request stays, how long its context is, and how far the profile is off."""
        self._rate.add(load.interval, pool.arrived_requests / load.interval)
        held = pool.kv_usage * self._profile.kv_tokens * pool.ready
        running = pool.requests - pool.waiting
        if running > 0:
            self._context.add(load.interval, held / running)
        well = pool.waiting == 0 and (pool.tpot is None or pool.tpot <= self._promise.tpot)
        # Requests that are held up stay longer; to plan for that would be to plan for their being held up.
        if self._rate.value > 0 and (well or self._stay.value == 0):
            self._stay.add(load.interval, pool.requests / self._rate.value)
        if pool.tpot is not None and running > 0 and pool.ready > 0:
            predicted = self._profile.step(running / pool.ready, self._context.value)
            low, high = CORRECTIONS
            self._correction.add(load.interval, min(high, max(low, pool.tpot / predicted)))

    def _per_worker(self) -> float:
        """Requests that a worker runs within the promised time a token."""
        return self._profile.sequences(self._promise.tpot / self._correction.value, self._context.value)

    # -- both --------------------------------------------------------------------------------------------------------

    def _settle(self, role: str, now: float, need: float, current: int, safe: int, why: str) -> Wish:
        s, memory = self._settings, self._memories[role]
        memory.wishes.append((now, need))
        while memory.wishes[0][0] < now - s.window:
            memory.wishes.popleft()
        wish = math.ceil(need - 1e-9)
        if wish < current:
            highest = max(each for _, each in memory.wishes)
            wish = math.ceil(highest + s.hysteresis)
            wish = max(wish, safe)
            if (
                now - memory.changed < s.cooldown
                or now - (self._began if self._began is not None else now) < s.learning
            ):
                wish = max(wish, current)
            wish = min(wish, current)
        wish = min(s.highest, max(s.lowest, wish))
        if wish != current:
            memory.changed = now
        return Wish(wish, why)


class _Mean:
    """An exponential mean over time; without a start the first sample is taken whole."""

    def __init__(self, seconds: float, start: float | None = None) -> None:
        self._seconds = seconds
        self._empty = start is None
        self.value = start or 0.0

    def add(self, interval: float, sample: float) -> None:
        """A sample that stands for `interval` seconds."""
        weight = 1.0 if self._empty else 1 - math.exp(-interval / self._seconds)
        self.value += weight * (sample - self.value)
        self._empty = False
