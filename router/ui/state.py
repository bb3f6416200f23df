# SPDX-License-Identifier: Apache-2.0
"""What the status page shows, as one JSON document; docs/observe.md names its fields.

Everything is read from what the dispatcher keeps anyway: the roster's links (with the load that workers report once a
second), the ring of recent requests, counters. A document is made at most every SHORTEST seconds, whoever asks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

from deltaserve import __version__
from deltaserve.config import Role
from deltaserve.telemetry.logs import request_of
from router.dispatcher import Dispatcher
from router.processes.merge import add_workers
from router.roster import ROLES
from router.trace import Trace
from router.worker_link import WorkerLink

WINDOW = 300.0
"""Seconds that latencies and choices are taken from."""
BUCKET = 5.0
"""Seconds of one point of the curves."""
SHORTEST = 0.25
OUTCOMES = ("finished", "aborted", "error")
RECENT = 40
"""Requests listed."""
FAULTS = 100
"""Faults remembered."""


class FaultLog(logging.Handler):
    """The last warnings and errors of this process, in its own words: what the log says is what the page says."""

    def __init__(self, capacity: int = FAULTS) -> None:
        super().__init__(logging.WARNING)
        self.faults: deque[dict[str, Any]] = deque(maxlen=capacity)

    def emit(self, record: logging.LogRecord) -> None:
        """Remember one."""
        words = record.getMessage()
        last = self.faults[-1] if self.faults else None
        if last is not None and last["text"] == words:
            last["count"] += 1
            last["time"] = record.created
            return
        self.faults.append(
            {
                "time": record.created,
                "level": record.levelname.lower(),
                "source": record.name,
                "text": words,
                "request": request_of(record),
                "count": 1,
            }
        )


@dataclass
class _Rates:
    """Tokens and requests a second, between two looks that are a second apart at least."""

    at: float
    tokens: float
    requests: float
    tokens_rate: float = 0.0
    requests_rate: float = 0.0


class _Seen(NamedTuple):
    """What curves and counts need of a request of another process; the names are those of a Trace."""

    arrival: float
    first_token_after: float | None
    tpot: float | None
    ended_after: float | None
    route: str
    resumes: int


class Snapshots:
    """Makes the documents. Belongs to the dispatcher's event loop."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._began = time.time()
        self._made = 0.0
        self._last: dict[str, Any] = {}
        self._rates = _Rates(time.monotonic(), 0.0, 0.0)
        self.fault_log = FaultLog()
        for name in ("router", "deltaserve"):
            logging.getLogger(name).addHandler(self.fault_log)

    def now(self, others: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """The document; one that is younger than SHORTEST serves again. `others`: parts of other processes."""
        if time.monotonic() - self._made >= SHORTEST:
            self._last = self._make(others)
            self._made = time.monotonic()
        return self._last

    def part(self) -> dict[str, Any]:
        """What another process needs of this one for a document about both."""
        now = time.time()
        traces = self._dispatcher.traces.recent()
        lately = [trace for trace in traces if now - trace.arrival < WINDOW]
        return {
            "counts": self._counts(),
            "lately": [tuple(getattr(trace, name) for name in _Seen._fields) for trace in lately],
            "pools": {role: [_worker(link) for link in self._links(role)] for role in ROLES},
            "recent": self._recent(traces[:RECENT], now),
            "faults": self._faults(lately),
        }

    def _make(self, others: Sequence[dict[str, Any]]) -> dict[str, Any]:
        dispatcher, now = self._dispatcher, time.time()
        report = dispatcher.roster.report()
        traces = dispatcher.traces.recent()
        own = [trace for trace in traces if now - trace.arrival < WINDOW]
        lately: list[Trace | _Seen] = [*own, *(_Seen(*seen) for part in others for seen in part["lately"])]
        recent = [*self._recent(traces[:RECENT], now), *(one for part in others for one in part["recent"])]
        faults = [*self._faults(own), *(fault for part in others for fault in part["faults"])]
        config = dispatcher.config
        return {
            "time": now,
            "uptime": now - self._began,
            "version": __version__,
            "model": config.model_name,
            "placement": config.placement,
            "policy": dispatcher.policy.name,
            "status": report["status"],
            "missing": report["missing"],
            "requests": self._requests(lately, [self._counts(), *(part["counts"] for part in others)]),
            "latency": {
                "window": WINDOW,
                "ttft": _summary([t.first_token_after for t in lately if t.first_token_after is not None]),
                "tpot": _summary([tpot for t in lately if (tpot := t.tpot) is not None]),
                "curve": _curve(lately, now),
            },
            "pools": {
                role: add_workers(
                    [_worker(link) for link in self._links(role)], [part["pools"][role] for part in others]
                )
                for role in ROLES
            },
            "boundaries": self._boundaries(),
            "choices": _choices(lately),
            "recent": sorted(recent, key=lambda one: one["age"])[:RECENT],
            "faults": sorted(faults, key=lambda fault: -fault["time"])[:FAULTS],
        }

    def _links(self, role: Role) -> list[WorkerLink]:
        return sorted(self._dispatcher.roster.links(role), key=lambda link: link.worker_id)

    def _counts(self) -> dict[str, float]:
        """Of this process alone."""
        value = self._dispatcher.metrics.registry.get_sample_value
        tokens = value("deltaserve_router_tokens_total") or 0.0
        return {
            "tokens": tokens + sum(flight.tokens_sent for flight in self._dispatcher.flights),
            "in_flight": self._dispatcher.in_flight,
            "inside": value("deltaserve_router_inside") or 0,
            "queued": value("deltaserve_router_queued") or 0,
            **{
                outcome: value("deltaserve_router_requests_total", {"outcome": outcome}) or 0
                for outcome in OUTCOMES
            },
        }

    def _requests(
        self, lately: Sequence[Trace | _Seen], counts: Sequence[dict[str, float]]
    ) -> dict[str, Any]:
        rates = self._rates
        total = {name: sum(one[name] for one in counts) for name in counts[0]}
        tokens = total["tokens"]
        ended = {outcome: int(total[outcome]) for outcome in OUTCOMES}
        passed = time.monotonic() - rates.at
        if passed >= 1:
            self._rates = _Rates(
                rates.at + passed,
                tokens,
                sum(ended.values()),
                max(0.0, tokens - rates.tokens) / passed,
                max(0.0, sum(ended.values()) - rates.requests) / passed,
            )
        return {
            "in_flight": int(total["in_flight"]),
            "inside": int(total["inside"]),
            "queued": int(total["queued"]),
            "ended": ended,
            "resumed": sum(trace.resumes for trace in lately),
            "tokens_per_second": round(self._rates.tokens_rate, 1),
            "requests_per_second": round(self._rates.requests_rate, 2),
        }

    def _recent(self, traces: list[Trace], now: float) -> list[dict[str, Any]]:
        running = {id(flight.trace): flight.tokens_sent for flight in self._dispatcher.flights}
        return [_request(trace, running.get(id(trace), trace.output_tokens), now) for trace in traces]

    def _boundaries(self) -> list[dict[str, Any]]:
        """Handoffs that workers report, those under way first, then the youngest."""
        found = [
            {
                "worker": link.worker_id,
                "request": one.request_id,
                "stage": one.stage,
                "boundary": one.boundary,
                "tokens": one.tokens,
                "state": one.state,
                "outcome": one.outcome,
                "age": round(one.age, 3),
                "took": round(one.took, 4),
                "bytes": sum(rank.bytes for rank in one.ranks),
                "ranks": [
                    {
                        "rank": rank.rank,
                        "state": rank.state,
                        "bytes": rank.bytes,
                        "seconds": round(rank.seconds, 4),
                        "failure": rank.failure,
                    }
                    for rank in one.ranks
                ],
            }
            for role in ROLES
            for link in self._links(role)
            if link.up
            for one in link.load.handoffs
        ]
        found.sort(key=lambda one: (bool(one["outcome"]), one["age"]))
        return found

    def _faults(self, lately: list[Trace]) -> list[dict[str, Any]]:
        """What went wrong, newest first: the log's words, and loads after which a worker computed the prompt."""
        loads = [
            {
                "time": trace.arrival + (trace.first_token_after or 0.0),
                "level": "warning",
                "source": "load",
                "text": trace.load_failure,
                "request": trace.request_id,
                "count": 1,
            }
            for trace in lately
            if trace.load_failure
        ]
        return sorted([*self.fault_log.faults, *loads], key=lambda fault: -fault["time"])[:FAULTS]


def _worker(link: WorkerLink) -> dict[str, Any]:
    load, about = link.load, link.description
    return {
        "id": link.worker_id,
        "address": link.member.address,
        "state": link.state,
        "error": "" if link.up else link.error,
        "requests": len(link.legs),
        "slots": about.max_num_seqs,
        "running": load.running,
        "waiting": load.waiting,
        "queued_tokens": load.queued_tokens,
        "outstanding_tokens": link.outstanding,
        "state_bytes": link.state_bytes,
        "kv_usage": round(load.kv_usage, 4),
        "kv_cache_tokens": about.kv_cache_tokens,
        "vllm": about.vllm_version,
    }


def _summary(values: list[float]) -> dict[str, Any]:
    """Count and percentiles, seconds."""
    if not values:
        return {"count": 0, "p50": None, "p90": None, "p99": None}
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {
        "count": len(values),
        "p50": round(cuts[49], 6),
        "p90": round(cuts[89], 6),
        "p99": round(cuts[98], 6),
    }


def _curve(lately: Sequence[Trace | _Seen], now: float) -> list[dict[str, Any]]:
    """Medians by the time of the first token (TTFT) and of the end (TPOT), oldest point first."""
    points = int(WINDOW // BUCKET)
    ttft: list[list[float]] = [[] for _ in range(points)]
    tpot: list[list[float]] = [[] for _ in range(points)]
    for trace in lately:
        for value, after, into in (
            (trace.first_token_after, trace.first_token_after, ttft),
            (trace.tpot, trace.ended_after, tpot),
        ):
            if value is None or after is None:
                continue
            back = int((now - trace.arrival - after) // BUCKET)
            if 0 <= back < points:
                into[points - 1 - back].append(value)
    return [
        {
            "ago": (points - number) * BUCKET,
            "ttft": _median(first),
            "tpot": _median(each),
        }
        for number, (first, each) in enumerate(zip(ttft, tpot, strict=True))
    ]


def _median(values: list[float]) -> float | None:
    return round(sorted(values)[len(values) // 2], 6) if values else None


def _choices(lately: Sequence[Trace | _Seen]) -> dict[str, int]:
    """How often each way was taken: `handover`, or the reason for computing the prompt on its decode worker."""
    found: Counter[str] = Counter()
    for trace in lately:
        way, _, rest = trace.route.partition(" ")
        if way == "local":
            found[rest.partition(" ")[0] or "local"] += 1
        elif way == "handover":
            found["handover"] += 1
    return dict(found.most_common())


def _request(trace: Trace, tokens: int, now: float) -> dict[str, Any]:
    way, _, rest = trace.route.partition(" ")
    names = rest.split(" ")
    known = way in ("handover", "local") and len(names) == 2
    return {
        "id": trace.request_id,
        "age": round(now - trace.arrival, 3),
        "prompt": trace.prompt_tokens,
        "output": tokens,
        "asked": trace.placement,
        "choice": way if known else trace.route,
        "reason": names[0] if known and way == "local" else "",
        "prefill": names[0] if known and way == "handover" else "",
        "decode": names[1] if known else "",
        "why": trace.why,
        "from_store": trace.from_store,
        "cached": trace.local,
        "computed": trace.recomputed,
        "bytes": trace.boundary_bytes,
        "ttft": trace.first_token_after,
        "tpot": trace.tpot,
        "status": trace.status,
        "failure": trace.failure,
        "resumes": trace.resumes,
    }
