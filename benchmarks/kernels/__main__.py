# SPDX-License-Identifier: Apache-2.0
"""Command line of ``python -m benchmarks.kernels``: measures, prints the table and the aims, writes JSON."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels import sides
from benchmarks.kernels.layers import Layers
from benchmarks.kernels.timing import copy_bandwidth
from decode_worker.replay_ssm.gpu_path import KernelConfig, choose

HEADER = (
    "  H   B  T |   write | recover (verify+commit) |  ours | floor | floor/ours | write/ours | recover/ours"
)


def attempt(what: str, measure: Callable[[], Any]) -> Any:
    """A side that cannot run (no vLLM, out of memory) is reported and left out; the others still count."""
    try:
        return measure()
    except Exception as error:
        print(f"  {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        if not isinstance(error, ImportError):
            traceback.print_exc(limit=-2)
        return None


def point(
    heads: int, batch: int, window: int, bandwidth: float, peers: bool, tune: bool, ring: int
) -> dict[str, Any]:
    """Measure one shape on every side."""
    layers = Layers(heads, batch, window)
    row: dict[str, Any] = {"heads": heads, "batch": batch, "window": window, "layers": layers.count}
    row["floor_us"] = layers.least_bytes() / bandwidth * 1e6
    row["two_state_passes_us"] = 2 * layers.state_bytes / bandwidth * 1e6
    config = choose(window, batch * heads)
    if tune:
        config = best_cut(row, "tuned", layers) or config
    row["config"] = asdict(config)
    row["ours_us"] = attempt("ReplaySSM", lambda: sides.replay_ssm(layers, config))
    if peers:
        recover = attempt("RecoverSSM", lambda: sides.recover_ssm(layers))
        if recover:
            row["verify_us"], row["commit_us"] = recover
            row["recover_us"] = sum(recover)
        row["write_us"] = attempt("write states", lambda: sides.write_states(layers))
    if ring:
        del layers
        torch.cuda.empty_cache()
        turning = Layers(heads, batch, window, ring)
        row["ring_floor_us"] = turning.least_bytes() / bandwidth * 1e6
        config = choose(turning.records[0].u.shape[2], batch * heads)
        if tune:
            config = best_cut(row, "ring_tuned", turning) or config
        row["ring_config"] = asdict(config)
        row["ring_us"] = attempt("ring", lambda: sides.replay_ssm(turning, config))
    return row


def best_cut(row: dict[str, Any], name: str, layers: Layers) -> KernelConfig | None:
    """Try every cut of the kernel; print and keep what each took; return the fastest, None if none ran."""
    tried: list[tuple[float, KernelConfig]] | None = attempt(name, lambda: sides.tune(layers))
    row[name] = [{"us": us, **asdict(c)} for us, c in tried or []]
    for us, c in tried or []:
        print(f"  {us:8.1f} us  warps {c.warps}, registers {c.registers}, stream {c.stream}", flush=True)
    return tried[0][1] if tried else None


def show(row: dict[str, Any]) -> None:
    def number(name: str, width: int) -> str:
        value = row.get(name)
        return f"{value:{width}.1f}" if value is not None else "-".rjust(width)

    def ratio(a: str, b: str, width: int) -> str:
        return f"{row[a] / row[b]:{width}.2f}" if row.get(a) and row.get(b) else "-".rjust(width)

    recover = f"{number('recover_us', 7)} ({number('verify_us', 6)}+{number('commit_us', 6)})"
    print(
        f"{row['heads']:3d} {row['batch']:3d} {row['window']:2d} | {number('write_us', 7)} | {recover:>23s} |"
        f" {number('ours_us', 5)} | {number('floor_us', 5)} | {ratio('floor_us', 'ours_us', 10)} |"
        f" {ratio('write_us', 'ours_us', 10)} | {ratio('recover_us', 'ours_us', 12)}"
        + (f" | ring {number('ring_us', 5)}, floor {number('ring_floor_us', 5)}" if "ring_us" in row else ""),
        flush=True,
    )


def aims(rows: list[dict[str, Any]]) -> list[str]:
    """The aims at T = 8, with what they were measured at."""
    lines = []
    large = [
        r for r in rows if r["window"] == 8 and r["batch"] >= 32 and r.get("ours_us") and r.get("write_us")
    ]
    if large:
        for name, aim, values in (
            (
                "RecoverSSM / ours",
                3.5,
                [r["recover_us"] / r["ours_us"] for r in large if r.get("recover_us")],
            ),
            ("write states / ours", 2.5, [r["write_us"] / r["ours_us"] for r in large]),
            ("byte floor / ours", 0.6, [r["floor_us"] / r["ours_us"] for r in large]),
        ):
            met = sum(v >= aim for v in values)
            lines.append(
                f"T=8, batch >= 32: {name} {min(values):.2f} to {max(values):.2f}; "
                f"at least {aim} in {met} of {len(values)} shapes"
            )
    for r in rows:
        if r["batch"] == 1 and r.get("ours_us") and r.get("write_us") and r.get("recover_us"):
            best = min(r["write_us"], r["recover_us"])
            lines.append(
                f"batch 1, H={r['heads']}, T={r['window']}: {r['ours_us']:.1f} us, the better peer {best:.1f} us"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="write every measurement here")
    parser.add_argument("--quick", action="store_true", help="three shapes at T=8")
    parser.add_argument("--heads", default="12,24,96")
    parser.add_argument("--batch", default="1,16,32,64,128")
    parser.add_argument("--window", default="8,4,2")
    parser.add_argument("--tune", action="store_true", help="try every cut of the kernels and take the best")
    parser.add_argument(
        "--ring", type=int, default=0, help="also a ring that is flushed at so many accepted tokens"
    )
    parser.add_argument("--no-peers", action="store_true", help="this project's kernels alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "error: no CUDA device: the kernels are made for Hopper\n")
    shapes = [
        (int(h), int(b), int(t))
        for t in options.window.split(",")
        for h in options.heads.split(",")
        for b in options.batch.split(",")
    ]
    if options.quick:
        shapes = [(12, 1, 8), (12, 32, 8), (24, 128, 8)]
    torch.manual_seed(1)
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    print(
        f"{device}, torch {torch.__version__}; copy {bandwidth / 1e12:.2f} TB/s (read + written); us per layer"
    )
    print(HEADER, flush=True)
    rows: list[dict[str, Any]] = []
    for heads, batch, window in shapes:
        row = point(
            heads,
            batch,
            window,
            bandwidth,
            not options.no_peers,
            options.tune,
            options.ring,
        )
        rows.append(row)
        show(row)
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps({"device": device, "copy": bandwidth, "rows": rows}, indent=1))
    print("\n".join(aims(rows)))


if __name__ == "__main__":
    main()
