# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.recovery`; see the package's description."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

from benchmarks.recovery.streams import (
    KINDS,
    TOOL_PARSER,
    Stream,
    differences,
    fetch,
    finish,
    started,
    streams,
)
from deltaserve.config import ClusterConfig
from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker

EXACT_AIM, PAUSE_AIM = 0.99, 1.5
PREFILL_EVERY = 4
"""Of so many kills, one is of the prefill worker, in the middle of the prompts."""
READY_SECONDS = 300.0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument("--kills", type=int, default=20, metavar="N", help="workers to kill (default: 20)")
    made.add_argument(
        "--minutes", type=float, default=0.0, metavar="N", help="stop after so long; 0: after --kills"
    )
    made.add_argument(
        "--tokens", type=int, default=150, metavar="N", help="length of the answers (default: 150)"
    )
    made.add_argument("--model", type=Path, default=Path("models/demo"), help="folder of the model")
    made.add_argument(
        "--hang", action="store_true", help="stop the workers (SIGSTOP) for 20 s rather than killing them"
    )
    return made


def victim(cluster: Cluster, stream: Stream) -> str:
    """The decode worker that has the stream, by its name; if it has ended, the one with most requests."""
    workers = fetch(cluster.endpoint, "/health")["roles"]["decode"]["workers"]
    trace = fetch(cluster.endpoint, f"/deltaserve/requests/{stream.id}")
    holder = str(trace.get("route", "")).rpartition(" ")[2] if trace.get("status") == "running" else ""
    address = max(workers, key=lambda worker: (worker["id"] == holder, worker["requests"]))["address"]
    return next(name for name, status in cluster.statuses.items() if status.address == address)


def pause(stream: Stream, trace: dict[str, Any]) -> float:
    """Seconds without anything: as the client saw it, or between tokens where these come in few chunks (tool calls)."""
    return max(stream.gap, float(trace.get("longest_pause", 0.0)))


def kill_once(
    cluster: Cluster,
    expected: dict[str, Stream],
    running: dict[str, Stream],
    aim: str,
    prefill: bool,
    point: float,
) -> dict[str, Any]:
    """One kill in the middle of the stream of kind `aim`, or of the prompts; `point`: where in the middle, 0..1."""
    threads = [stream.start() for stream in running.values()]
    if prefill:
        time.sleep(0.3 * point)
        name = "prefill-0"
    else:
        started({aim: running[aim]}, 1 + int(point * max(0, expected[aim].chunks - 3)))
        name = victim(cluster, running[aim])
    starts = cluster.statuses[name].starts
    cluster.kill(name)
    finish(threads)
    traces = {
        kind: fetch(cluster.endpoint, f"/deltaserve/requests/{stream.id}") for kind, stream in running.items()
    }
    moved = [kind for kind, trace in traces.items() if trace.get("resumes", 0)]
    cluster.wait_ready(name, READY_SECONDS, after_start=starts)
    return {
        "worker": name,
        "hit": moved or sorted(kind for kind, trace in traces.items() if trace.get("failure")),
        "wrong": differences(running, expected),
        "pauses": {kind: pause(running[kind], traces[kind]) for kind in moved},
    }


def hang_once(cluster: Cluster, expected: dict[str, Stream], running: dict[str, Stream]) -> dict[str, Any]:
    """The same with a worker that stops for 20 s and then goes on."""
    threads = [stream.start() for stream in running.values()]
    started(running, 12)
    name = victim(cluster, running["greedy"])
    cluster.kill(name, signal.SIGSTOP)
    threading.Timer(20, cluster.kill, (name, signal.SIGCONT)).start()
    finish(threads)
    traces = {
        kind: fetch(cluster.endpoint, f"/deltaserve/requests/{stream.id}") for kind, stream in running.items()
    }
    moved = [kind for kind, trace in traces.items() if trace.get("resumes", 0)]
    time.sleep(25)
    return {
        "worker": name,
        "hit": moved,
        "wrong": differences(running, expected),
        "pauses": {kind: pause(running[kind], traces[kind]) for kind in moved},
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ordered values that `share` of them do not exceed; 0.0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def report(rows: Sequence[dict[str, Any]], normal: float) -> dict[str, Any]:
    """The result of all kills; prints it."""
    pauses = sorted(seconds for row in rows for seconds in row["pauses"].values())
    moved = {kind: sum(kind in row["pauses"] for row in rows) for kind in KINDS}
    result = {
        "kills": list(rows),
        "exact": sum(not row["wrong"] for row in rows),
        "decode_kills": sum(row["worker"].startswith("decode") for row in rows),
        "prefill_kills": sum(row["worker"].startswith("prefill") for row in rows),
        "moved": moved,
        "median_pause": statistics.median(pauses) if pauses else 0.0,
        "p90_pause": quantile(pauses, 0.9),
        "worst_pause": pauses[-1] if pauses else 0.0,
        "undisturbed_gap": normal,
    }
    shares = ", ".join(f"{count} {kind}" for kind, count in moved.items())
    print(
        f"{result['exact']} of {len(rows)} kills exact ({result['decode_kills']} of decode workers, "
        f"{result['prefill_kills']} of the prefill worker); {sum(moved.values())} streams moved ({shares}); "
        f"pause median {result['median_pause']:.2f} s, p90 {result['p90_pause']:.2f} s, worst "
        f"{result['worst_pause']:.2f} s; undisturbed, the longest gap is {normal:.2f} s; load "
        f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a kill and the result; 1 when an aim is missed."""
    options = parser().parse_args(arguments)
    prompt = PromptMaker(options.model).make(400).tokens
    noise = random.Random(1)
    aims, salts = cycle(KINDS), count()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        router: dict[str, object] = {"token_timeout": 2.0} if options.hang else {}
        config = ClusterConfig(
            model=options.model,
            port=0,
            decode=2,
            run_dir=Path(folder),
            max_restarts=1000,
            tool_parser=TOOL_PARSER,
            start_timeout=READY_SECONDS,
            router_options=router,
        )
        with Cluster(config) as cluster:

            def make() -> dict[str, Stream]:
                # A prompt that no cache holds, so that a prefill worker is hit in the middle of computing it.
                return streams(
                    cluster.endpoint,
                    cluster.served_model_name,
                    prompt,
                    options.tokens,
                    cache_salt=f"kill {next(salts)}",
                )

            finish([stream.start() for stream in make().values()])  # the first of a kind import and compile
            expected = make()
            finish([stream.start() for stream in expected.values()])
            bad = {kind: stream.error for kind, stream in expected.items() if stream.error or not stream.ends}
            if bad:
                print(f"the undisturbed streams failed: {bad}", file=sys.stderr)
                return 2
            limit = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
            while len(rows) < options.kills and time.monotonic() < limit:
                prefill = len(rows) % PREFILL_EVERY == PREFILL_EVERY - 1
                if options.hang:
                    row = hang_once(cluster, expected, make())
                else:
                    row = kill_once(cluster, expected, make(), next(aims), prefill, noise.random())
                rows.append(row)
                pauses = " ".join(f"{seconds:.2f}" for seconds in row["pauses"].values())
                print(
                    f"kill {len(rows):3}: {row['worker']}, hit {len(row['hit'])}, pauses {pauses or '-'} s",
                    flush=True,
                )
                for kind, what in row["wrong"].items():
                    print(f"          {kind}: {what}", flush=True)
    result = report(rows, max(stream.gap for stream in expected.values()))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    missed = result["exact"] < EXACT_AIM * len(rows) or result["median_pause"] > PAUSE_AIM
    return int(not any(row["pauses"] for row in rows) or missed)


if __name__ == "__main__":
    sys.exit(main())
