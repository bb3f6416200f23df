# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.passes [--model DIR]`: time to the first token in one prefill pass and in two, in the same run.

Two clusters on the same devices, alike but for the prefill worker: `one` exports the boundary at N-1 and the aligned
checkpoint from one pass, `two` ends a pass where the checkpoint lies (DELTASERVE_INTERNAL_CHECKPOINTS=0 on CUDA, an
option of the engine on a CPU). `bare` is `one` without a checkpoint. Requests go to them in turns, one at a time, every
prompt new. Passes and tokens are the prefill worker's own counters.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.handoff.table import render
from benchmarks.serving import model as serving_model
from benchmarks.started import Started
from deltaserve.verify.client import Endpoint
from deltaserve.verify.prompts import Case, Prompt

VARIANTS = ("one", "two", "bare")


@dataclass
class Row:
    """Requests of one length on one cluster; seconds."""

    variant: str
    length: int
    first: list[float] = field(default_factory=list)
    """To the first token."""
    published: list[float] = field(default_factory=list)
    """To the commit that the router heard of."""
    passes: float = 0.0
    again: float = 0.0
    """Tokens that were computed twice."""
    nbytes: int = 0


def options(args: argparse.Namespace, variant: str) -> tuple[list[str], dict[str, str]]:
    """Of `deltaserve up`, and the environment."""
    prefill: dict[str, Any] = {"checkpoint_tokens": 0} if variant == "bare" else {}
    environment: dict[str, str] = {}
    chosen = ["--model", str(args.model), "--device", args.device, "--max-model-len", str(args.max_model_len)]
    chosen += ["--max-num-batched-tokens", str(args.tokens), "--kv-cache-bytes", str(args.kv_cache_bytes)]
    extra = weightless(args)
    if args.device == "cpu":
        extra |= {
            "additional_config": {"kda_prefill_checkpoint": variant != "two"},
            "max_num_scheduled_tokens": args.tokens,
            "long_prefill_token_threshold": 0,
        }
    elif variant == "two":
        environment["DELTASERVE_INTERNAL_CHECKPOINTS"] = "0"
    if extra:
        prefill["extra_args"] = extra
    if args.weightless:
        chosen += ["--decode-options", json.dumps({"extra_args": weightless(args)})]
    return [*chosen, "--prefill-options", json.dumps(prefill)], environment


def weightless(args: argparse.Namespace) -> dict[str, Any]:
    """Engine arguments of a model whose weights every engine makes for itself; else none."""
    return {"load_format": "dummy"} if args.weightless else {}


def measure(clusters: list[Started], lengths: list[int], turns: int) -> list[Row]:
    """`turns` prompts of every length to every cluster, in turns, after one that is not counted."""
    endpoints = {cluster.name: Endpoint(cluster.url) for cluster in clusters}
    rows = []
    for length in lengths:
        mine = {cluster.name: Row(cluster.name, length) for cluster in clusters}
        before = {cluster.name: _counts(cluster) for cluster in clusters}
        for turn in range(turns + 1):
            for cluster in clusters if turn % 2 else reversed(clusters):
                tokens = tuple(random.choices(range(16, 500), k=length))
                case = Case(f"{length} tokens", Prompt(tokens), max_tokens=2)
                _, trace = endpoints[cluster.name].complete(case, "handover", salt=uuid.uuid4().hex)
                if trace.get("from_store", 0) < length - 1:
                    raise RuntimeError(f"{cluster.name}: {length} tokens were not handed over: {trace}")
                row = mine[cluster.name]
                row.nbytes = trace["boundary_bytes"]
                if turn:
                    row.first.append(trace["first_token_after"])
                    row.published.append(trace["published_after"])
        for cluster in clusters:
            passes, again = _counts(cluster)
            row = mine[cluster.name]
            row.passes = (passes - before[cluster.name][0]) / (turns + 1)
            row.again = again - before[cluster.name][1]
        rows += mine.values()
        print(table(rows[-len(clusters) :]), flush=True)
    return rows


def _counts(cluster: Started) -> tuple[float, float]:
    """Prefill passes; tokens computed again."""
    total = cluster.counter("deltaserve_prefill_tokens_total")
    once = cluster.counter('deltaserve_prefill_tokens_total{kind="once"}')
    return cluster.counter("deltaserve_prefill_passes_total"), total - once


def table(rows: list[Row]) -> str:
    """One line a cluster and length; milliseconds, and the ratio to `two` of the same length."""
    slow = {row.length: statistics.median(row.first) for row in rows if row.variant == "two"}
    lines = []
    for row in rows:
        took = statistics.median(row.first)
        ratio = f"{took / slow[row.length]:.3f}" if row.length in slow else ""
        lines.append(
            (
                str(row.length),
                row.variant,
                f"{row.passes:.2f}",
                f"{row.again:.0f}",
                str(row.nbytes),
                f"{took * 1e3:.1f}",
                f"{min(row.first) * 1e3:.1f}",
                f"{statistics.median(row.published) * 1e3:.1f}",
                ratio,
            )
        )
    head = (
        "tokens",
        "variant",
        "passes",
        "again",
        "bytes",
        "TTFT p50 ms",
        "least ms",
        "commit p50 ms",
        "of two",
    )
    return render(head, lines)


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument(
        "--weightless",
        action="store_true",
        help="the 4.9B model of benchmarks.serving instead of --model: a prompt is as long as a prompt there",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 2000, 4000, 8000])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of an engine step")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--kv-cache-bytes", type=int, default=2 << 30)
    parser.add_argument(
        "--out", type=Path, help="folder of the logs and of passes.json; empty: a temporary one"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deltaserve-passes-") as temporary:
        folder = args.out or Path(temporary)
        if args.weightless:
            args.model = serving_model.write(folder / "model")
        clusters: list[Started] = []
        try:
            for variant in args.variants:
                clusters.append(Started(variant, *options(args, variant), folder))
            for cluster in clusters:
                cluster.ready()
                print(f"{cluster.name}: ready", flush=True)
            rows = measure(clusters, args.lengths, args.turns)
        finally:
            for cluster in clusters:
                cluster.stop()
        print("\n" + table(rows))
        if args.out:
            (args.out / "passes.json").write_text(json.dumps([vars(row) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
