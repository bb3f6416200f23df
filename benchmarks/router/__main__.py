# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.router`; see the package's description."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.router import load, sides
from benchmarks.router.engine import IDLE
from benchmarks.router.peers import PeerMissing
from benchmarks.router.sides import Side

AIMS = {"face one": {"stream": 3.5, "short": 0.9}, "face two, direct": {"stream": 2.5, "short": 0.35}}
IDLE_AIM, ADDED_AIM = 80.0, 3.0
SHORT_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    streams: int = 256
    tokens: int = 160
    short: int = 1000
    at_once: int = 16
    idle: int = 2000
    step_ms: float = 25.0
    """The engine's pace: 256 streams are about 10,000 tokens a second, which every side can bear on two cores."""


QUICK = Sizes(streams=64, tokens=60, short=200, idle=200)


@dataclass
class Row:
    """One side's numbers; None: not measured there."""

    name: str
    stream_cpu: float | None = None
    """CPU seconds for 100,000 streamed tokens."""
    short_cpu: float | None = None
    """CPU seconds for 1,000 short chats that are not streamed."""
    short_stream_cpu: float | None = None
    """The same, streamed."""
    p50_ms: float | None = None
    """Median time of a short chat, 16 at once."""
    first_ms: float | None = None
    """Median time to the first byte of a stream, all of them begun at once."""
    idle_kib: float | None = None
    """Memory of an idle stream."""
    load: float = 0.0
    """Load of the machine, one minute."""
    error: str = ""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.router", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--quick", action="store_true", help="small loads: a look, not a measurement")
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="sides whose name contains this; repeatable",
    )
    made.add_argument("--no-idle", action="store_true", help="leave the memory of idle streams out")
    return made


def measure(side: Side, sizes: Sizes, idle: bool) -> Row:
    """A side's row."""
    row = Row(side.name)
    run = asyncio.run
    run(load.short(side.url, sizes.short // 5, SHORT_TOKENS, sizes.at_once))
    run(load.short(side.url, sizes.short // 5, SHORT_TOKENS, sizes.at_once, stream=True))
    began = side.usage()
    result = run(load.short(side.url, sizes.short, SHORT_TOKENS, sizes.at_once))
    row.short_cpu = (side.usage().cpu - began.cpu) / sizes.short * 1e3
    row.p50_ms = statistics.median(result.whole) * 1e3
    began = side.usage()
    run(load.short(side.url, sizes.short, SHORT_TOKENS, sizes.at_once, stream=True))
    row.short_stream_cpu = (side.usage().cpu - began.cpu) / sizes.short * 1e3
    began = side.usage()
    result = run(load.streams(side.url, sizes.streams, sizes.tokens))
    row.stream_cpu = (side.usage().cpu - began.cpu) / (sizes.streams * sizes.tokens) * 1e5
    row.first_ms = statistics.median(result.first) * 1e3
    if idle and side.pids:
        before = side.usage().memory
        after = run(load.idle(side.url, sizes.idle, IDLE + 1, side.usage)).memory
        row.idle_kib = (after - before) / sizes.idle / 1024
    row.load = os.getloadavg()[0]
    return row


@contextlib.contextmanager
def over(step_ms: float, make: Callable[[dict[str, str]], Any]) -> Iterator[Side]:
    """A side over a simulator of its own."""
    with sides.engine(step_ms) as addresses, make(addresses) as side:
        yield side


@contextlib.contextmanager
def behind(step_ms: float, name: str) -> Iterator[Side]:
    """A peer with vLLM's Rust front end behind it."""
    with sides.bare_rust(step_ms) as rust, sides.peer(name, rust.url, rust.pids) as side:
        yield side


def all_sides(step_ms: float) -> dict[str, Callable[[], Any]]:
    """Every side, by name."""
    return {
        "engine alone": lambda: over(step_ms, sides.direct),
        "vllm-router": lambda: over(step_ms, lambda at: sides.peer("vllm-router", at["http"])),
        "smg": lambda: over(step_ms, lambda at: sides.peer("smg", at["http"])),
        "face one": lambda: over(step_ms, sides.face),
        "face one, 2 processes": lambda: over(step_ms, lambda at: sides.face(at, processes=2)),
        "face two, direct": lambda: over(step_ms, lambda at: sides.face(at, "rust", direct=True)),
        "face two, one door": lambda: over(step_ms, lambda at: sides.face(at, "rust")),
        "vllm-rs alone": lambda: sides.bare_rust(step_ms),
        "vllm-router + vllm-rs": lambda: behind(step_ms, "vllm-router"),
        "smg + vllm-rs": lambda: behind(step_ms, "smg"),
    }


def run(sizes: Sizes, only: Sequence[str], idle: bool) -> list[Row]:
    """A row for each side; one that does not come up is reported, and does not end the others."""
    rows = []
    for name, make in all_sides(sizes.step_ms).items():
        if only and not any(part in name for part in only):
            continue
        try:
            with make() as side:
                row = measure(side, sizes, idle)
        except (PeerMissing, RuntimeError, TimeoutError) as error:
            row = Row(name, error=f"{type(error).__name__}: {error}")
        row.name = name
        print(line(row), flush=True)
        rows.append(row)
    return rows


HEAD = (
    f"{'':<22} {'CPU s / 100k':>12} {'CPU s / 1,000':>13} {'same,':>9} {'p50 ms,':>8} {'first byte':>10} "
    f"{'KiB / idle':>10} {'load':>5}\n"
    f"{'':<22} {'tokens':>12} {'short chats':>13} {'streamed':>9} {'16 at once':>8} {'p50 ms':>8} {'stream':>10}"
)


def line(row: Row) -> str:
    """The row as text."""
    if row.error:
        return f"{row.name:<22} {row.error[:300]}"

    def cell(value: float | None, width: int, digits: int) -> str:
        return f"{'–' if value is None else f'{value:.{digits}f}':>{width}}"

    return (
        f"{row.name:<22} {cell(row.stream_cpu, 12, 2)} {cell(row.short_cpu, 13, 3)} "
        f"{cell(row.short_stream_cpu, 9, 3)} {cell(row.p50_ms, 8, 1)} {cell(row.first_ms, 10, 1)} "
        f"{cell(row.idle_kib, 10, 1)} {row.load:>5.1f}"
    )


def missed(rows: Sequence[Row]) -> list[str]:
    """The aims that this run did not meet, in words."""
    found = []
    by_name = {row.name: row for row in rows}
    alone = by_name.get("engine alone")
    for name, aims in AIMS.items():
        row = by_name.get(name)
        if row is None or row.error:
            continue
        checks: list[tuple[str, float | None, float]] = [
            ("CPU s / 100k tokens", row.stream_cpu, aims["stream"]),
            ("CPU s / 1,000 short chats", row.short_cpu, aims["short"]),
            ("KiB an idle stream", row.idle_kib, IDLE_AIM),
        ]
        if alone is not None and alone.p50_ms is not None and row.p50_ms is not None:
            checks.append(("added p50 ms", row.p50_ms - alone.p50_ms, ADDED_AIM))
        found += [
            f"{name}: {what} {value:.2f}, the aim is {aim}"
            for what, value, aim in checks
            if value is not None and value > aim
        ]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when an aim is missed or a side of ours did not come up."""
    options = parser().parse_args(arguments)
    print(HEAD)
    rows = run(QUICK if options.quick else Sizes(), options.only, not options.no_idle)
    misses = missed(rows)
    for text in misses:
        print(f"missed: {text}")
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(bool(misses) or any(row.error for row in rows if row.name in AIMS))


if __name__ == "__main__":
    sys.exit(main())
