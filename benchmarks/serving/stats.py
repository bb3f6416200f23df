# SPDX-License-Identifier: Apache-2.0
"""From times to a row. All of it is plain arithmetic over `Sent`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.serving.load import Load, Sent


@dataclass(frozen=True)
class Slo:
    """What a request must meet to count as good; seconds."""

    ttft: float
    tpot: float


def percentile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that at least `share` (0 to 1) of them do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def ttft(sent: Sent) -> float:
    """Seconds from the time that the request was to go out to its first token."""
    return sent.events[0] - sent.at


def tpot(sent: Sent) -> float:
    """Mean seconds between its tokens. Answers have the length asked for, so events that carry several count right."""
    return (sent.events[-1] - sent.events[0]) / max(1, sent.answer - 1)


def pauses(sent: Sent) -> list[float]:
    """Seconds between its events."""
    return [later - earlier for earlier, later in pairwise(sent.events)]


def is_good(sent: Sent, slo: Slo) -> bool:
    """Whether it was answered, and within the SLO."""
    return not sent.error and ttft(sent) < slo.ttft and tpot(sent) < slo.tpot


def row(load: Load, slo: Slo) -> dict[str, Any]:
    """JSON values; times in milliseconds. A rate is over the time from the row's begin to the last token."""
    done = [sent for sent in load.sent if not sent.error]
    span = max((sent.events[-1] for sent in done), default=load.seconds)
    made: dict[str, Any] = {
        "requests": len(load.sent),
        "failed": len(load.sent) - len(done),
        "errors": sorted({sent.error for sent in load.sent if sent.error})[:3],
        "offered": len(load.sent) / max(sent.at for sent in load.sent),
        "seconds": span,
        "tokens_per_s": sum(sent.answer for sent in done) / span,
        "goodput": sum(is_good(sent, slo) for sent in done) / span,
        "events_per_token": sum(len(sent.events) for sent in done)
        / max(1, sum(sent.answer for sent in done)),
        "client_cpu": load.client_cpu / load.seconds,
    }
    made |= spread("ttft", [ttft(sent) for sent in done])
    made |= spread("tpot", [tpot(sent) for sent in done])
    made |= spread("itl", [pause for sent in done for pause in pauses(sent)])
    made |= spread("lag", [sent.lag for sent in load.sent])
    return made


def spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """Median, 99th percentile and mean in milliseconds, under names that begin with `name`."""
    middle, high = percentile(seconds, 0.5), percentile(seconds, 0.99)
    return {
        f"{name}_p50": None if middle is None else middle * 1e3,
        f"{name}_p99": None if high is None else high * 1e3,
        f"{name}_mean": sum(seconds) / len(seconds) * 1e3 if seconds else None,
    }
