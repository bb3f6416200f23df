# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.loads [--model DIR]`: how much of a decode step the copies of other requests' state cost.

Streams of one decode worker are timed token by token while other requests of one token arrive at a steady rate:

    alone      none arrive
    requests   prompts of two tokens: a request, a computed token and an answer, but no state
    loads      prompts of `--length` tokens, handed over: the same, and their state copied into the caches

What `loads` takes longer than `requests` is the copies and one attention over a long prompt each, if the prefill worker
has a device of its own (two GPUs). On one its kernels count too; `--elsewhere` tells them apart by one more phase:

    elsewhere  the prompts of `loads`, handed over inside a second cluster on the same device

Then what `loads` takes longer than `elsewhere` is what the decode worker itself pays, without what the copies and the
prompts take from the device, which both have.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.handoff.table import render
from benchmarks.serving import model as serving_model
from benchmarks.started import Started
from deltaserve.verify.client import Endpoint
from deltaserve.verify.prompts import Case, Prompt

PHASES = ("alone", "requests", "elsewhere", "loads")


@dataclass
class Phase:
    """One round of streams; seconds."""

    name: str
    gaps: list[float] = field(default_factory=list)
    """Between the tokens of a stream."""
    arrived: int = 0
    """Requests that came meanwhile and were answered."""
    nbytes: int = 0
    """Of one of them."""


def stream(endpoint: Endpoint, tokens: int, gaps: list[float]) -> None:
    """One answer of `tokens` tokens; the time between its events goes to `gaps`."""
    body = {
        "model": endpoint.model,
        "prompt": random.choices(range(16, 500), k=64),
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "kv_transfer_params": {"placement": "local"},
    }
    request = urllib.request.Request(
        f"{endpoint.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    last = 0.0
    with urllib.request.urlopen(request, timeout=600) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last:
                    gaps.append(now - last)
                last = now


def run(endpoint: Endpoint, name: str, args: argparse.Namespace, other: Endpoint | None = None) -> Phase:
    """One phase; `other`: the second cluster, for the phase `elsewhere`."""
    asked = other if name == "elsewhere" and other is not None else endpoint
    phase, over = Phase(name), threading.Event()
    lock = threading.Lock()

    def ask() -> None:
        length, placement = (2, "local") if name == "requests" else (args.length, "handover")
        case = Case(name, Prompt(tuple(random.choices(range(16, 500), k=length))), max_tokens=1)
        _, trace = asked.complete(case, placement, salt=uuid.uuid4().hex)
        with lock:
            if not over.is_set():
                phase.arrived += 1
                phase.nbytes = int(trace.get("boundary_bytes") or 0)

    own: list[list[float]] = [[] for _ in range(args.streams)]
    streams = [threading.Thread(target=stream, args=(endpoint, args.answer, gaps)) for gaps in own]
    others: list[threading.Thread] = []
    for one in streams:
        one.start()
    due = time.monotonic() + args.every
    while any(one.is_alive() for one in streams):
        time.sleep(min(0.01, args.every))
        if name != "alone" and time.monotonic() >= due:
            due += args.every
            others.append(threading.Thread(target=ask))
            others[-1].start()
    over.set()
    for other in others:
        other.join()
    for gaps in own:
        phase.gaps += gaps[len(gaps) // 10 :]  # the streams' own prompts are behind them
    return phase


def table(phases: list[Phase]) -> str:
    """One line a phase; milliseconds."""
    lines = []
    base: dict[str, float] = {}
    for phase in phases:
        gaps = sorted(phase.gaps)
        mean = statistics.fmean(gaps)
        base[phase.name] = mean
        over = [
            f"{mean / base[other] - 1:+.1%}" if phase.name == "loads" and other in base else ""
            for other in ("elsewhere", "requests")
        ]
        cuts = [gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.9, 0.99, 1.0)]
        lines.append(
            (
                phase.name,
                str(phase.arrived),
                str(phase.nbytes),
                f"{mean * 1e3:.3f}",
                *(f"{cut * 1e3:.3f}" for cut in cuts),
                *over,
            )
        )
    head = ("phase", "arrived", "bytes each", "ITL mean ms", "p50", "p90", "p99", "most")
    head = (*head, "over elsewhere", "over requests")
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
        help="the 4.9B model of benchmarks.serving instead of --model: 57 MB a load, steps of milliseconds",
    )
    parser.add_argument("--elsewhere", action="store_true", help="start a second cluster on the same devices")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--length", type=int, default=8000, help="tokens of a prompt whose state is loaded")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between two requests that arrive")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--answer", type=int, default=1500, help="tokens of a stream")
    parser.add_argument("--rounds", type=int, default=2, help="how often the phases follow one another")
    parser.add_argument("--kv-cache-bytes", type=int, default=4 << 30)
    parser.add_argument(
        "--out", type=Path, help="folder of the logs and of loads.json; empty: a temporary one"
    )
    args = parser.parse_args()
    options = ["--device", args.device, "--max-num-batched-tokens", "8192", "--max-num-seqs", "16"]
    options += ["--kv-cache-bytes", str(args.kv_cache_bytes)]
    with tempfile.TemporaryDirectory(prefix="deltaserve-loads-") as temporary:
        folder = args.out or Path(temporary)
        if args.weightless:
            dummy = json.dumps({"extra_args": {"load_format": "dummy"}})
            options += ["--prefill-options", dummy, "--decode-options", dummy, "--max-model-len", "16384"]
            args.model = serving_model.write(folder / "model")
        options += ["--model", str(args.model)]
        names = [name for name in PHASES if name != "elsewhere" or args.elsewhere]
        clusters = [Started(name, options, {}, folder) for name in names if name in ("elsewhere", "loads")]
        found: dict[str, Phase] = {name: Phase(name) for name in names}
        try:
            for cluster in clusters:
                cluster.ready()
                print(f"{cluster.name}: ready", flush=True)
            other, endpoint = Endpoint(clusters[0].url), Endpoint(clusters[-1].url)
            warm = argparse.Namespace(**{**vars(args), "answer": max(16, args.answer // 10)})
            for name in names:
                run(endpoint, name, warm, other)
            for _ in range(args.rounds):
                for name in names:
                    phase = run(endpoint, name, args, other)
                    print(f"{name}: {len(phase.gaps)} tokens, {phase.arrived} requests", flush=True)
                    found[name].gaps += phase.gaps
                    found[name].arrived += phase.arrived
                    found[name].nbytes = phase.nbytes
                print("\n" + table(list(found.values())), flush=True)
        finally:
            for cluster in clusters:
                cluster.stop()
        if args.out:
            summary: dict[str, Any] = {name: vars(phase) for name, phase in found.items()}
            (args.out / "loads.json").write_text(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
