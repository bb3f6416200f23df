# SPDX-License-Identifier: Apache-2.0
"""What the sides have counted themselves while a row ran: metrics before and after it, and the router's traces.

The handoff is what lies between the end of a prompt's computation and the first token at the client. Of `nixl` it is
what the client that joins the two engines sees: from the prefill's answer, which the prefill engine sends a little
after that end, to the first event. Of `delta` it is what the roles have noted (timeline.py).
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving import timeline
from benchmarks.serving.load import Load, Sent
from benchmarks.serving.role import FLUSH_SECONDS
from benchmarks.serving.sides import Delta, Nixl, Side
from benchmarks.serving.stats import spread, ttft

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{[^}]*\})? (\S+)$")
_CAPACITY = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
"""vLLM's own words, logged at its start at level INFO; it counts what a hybrid model's states take."""
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Counts = dict[tuple[str, str], float]
"""By (name, labels as they are written, without those that tell engines apart)."""


def counts(side: Side) -> Counts:
    """All samples of a side's processes, added up. A process that does not answer has none."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for url in side.metrics.values():
        for line in _get(url).splitlines():
            sample = _SAMPLE.match(line)
            if sample is None:
                continue
            name, labels, value = sample.groups()
            kept = [
                f"{key}={text}"
                for key, text in sorted(_LABEL.findall(labels or ""))
                if key not in ("engine", "model_name")
            ]
            found[(name, ",".join(kept))] += float(value)
    return dict(found)


def difference(after: Counts, before: Counts) -> Counts:
    """What was counted between two looks."""
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def mean(counted: Counts, name: str, labels: str = "") -> float | None:
    """The mean of a histogram's observations; None without any."""
    number = counted.get((f"{name}_count", labels), 0.0)
    return counted.get((f"{name}_sum", labels), 0.0) / number if number else None


def of(side: Side, load: Load, counted: Counts) -> dict[str, Any]:
    """Handoff, bytes and placements of a row, as far as the side has them; times in milliseconds."""
    done = [one for one in load.sent if not one.error]
    found: dict[str, Any] = {
        "kv_tokens": {log.stem: tokens for log in side.logs if (tokens := capacity(log))}
    }
    if isinstance(side, Nixl):
        return found | _of_nixl(done, counted)
    if isinstance(side, Delta):
        return found | _of_delta(side, done, load.begin)
    return found


def capacity(log: Path) -> int:
    """Tokens that an engine's cache holds, by its log; 0 where it does not say."""
    try:
        said = _CAPACITY.findall(log.read_text(errors="replace"))
    except OSError:
        return 0
    return int(said[-1].replace(",", "")) if said else 0


def _of_nixl(done: Sequence[Sent], counted: Counts) -> dict[str, Any]:
    times = [(one.events[0] - one.prefilled, ttft(one)) for one in done if one.prefilled is not None]
    transfer = mean(counted, "vllm:nixl_xfer_time_seconds")
    return {
        **spread("handoff", [handoff for handoff, _ in times]),
        "handoff_share": _share(times),
        "bytes": mean(counted, "vllm:nixl_bytes_transferred"),
        "stages": {} if transfer is None else {"transfer": transfer * 1e3},
        "placements": {"handover": len(times)},
    }


def _of_delta(side: Delta, done: Sequence[Sent], begin: float) -> dict[str, Any]:
    traces = [_trace(side.url, one.request_id) for one in done]
    nbytes = [trace["boundary_bytes"] for trace in traces if trace.get("boundary_bytes")]
    time.sleep(2 * FLUSH_SECONDS)
    whole = {one.request_id: ttft(one) for one in done}
    firsts = {one.request_id: begin + one.events[0] for one in done}
    found = timeline.handoffs(timeline.read(side.notes), firsts)
    return {
        **spread("handoff", [one["handoff"] for one in found.values()]),
        "handoff_share": _share([(one["handoff"], whole[name]) for name, one in found.items()]),
        "handoffs_noted": len(found),
        "bytes": sum(nbytes) / len(nbytes) if nbytes else None,
        "stages": timeline.medians(found.values()),
        "placements": dict(Counter(_placement(trace) for trace in traces)),
        "failures": dict(Counter(trace["failure"] for trace in traces if trace.get("failure"))),
    }


def _placement(trace: dict[str, Any]) -> str:
    """`handover`, or `local` with its reason."""
    words = str(trace.get("route", "unknown")).split()
    return " ".join(words[:2]) if words[0] == "local" else words[0]


def _share(times: Sequence[tuple[float, float]]) -> float | None:
    """Of the time to the first token, over all requests, that is the handoff's."""
    whole = sum(first for _, first in times)
    return sum(handoff for handoff, _ in times) / whole if whole else None


def _trace(url: str, request_id: str) -> dict[str, Any]:
    found = _get(f"{url}/deltaserve/requests/{request_id}")
    return dict(json.loads(found)) if found else {}


def _get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return str(reply.read().decode())
    except OSError:
        return ""
