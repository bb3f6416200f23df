# SPDX-License-Identifier: Apache-2.0
"""What the planner knows: the load of both pools during an interval, what is promised, and what a worker can do.

Plain data, without a source: `deploy.planner.reader` fills it from a cluster, `benchmarks.scaling` from a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrefillLoad:
    """The prefill pool. Counts of an interval are of the one that has just ended."""

    ready: int
    starting: int
    queued_requests: int
    queued_tokens: int
    """Prompt tokens given to workers and not yet computed."""
    arrived_requests: float
    arrived_tokens: float
    ttft_late: float
    """Share of the interval's first tokens that came later than promised."""


@dataclass(frozen=True)
class DecodeLoad:
    """The decode pool."""

    ready: int
    starting: int
    requests: int
    """Running and waiting."""
    waiting: int
    """Of these, for a slot or for room in the cache."""
    kv_usage: float
    """Share of the ready workers' cache that is taken."""
    arrived_requests: float
    tpot: float | None
    """Mean seconds a token of the interval's requests; None: none ended."""


@dataclass(frozen=True)
class Load:
    """Both pools at one moment."""

    now: float
    """Seconds, of any clock that does not go back."""
    interval: float
    """Seconds since the load before this one."""
    prefill: PrefillLoad
    decode: DecodeLoad


@dataclass(frozen=True)
class Promise:
    """The SLO."""

    ttft: float
    """Seconds to the first token."""
    tpot: float
    """Seconds a token after the first."""
    target: float = 0.99
    """Share of requests that shall meet both."""


@dataclass(frozen=True)
class Profile:
    """What one worker of each role does; `python -m benchmarks.scaling.calibrate` measures it. Seconds, tokens.

    A prompt of n tokens takes prefill_fixed + n · prefill_token; a step of b requests with c tokens of context in all
    takes step_fixed + b · step_sequence + c · step_context.
    """

    prefill_fixed: float
    prefill_token: float
    handoff_fixed: float
    step_fixed: float
    step_sequence: float
    step_context: float
    slots: int
    kv_tokens: int
    start_seconds: float
    """From the decision until a new worker serves."""

    def sequences(self, tpot: float, context: float) -> float:
        """Requests of `context` tokens each that a worker runs at `tpot` seconds a token; at least 1."""
        by_time = (tpot - self.step_fixed) / (self.step_sequence + self.step_context * context)
        by_room = self.kv_tokens / context if context > 0 else self.slots
        return max(1.0, min(by_time, by_room, self.slots))

    def step(self, sequences: float, context: float) -> float:
        """Seconds of a step of so many requests with `context` tokens each."""
        return self.step_fixed + sequences * (self.step_sequence + self.step_context * context)
