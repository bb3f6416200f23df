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
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.recovery.streams import (
    CHATS,
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
_OF_A_MOVE = ("longest_pause", "route", "failure", "detail", "from_store", "recomputed", "attempts")
"""What the file keeps of a moved stream's trace, beside the longest gap between its chunks: why a pause was long."""


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
    made.add_argument(
        "--decode",
        type=int,
        default=2,
        metavar="N",
        help="decode workers; 2 of them serve at a kill (default: 2)",
    )
    made.add_argument(
        "--go-on", action="store_true", help="count the kills that --json's FILE has already, and add to them"
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


def pause(kind: str, stream: Stream, trace: dict[str, Any], moment: float) -> float:
    """Seconds without a token around the kill: as the client saw it, where it sees nearly every token.

    Chats come in fewer chunks than tokens, a tool call in one or two, so that their clients wait for seconds
    without a kill as well; of them it is the time between two tokens by the router's own count.
    """
    seen = 0.0 if kind in CHATS else stream.gap_at(moment)
    return max(seen, float(trace.get("longest_pause", 0.0)))


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
    cluster.kill(name)
    moment = time.monotonic()
    finish(threads)
    traces = {
        kind: fetch(cluster.endpoint, f"/deltaserve/requests/{stream.id}") for kind, stream in running.items()
    }
    moved = [kind for kind, trace in traces.items() if trace.get("resumes", 0)]
    return {
        "worker": name,
        "load": os.getloadavg()[0],
        "hit": moved or sorted(kind for kind, trace in traces.items() if trace.get("failure")),
        "wrong": differences(running, expected),
        "pauses": {kind: pause(kind, running[kind], traces[kind], moment) for kind in moved},
        "moves": {
            kind: {"chunks": running[kind].gap, **{name: traces[kind].get(name) for name in _OF_A_MOVE}}
            for kind in moved
        },
    }


def wait_serving(cluster: Cluster) -> None:
    """Return when the router has a prefill worker and two decode workers. Raises TimeoutError."""
    limit = time.monotonic() + READY_SECONDS
    while True:
        roles = fetch(cluster.endpoint, "/health").get("roles", {})
        ready = {role: found["ready"] for role, found in roles.items()}
        if ready.get("prefill", 0) >= 1 and ready.get("decode", 0) >= 2:
            return
        if time.monotonic() > limit:
            raise TimeoutError(f"the killed workers do not come back: {ready} serve")
        time.sleep(0.1)


def hang_once(cluster: Cluster, expected: dict[str, Stream], running: dict[str, Stream]) -> dict[str, Any]:
    """The same with a worker that stops for 20 s and then goes on."""
    threads = [stream.start() for stream in running.values()]
    started(running, 12)
    name = victim(cluster, running["greedy"])
    cluster.kill(name, signal.SIGSTOP)
    moment = time.monotonic()
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
        "pauses": {kind: pause(kind, running[kind], traces[kind], moment) for kind in moved},
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ordered values that `share` of them do not exceed; 0.0 without values."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line a kind: streams at the kills, how many went on as undisturbed; those moved, likewise; their pauses."""
    lines = [
        f"{'':<8} {'streams':>8} {'exact':>6} {'moved':>6} {'exact':>6} {'median s':>9} {'p90 s':>6} {'worst s':>8}"
    ]
    for kind in KINDS:
        moved = [row for row in rows if kind in row["pauses"]]
        pauses = sorted(row["pauses"][kind] for row in moved)
        exact, moved_exact = (sum(kind not in row["wrong"] for row in some) for some in (rows, moved))
        lines.append(
            f"{kind:<8} {len(rows):>8} {exact:>6} {len(moved):>6} {moved_exact:>6} "
            f"{statistics.median(pauses) if pauses else 0.0:>9.2f} {quantile(pauses, 0.9):>6.2f} "
            f"{pauses[-1] if pauses else 0.0:>8.2f}"
        )
    return lines


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
    print("\n".join(table(rows)))
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
    made = parser()
    options = made.parse_args(arguments)
    if options.go_on and not (options.json and options.json.exists()):
        made.error("--go-on: needs the FILE of a run before, by --json")
    if options.decode < 2:
        made.error("--decode: must be at least 2, or no other worker can go on")
    prompt = PromptMaker(options.model).make(400).tokens
    rows, normal = [], 0.0
    if options.go_on:
        before = json.loads(options.json.read_text())
        rows, normal = before["kills"], before["undisturbed_gap"]
    noise = random.Random(1 + len(rows))
    aims, salts = islice(cycle(KINDS), len(rows) % len(KINDS), None), count()
    with tempfile.TemporaryDirectory() as folder:
        router: dict[str, object] = {"token_timeout": 2.0} if options.hang else {}
        config = ClusterConfig(
            model=options.model,
            port=0,
            decode=options.decode,
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
            normal = max(normal, *(stream.gap for stream in expected.values()))
            done = len(rows)
            while len(rows) < done + options.kills and time.monotonic() < limit:
                prefill = len(rows) % PREFILL_EVERY == PREFILL_EVERY - 1
                if options.hang:
                    row = hang_once(cluster, expected, make())
                else:
                    wait_serving(cluster)
                    row = kill_once(cluster, expected, make(), next(aims), prefill, noise.random())
                rows.append(row)
                if options.json:  # what is cut off keeps what it has
                    partial = {"kills": rows, "undisturbed_gap": normal}
                    options.json.write_text(json.dumps(partial, indent=1) + "\n")
                pauses = " ".join(f"{seconds:.2f}" for seconds in row["pauses"].values())
                print(
                    f"kill {len(rows):3}: {row['worker']}, hit {len(row['hit'])}, pauses {pauses or '-'} s",
                    flush=True,
                )
                for kind, what in row["wrong"].items():
                    print(f"          {kind}: {what}", flush=True)
    result = report(rows, normal)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    missed = result["exact"] < EXACT_AIM * len(rows) or result["median_pause"] > PAUSE_AIM
    return int(not any(row["pauses"] for row in rows) or missed)


if __name__ == "__main__":
    sys.exit(main())
