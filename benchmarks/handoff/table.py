# SPDX-License-Identifier: Apache-2.0
"""Results and how they are printed. Times are medians over the turns; the spread is their quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

AIM = 1.25
"""Most that a handoff may take, as a multiple of bare."""

STAGES = (
    "gather",
    "proof",
    "put",
    "commit",
    "record",
    "get",
    "proof (read)",
    "scatter",
)
"""In the order of the handoff."""


PATH = (
    "written",
    "committed",
    "reader asked",
    "record read",
    "copied and checked",
    "in the cache",
)
"""What follows one another from the prefill's last kernel to the decode's first step; together they are the handoff."""

EARLY_PATH = (
    "written",
    "reader asked",
    "copied and checked",
    "in the cache",
    "committed record known",
)
"""The same of a handoff that is read beside its commit: the last step is what is left to wait for then."""

ETCD = ("committed", "record read")
"""Those of them that wait for etcd."""


@dataclass(frozen=True)
class Repetition:
    """One handoff: seconds in all and by stage, bytes that the reader read, and seconds by step of `PATH`."""

    seconds: float
    stages: dict[str, float]
    nbytes: int
    path: dict[str, float] = field(default_factory=dict)


@dataclass
class SizeResult:
    """One size: handoffs and bare transfers, turn by turn."""

    mib: int
    nbytes: int
    length: int
    handoffs: list[Repetition] = field(default_factory=list)
    early: list[Repetition] = field(default_factory=list)
    """Handoffs that are read beside their commit."""
    bare: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of put and of get."""
    etcd: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of a write and of a read of a record's size, with nothing around them."""

    def clear(self) -> None:
        """Forget the turns so far."""
        for turns in (self.handoffs, self.early, self.bare, self.etcd):
            turns.clear()

    def totals(self) -> list[float]:
        """Seconds of every handoff that is read after its commit."""
        return [one.seconds for one in self.handoffs]

    def early_totals(self) -> list[float]:
        """Seconds of every handoff that is read beside its commit."""
        return [one.seconds for one in self.early]

    @property
    def early_ratio(self) -> float:
        """Median over median."""
        return statistics.median(self.early_totals()) / statistics.median(self.bare_totals())

    def bare_totals(self) -> list[float]:
        """Seconds of every bare put and get."""
        return [put + get for put, get in self.bare]

    @property
    def ratio(self) -> float:
        """Median over median."""
        return statistics.median(self.totals()) / statistics.median(self.bare_totals())

    @property
    def best_ratio(self) -> float:
        """Fastest over fastest: what is left when nothing else ran."""
        return min(self.totals()) / min(self.bare_totals())

    def stage(self, name: str) -> float:
        """Median seconds of a stage."""
        return statistics.median(one.stages.get(name, 0.0) for one in self.handoffs)

    def path(self) -> dict[str, float]:
        """Mean seconds of every step of `PATH` in the middle half of the handoffs, so that they add up."""
        return _middle(self.handoffs, PATH)

    def early_path(self) -> dict[str, float]:
        """The same of those that are read beside their commit, by `EARLY_PATH`."""
        return _middle(self.early, EARLY_PATH)

    def beyond(self) -> dict[str, float]:
        """What a handoff takes beyond bare, in parts of bare that add up to (ratio - 1): see `beyond_table`."""
        path, put, get = self.path(), self.bare_median(0), self.bare_median(1)
        seconds = {
            "written, beyond bare put": path["written"] - put,
            "etcd: commit and record": sum(path[name] for name in ETCD),
            "message to the reader": path["reader asked"],
            "copied and checked, beyond bare get": path["copied and checked"] - get,
            "second copy, into the cache": path["in the cache"],
        }
        return {name: value / (put + get) for name, value in seconds.items()}

    def serial(self, copy: float, read: float) -> float:
        """Seconds that all the work takes one step after the other when nothing but memory and etcd costs anything.

        Bare, two copies (gather, scatter) and two reads (proof and digest in one pass, on either side), at `copy` and
        `read` bytes a second, a write to etcd and a read.
        """
        write, look = self.etcd_median(0), self.etcd_median(1)
        return (
            self.bare_median(0) + self.bare_median(1) + 2 * self.nbytes * (1 / copy + 1 / read) + write + look
        )

    def least(self, copy: float) -> float:
        """Seconds below which no overlap can go: the commit follows the put, and nothing is in a cache before it.

        The put, then the commit beside the get, then one copy into the cache.
        """
        return self.bare_median(0) + max(self.etcd_median(0), self.bare_median(1)) + self.nbytes / copy

    def bare_median(self, which: int) -> float:
        """Median seconds of the put (0) or the get (1)."""
        return statistics.median(one[which] for one in self.bare)

    def etcd_median(self, which: int) -> float:
        """Median seconds of a bare write to etcd (0) or a bare read (1)."""
        return statistics.median(one[which] for one in self.etcd)

    def to_dict(self, copy: float, read: float) -> dict[str, Any]:
        """JSON values; seconds."""
        return {
            "mib": self.mib,
            "nbytes": self.nbytes,
            "tokens": self.length,
            "turns": len(self.handoffs),
            "bytes_read_over_needed": self.handoffs[0].nbytes / self.nbytes,
            "handoff": spread(self.totals()),
            "early": spread(self.early_totals()),
            "bare": spread(self.bare_totals()),
            "bare_put": spread([put for put, _ in self.bare]),
            "bare_get": spread([get for _, get in self.bare]),
            "ratio": self.ratio,
            "ratio_of_fastest": self.best_ratio,
            "early_ratio": self.early_ratio,
            "aim": AIM,
            "etcd_write": spread([write for write, _ in self.etcd]),
            "etcd_read": spread([look for _, look in self.etcd]),
            "serial": self.serial(copy, read),
            "least": self.least(copy),
            "stages": {name: self.stage(name) for name in STAGES},
            "path": self.path(),
            "early_path": self.early_path(),
            "beyond_bare": self.beyond(),
        }


def _middle(handoffs: Sequence[Repetition], names: Sequence[str]) -> dict[str, float]:
    ordered = sorted(handoffs, key=lambda one: one.seconds)
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return {name: statistics.fmean(one.path.get(name, 0.0) for one in middle) for name in names}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, quartiles and median; quartiles need two values."""
    low, high = (min(values), max(values))
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"min": min(values), "p25": low, "median": statistics.median(values), "p75": high}


def render(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def handoff_table(results: Sequence[SizeResult], copy: float, read: float) -> str:
    """Handoff and bare beside each other, then the stages; milliseconds."""

    def cell(seconds: float) -> str:
        return f"{seconds * 1e3:.2f}"

    def quartiles(values: Sequence[float]) -> str:
        found = spread(values)
        return f"{cell(found['median'])} [{cell(found['p25'])}, {cell(found['p75'])}]"

    totals = render(
        (
            "state",
            "bytes",
            "turns",
            "handoff ms",
            "early ms",
            "bare ms",
            "(put",
            "get)",
            "ratio",
            "early",
            "of fastest",
            "etcd (write",
            "read)",
            "serial",
            "least",
            "/ bare",
        ),
        [
            (
                f"{r.mib} MiB",
                str(r.nbytes),
                str(len(r.handoffs)),
                quartiles(r.totals()),
                quartiles(r.early_totals()),
                quartiles(r.bare_totals()),
                cell(statistics.median(put for put, _ in r.bare)),
                cell(statistics.median(get for _, get in r.bare)),
                f"{r.ratio:.2f}",
                f"{r.early_ratio:.2f}",
                f"{r.best_ratio:.2f}",
                cell(r.etcd_median(0)),
                cell(r.etcd_median(1)),
                cell(r.serial(copy, read)),
                cell(r.least(copy)),
                f"{r.least(copy) / statistics.median(r.bare_totals()):.2f}",
            )
            for r in results
        ],
    )
    stages = render(
        ("stage, ms", *(f"{r.mib} MiB" for r in results)),
        [(name, *(cell(r.stage(name)) for r in results)) for name in STAGES],
    )
    tables = [totals, stages, path_table(results), early_path_table(results), beyond_table(results)]
    return "\n\n".join(tables)


def path_table(results: Sequence[SizeResult]) -> str:
    """The handoff from its begin to its end, step by step: means of the middle half of the turns, which add up."""
    return _path_table("step, ms (mean of the middle half)", results, [r.path() for r in results])


def early_path_table(results: Sequence[SizeResult]) -> str:
    """The same of handoffs that are read beside their commit."""
    return _path_table("read beside the commit, ms", results, [r.early_path() for r in results])


def _path_table(title: str, results: Sequence[SizeResult], paths: Sequence[dict[str, float]]) -> str:
    rows = [(name, *(f"{path[name] * 1e3:.2f}" for path in paths)) for name in (paths[0] if paths else ())]
    rows.append(("together", *(f"{sum(path.values()) * 1e3:.2f}" for path in paths)))
    return render((title, *(f"{r.mib} MiB" for r in results)), rows)


def beyond_table(results: Sequence[SizeResult]) -> str:
    """What the handoff takes beyond bare, as multiples of bare put and get; 1 and these add up to the ratio."""
    parts = [r.beyond() for r in results]
    rows = [(name, *(f"{part[name]:+.2f}" for part in parts)) for name in parts[0]] if parts else []
    rows.append(("bare, and these", *(f"{1 + sum(part.values()):.2f}" for part in parts)))
    return render(("beyond bare, in multiples of it", *(f"{r.mib} MiB" for r in results)), rows)
