# SPDX-License-Identifier: Apache-2.0
"""Rows as they are printed, and what they say of the aims of docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.handoff.table import render

Row = dict[str, Any]


def rows_table(rows: Sequence[Row]) -> str:
    """A line a side and rate; milliseconds."""
    head = (
        *("side", "req/s", "sent", "failed", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p99", "tokens/s"),
        *("goodput", "handoff p50 / p99", "share", "MB", "client CPU", "lag p99"),
    )
    return render(head, [_line(row) for row in rows])


def _line(row: Row) -> tuple[str, ...]:
    share = row.get("handoff_share")
    nbytes = row.get("bytes")
    return (
        # Engines that share a device also wait for one another: no row of one is to be read as one of two.
        f"{row['side']}, 1 GPU" if row.get("gpus") == 1 else row["side"],
        f"{row['rate']:g}",
        str(row["requests"]),
        str(row["failed"]),
        f"{_ms(row, 'ttft_p50')} / {_ms(row, 'ttft_p99')}",
        f"{_ms(row, 'tpot_p50', 2)} / {_ms(row, 'tpot_p99', 2)}",
        _ms(row, "itl_p99", 1),
        f"{row['tokens_per_s']:.0f}",
        f"{row['goodput']:.2f}",
        f"{_ms(row, 'handoff_p50', 1)} / {_ms(row, 'handoff_p99', 1)}",
        "-" if share is None else f"{share:.0%}",
        "-" if nbytes is None else f"{nbytes / 1e6:.1f}",
        f"{row['client_cpu']:.0%}",
        _ms(row, "lag_p99", 1),
    )


def _ms(row: Row, name: str, digits: int = 0) -> str:
    value = row.get(name)
    return "-" if value is None else f"{value:.{digits}f}"


def parts_lines(rows: Sequence[Row]) -> list[str]:
    """What each row's handoff consists of (medians), and where prompts were computed."""
    lines = []
    for row in rows:
        if row.get("kv_tokens"):
            held = ", ".join(f"{name} {tokens:,}" for name, tokens in row["kv_tokens"].items())
            lines.append(f"{row['side']} {row['rate']:g}: cache holds {held} tokens")
        if "stages" not in row:
            continue
        stages = "  ".join(f"{name} {value:.1f}" for name, value in row["stages"].items())
        placed = ", ".join(f"{name} {number}" for name, number in sorted(row["placements"].items()))
        lines.append(f"{row['side']} {row['rate']:g}: {stages}  |  {placed}")
    return lines


def aims(rows: Sequence[Row]) -> list[str]:
    """How `delta`, and its variants, stand to `nixl` at every rate that both have, in the order of the rates."""
    by = {(row["side"], row["rate"]): row for row in rows}
    lines = []
    for (side, rate), ours in sorted(by.items(), key=lambda found: (found[0][1], found[0][0])):
        theirs = by.get(("nixl", rate))
        if not side.startswith("delta") or theirs is None:
            continue
        parts = [
            f"{name} {ours[key] / theirs[key]:.2f} x"
            for name, key in (
                ("handoff p50", "handoff_p50"),
                ("TTFT p99", "ttft_p99"),
                ("TPOT p99", "tpot_p99"),
                ("goodput", "goodput"),
            )
            if ours.get(key) is not None and theirs.get(key)
        ]
        lines.append(f"{rate:g} req/s, {side} to nixl: {', '.join(parts)}")
    return lines
