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


@dataclass(frozen=True)
class Repetition:
    """One handoff: seconds in all and by stage, and bytes that the reader read."""

    seconds: float
    stages: dict[str, float]
    nbytes: int


@dataclass
class SizeResult:
    """One size: handoffs and bare transfers, turn by turn."""

    mib: int
    nbytes: int
    length: int
    handoffs: list[Repetition] = field(default_factory=list)
    bare: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of put and of get."""
    etcd: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of a write and of a read of a record's size, with nothing around them."""

    def totals(self) -> list[float]:
        """Seconds of every handoff."""
        return [one.seconds for one in self.handoffs]

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
            "bare": spread(self.bare_totals()),
            "bare_put": spread([put for put, _ in self.bare]),
            "bare_get": spread([get for _, get in self.bare]),
            "ratio": self.ratio,
            "ratio_of_fastest": self.best_ratio,
            "aim": AIM,
            "etcd_write": spread([write for write, _ in self.etcd]),
            "etcd_read": spread([look for _, look in self.etcd]),
            "serial": self.serial(copy, read),
            "least": self.least(copy),
            "stages": {name: self.stage(name) for name in STAGES},
        }


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
            "bare ms",
            "(put",
            "get)",
            "ratio",
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
                quartiles(r.bare_totals()),
                cell(statistics.median(put for put, _ in r.bare)),
                cell(statistics.median(get for _, get in r.bare)),
                f"{r.ratio:.2f}",
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
    return f"{totals}\n\n{stages}"
