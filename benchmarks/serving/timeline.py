# SPDX-License-Identifier: Apache-2.0
"""The breakdown of `delta`'s handoffs, out of what its roles have noted (role.py).

Steps follow one another from the end of the prompt's computation to the client's first token, so together they are the
handoff. What the store path does (gather, digest, put; get, verify, scatter) lies within two of them and may overlap.
All processes are of one machine, and so is their monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

from benchmarks.intervals import covered
from benchmarks.serving.stats import percentile

Stretch = tuple[float, float]

STEPS = (
    ("write", "computed", "ranks gather, take digests and put"),
    ("report", "written", "the ranks' report reaches the service"),
    ("commit", "commit begins", "the transaction in etcd"),
    ("hand on", "commit ends", "router, to the decode worker"),
    ("record", "decode begins", "the decode worker reads the record"),
    ("schedule", "decode prepared", "until the engine sends the load to its ranks"),
    ("load", "load begins", "ranks get, verify and scatter"),
    ("first step", "load ends", "until the engine has computed the first token"),
    ("stream", "first", "the token reaches the router"),
    ("answer", "routed", "the router's answer reaches the client"),
)
"""Name, the moment at which it begins, and what it is; each ends where the next one begins."""

WITHIN = {
    "write": (("gather", "gather"), ("digest", "digest"), ("put", "put")),
    "load": (("get", "get"), ("verify", "digest"), ("scatter", "scatter")),
}
"""Of a step: (name, stage that the process has noted)."""


@dataclass
class Noted:
    """What one run's roles have noted."""

    moments: dict[str, dict[str, float]] = field(default_factory=dict)
    """By response id, then by name (`STEPS`)."""
    stages: dict[tuple[str, str], list[Stretch]] = field(default_factory=dict)
    """By (role, stage)."""


def read(folder: Path) -> Noted:
    """All that lies in the folder; lines that are not whole yet are left out."""
    noted = Noted()
    for path in sorted(folder.glob("*.jsonl")):
        role = path.name.partition("-")[0]
        for line in path.read_text().splitlines():
            try:
                name, request_id, begin, end = json.loads(line)
            except ValueError:
                continue
            if not request_id:
                noted.stages.setdefault((role, name), []).append((begin, end))
                continue
            moments = noted.moments.setdefault(request_id, {})
            if (role, name) == ("decode", "prepare"):
                moments |= {"decode begins": begin, "decode prepared": end}
            elif name in ("commit", "load"):
                moments |= {f"{name} begins": begin, f"{name} ends": end}
            elif (role, name) != ("prefill", "prepare"):
                moments[name] = begin
    return noted


def handoffs(noted: Noted, firsts: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Seconds of each step, and `handoff`, of every request that has passed through all of them, by response id.

    `firsts`: when the client had its first token, by response id.
    """
    found = {}
    for request_id, first in firsts.items():
        moments = noted.moments.get(request_id, {})
        if any(begin not in moments for _, begin, _ in STEPS):
            continue
        # What has happened beside an earlier step (an early read) is not on the path: a step begins where all before it
        # have ended.
        times = list(accumulate([*(moments[begin] for _, begin, _ in STEPS), first], max))
        steps = {
            name: later - earlier
            for (name, _, _), (earlier, later) in zip(STEPS, pairwise(times), strict=True)
        }
        steps |= _inner(noted, moments)
        found[request_id] = {**steps, "handoff": first - moments["computed"]}
    return found


def _inner(noted: Noted, moments: Mapping[str, float]) -> dict[str, float]:
    windows = {
        "write": ("prefill", moments["computed"], moments["written"]),
        "load": ("decode", moments["load begins"], moments["load ends"]),
    }
    found = {}
    for step, parts in WITHIN.items():
        role, begin, end = windows[step]
        for name, stage in parts:
            found[name] = covered(list(_clipped(noted.stages.get((role, stage), []), begin, end)))
    return found


def _clipped(stretches: Iterable[Stretch], begin: float, end: float) -> Iterable[Stretch]:
    for low, high in stretches:
        if high > begin and low < end:
            yield max(low, begin), min(high, end)


def medians(found: Collection[dict[str, float]]) -> dict[str, float]:
    """Of every step and stage, milliseconds."""
    names = [name for name, _, _ in STEPS] + [name for parts in WITHIN.values() for name, _ in parts]
    return {
        name: value * 1e3
        for name in names
        if (value := percentile([one[name] for one in found], 0.5)) is not None
    }
