# SPDX-License-Identifier: Apache-2.0
"""Metrics of several processes as one.

Counters and histograms are added, and what ended processes have counted stays in the sum: every process keeps its
counts in a file of its own, each time it tells them and every few seconds besides, and the files of ended processes are
added up into one. So a sum never falls, which Prometheus would take for a restart and count twice. Gauges are added
where they say how much there is (requests, tokens, bytes), and else as `GAUGES` says.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

GAUGES: dict[str, Callable[[Iterable[float]], float]] = {
    "deltaserve_router_workers": max,
    "deltaserve_router_info": max,
    "deltaserve_router_register_connected": min,
    "process_start_time_seconds": min,
    "process_max_fds": max,
    "python_info": max,
    "vllm:cache_config_info": max,
}
"""How gauges of several processes become one; those that are not here are added."""
_ADDED = ("counter", "histogram", "summary")
_ENDED = "ended.json"

Families = dict[str, Any]
"""`pid`, and `families`: [name, type, words, [[sample, labels, value], ...]] of each."""


def families(registry: CollectorRegistry) -> Families:
    """What a registry has now."""
    found = [
        [
            metric.name,
            metric.type,
            metric.documentation,
            [[sample.name, sample.labels, sample.value] for sample in metric.samples],
        ]
        for metric in registry.collect()
    ]
    return {"pid": os.getpid(), "families": found}


def merged(several: Iterable[Families]) -> list[Metric]:
    """One metric for each name, in the order of the first that has it."""
    metrics: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
    for one in several:
        for name, kind, words, samples in one["families"]:
            metrics.setdefault(name, Metric(name, words, kind))
            for sample, labels, value in samples:
                values.setdefault((name, sample, tuple(labels.items())), []).append(value)
    for (name, sample, labels), found in values.items():
        metric = metrics[name]
        if metric.type in _ADDED:
            how = min if sample.endswith("_created") else sum
        else:
            how = GAUGES.get(name, sum)
        metric.add_sample(sample, dict(labels), how(found))
    return list(metrics.values())


class _Collected:
    """Looks like a registry to `generate_latest`."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class Counted:
    """The files, in the router's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, index: int, found: Families) -> None:
        """Write down what this process has counted, gauges left out."""
        counts = [family for family in found["families"] if family[1] in _ADDED]
        self._write(self._path(index, found["pid"]), {"pid": found["pid"], "families": counts})

    def kept(self) -> dict[int, Families]:
        """By pid what processes have written down, those that have ended among them; 0: all that ended before."""
        with self._locked():
            paths = [*self._folder.glob("counts-*.json"), self._folder / _ENDED]
            found = (self._read(path) for path in paths)
            return {one["pid"]: one for one in found if one is not None}

    def end(self, index: int, pid: int) -> None:
        """A process has ended: its file becomes part of the sum."""
        path, ended = self._path(index, pid), self._folder / _ENDED
        with self._locked():
            parts = [one for one in (self._read(ended), self._read(path)) if one is not None]
            added = [
                [
                    metric.name,
                    metric.type,
                    metric.documentation,
                    [[sample.name, sample.labels, sample.value] for sample in metric.samples],
                ]
                for metric in merged(parts)
            ]
            self._write(ended, {"pid": 0, "families": added})
            path.unlink(missing_ok=True)

    @staticmethod
    def text(living: list[Families], kept: dict[int, Families]) -> bytes:
        """/metrics. `living`: those that have just said what they have; of others it is what they wrote down."""
        pids = {one["pid"] for one in living}
        away = [one for pid, one in kept.items() if pid not in pids]
        return generate_latest(_Collected(merged([*living, *away])))

    def _path(self, index: int, pid: int) -> Path:
        return self._folder / f"counts-{index}-{pid}.json"

    @staticmethod
    def _read(path: Path) -> Families | None:
        with contextlib.suppress(OSError, ValueError):
            found: Families = json.loads(path.read_bytes())
            return found
        return None

    def _write(self, path: Path, found: Families) -> None:
        """At once, or not at all: its writer may be killed."""
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(json.dumps(found).encode())
        new.replace(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def whole_health(own: dict[str, Any], others: list[dict[str, Any]], processes: int) -> dict[str, Any]:
    """/health of `processes` processes, as `own` sees the workers; `others`: those of the rest that have answered."""
    content = dict(own)
    for name in ("in_flight", "queued"):
        content[name] = own[name] + sum(other[name] for other in others)
    content["processes"] = {"wanted": processes, "serving": 1 + len(others)}
    away = processes - 1 - len(others)
    if away:
        content["missing"] = [
            *own["missing"],
            f"processes: {away} of {processes} router processes do not answer; the others serve its clients meanwhile",
        ]
        content["status"] = "degraded" if own["status"] == "ok" else own["status"]
    content["roles"] = {
        role: {
            **found,
            "workers": add_workers(found["workers"], [other["roles"][role]["workers"] for other in others]),
        }
        for role, found in own["roles"].items()
    }
    return content


def add_workers(
    own: list[dict[str, Any]],
    others: list[list[dict[str, Any]]],
    fields: tuple[str, ...] = ("requests", "outstanding_tokens", "state_bytes"),
) -> list[dict[str, Any]]:
    """Workers as one process sees them, with what all processes have given them in `fields`."""
    found = {worker["id"]: dict(worker) for worker in own}
    for theirs in others:
        for worker in theirs:
            if (mine := found.get(worker["id"])) is not None:
                for field in fields:
                    if field in mine:
                        mine[field] += worker[field]
    return list(found.values())
