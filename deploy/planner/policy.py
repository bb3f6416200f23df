# SPDX-License-Identifier: Apache-2.0
"""From load to replicas. Arithmetic and memory only: no clock, no network.

Both roles follow the requests that arrive, because arrivals move before occupancy does: prefill those that reach the
cluster, times the worker-seconds of a prompt by the worker's profile; decode the same, times the seconds a request
stays (Little's law). Arrivals are forecast to the moment when a worker started now serves (forecast.py), and

    prefill = (expected + reserve + backlog / patience) / utilization        in workers
    decode  = (expected + reserve) / requests that one worker runs within the promised time a token

`reserve` is the most of: what forecasts missed lately, what Poisson's noise takes, and about a worker. `patience` is
what the promised time to the first token leaves for waiting. The profile is corrected by what is seen: slower tokens
than it says mean fewer requests a worker. Late first tokens over a queue ask for one more at once.

More is done at once. Workers that still start are given up as soon as they are not needed, for they serve nobody.
Fewer that serve only when every wish within `window` was lower, `cooldown` seconds after the pool last changed, and
only as far as those that stay can take everything that is in the pool now: a drain must neither wait nor move what
nobody has room for.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from deploy.planner.forecast import Care, Forecast
from deploy.planner.load import DecodeLoad, Load, PrefillLoad, Profile, Promise

PROMPT_SECONDS = 30.0
"""Time constant of the mean work of a prompt, at the usual rate of arrivals."""
STAY_SECONDS = 120.0
"""Time constant of the mean stay of a request in decode."""
CORRECTION_SECONDS = 120.0
"""Time constant of the correction of the profile."""
CORRECTIONS = (0.5, 3.0)
"""Bounds of the correction: observed over predicted time a token."""


@dataclass(frozen=True)
class Settings:
    """How careful the planner is; the same for every trace (docs/scaling.md has the tuning)."""

    lowest: int = 1
    highest: int = 16
    utilization: float = 1.0
    """Share of a prefill worker's time that is planned for; the reserve comes on top."""
    filling: float = 0.88
    """Share of the requests a decode worker can run in time that is planned for."""
    prefill_spread: float = 1.25
    """Standard deviations of the arrivals within the patience, taken as Poisson's, that prefill keeps room for ..."""
    decode_spread: float = 1.0
    """... and of the requests at once that decode does."""
    prefill_least: float = 0.8
    """Workers that are always in reserve ..."""
    decode_least: float = 1.5
    """... for either role: a rise that nothing announced has to be lived through until a new worker serves."""
    level: float = 20.0
    """Seconds: time constant of the level of arrivals."""
    doubt: float = 1.25
    """Standard errors taken off a rise."""
    judged: float = 15.0
    """Seconds: time constant of the rate that forecasts are judged by."""
    quantile: float = 0.99
    """Of missed forecasts, which is kept in reserve ..."""
    memory: float = 900.0
    """... for so many seconds."""
    catch_up: float = 20.0
    """Seconds beyond the patience within which a queue that is too long shall be gone."""
    window: float = 10.0
    """Seconds within which the highest wish counts."""
    cooldown: float = 10.0
    """Seconds between two changes of a pool of which the later one is to fewer."""
    hysteresis: float = 0.05
    """Part of a worker that a wish must be below a whole number to count as lower."""
    learning: float = 60.0
    """Seconds at the start in which nothing that serves is scaled away."""


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
        care = Care(s.level, s.doubt, s.judged, s.quantile, s.memory)
        self._prefill, self._decode = (Forecast(profile.start_seconds, care) for _ in range(2))
        self._began: float | None = None
        self._memories = {"prefill": _Memory(), "decode": _Memory()}
        self._prompt, self._slower = _Mean(PROMPT_SECONDS), _Mean(2 * PROMPT_SECONDS)
        self._stay = _Mean(STAY_SECONDS)
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
        work = self._mean_work(load.interval, pool)
        self._prefill.add(load.now, load.interval, pool.arrived_requests / load.interval)
        backlog = self._work(pool.queued_requests, pool.queued_tokens)
        patience = self._patience(pool)
        expected = self._prefill.expected * work
        spread = s.prefill_spread * math.sqrt(self._prefill.level / patience)
        reserve = max(spread * work, self._prefill.reserve * work, s.prefill_least)
        excess = max(0.0, backlog - pool.ready * patience / 2)
        need = (expected + reserve + excess / (patience + s.catch_up)) / s.utilization
        current = pool.ready + pool.starting
        why = (
            f"{self._prefill.level * work:.2f} workers busy, {expected:.2f} expected, {reserve:.2f} in reserve, "
            f"{backlog:.1f} s queued"
        )
        late = pool.ttft_late > 1 - self._promise.target and backlog > patience * pool.ready / 2
        if late and not pool.starting:
            need = max(need, current + 0.5)
            why += "; first tokens are late"
        # Those that stay must get through the queue in time.
        safe = math.ceil(backlog / patience)
        return self._settle("prefill", load.now, need, pool, safe, why)

    def _mean_work(self, interval: float, pool: PrefillLoad) -> float:
        """Worker-seconds of a prompt when the lead is over, not less than now.

        The slower of two exponential means lags a steady growth twice as far as the other, so that their distance says
        how fast prompts grow. An interval with many prompts says more of them than one with few.
        """
        if pool.arrived_requests > 0:
            usual = max(0.1, self._prefill.level * interval)
            weight = min(3.0, pool.arrived_requests / usual)
            work = self._work(pool.arrived_requests, pool.arrived_tokens) / pool.arrived_requests
            self._prompt.add(interval * weight, work)
            self._slower.add(interval * weight, work)
        growth = max(0.0, self._prompt.value - self._slower.value) / PROMPT_SECONDS
        return self._prompt.value + growth * (PROMPT_SECONDS + self._profile.start_seconds)

    def _age(self, now: float) -> float:
        return 0.0 if self._began is None else now - self._began

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
        self._decode.add(load.now, load.interval, load.prefill.arrived_requests / load.interval)
        stay = self._stay.value
        # Until a stay is known, what is there stands for what will come.
        expected = self._decode.expected * stay if stay > 0 else float(pool.requests)
        per_worker = self._per_worker() * s.filling
        reserve = max(
            s.decode_spread * math.sqrt(self._decode.level * stay),
            self._decode.reserve * stay,
            s.decode_least * per_worker,
        )
        need = (expected + reserve) / per_worker
        why = (
            f"{pool.requests} requests, {expected:.1f} expected, {reserve:.1f} in reserve, "
            f"{per_worker:.1f} a worker, cache {pool.kv_usage:.0%}"
        )
        current = pool.ready + pool.starting
        if pool.waiting and not pool.starting:
            need = max(need, current + 0.5)
            why += f"; {pool.waiting} wait"
        safe = math.ceil(pool.requests / self._per_worker())
        return self._settle("decode", load.now, need, pool, safe, why)

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

    def _settle(
        self, role: str, now: float, need: float, pool: PrefillLoad | DecodeLoad, safe: int, why: str
    ) -> Wish:
        s, memory = self._settings, self._memories[role]
        memory.wishes.append((now, need))
        while memory.wishes[0][0] < now - s.window:
            memory.wishes.popleft()
        current = pool.ready + pool.starting
        wish = math.ceil(need - 1e-9)
        if wish < current:
            highest = max(each for _, each in memory.wishes)
            serve = max(math.ceil(highest + s.hysteresis), safe)
            if now - memory.changed < s.cooldown or self._age(now) < s.learning:
                serve = current
            # Those that serve stay as long as any wish of late wanted them, those that start only as long as this one.
            wish = min(current, max(math.ceil(need + s.hysteresis), min(serve, pool.ready)))
        wish = min(s.highest, max(s.lowest, wish))
        if wish > current or wish < pool.ready:
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
