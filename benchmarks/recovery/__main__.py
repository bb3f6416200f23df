# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.recovery`; see the package's description."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltaserve.config import ClusterConfig
from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "port": {"type": "integer"}},
    "required": ["name", "port"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "ignore_eos": True},
    "schema": {"temperature": 0.8, "seed": 3, "structured_outputs": {"json": SCHEMA}},
    "chat": {"temperature": 0, "ignore_eos": True},
}
EXACT_AIM, PAUSE_AIM = 0.99, 1.5


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__)
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    made.add_argument(
        "--kills", type=int, default=20, metavar="N", help="decode workers to kill (default: 20)"
    )
    made.add_argument(
        "--tokens", type=int, default=150, metavar="N", help="length of the answers (default: 150)"
    )
    made.add_argument("--model", type=Path, default=Path("models/demo"), help="folder of the model")
    made.add_argument(
        "--hang", action="store_true", help="stop the workers (SIGSTOP) for 20 s rather than killing them"
    )
    return made


@dataclass
class Stream:
    """One streamed request."""

    url: str
    body: dict[str, Any]
    text: str = ""
    id: str = ""
    ends: list[str] = field(default_factory=list)
    gap: float = 0.0
    """Longest time between two chunks, seconds."""
    chunks: int = 0
    error: str = ""

    def start(self) -> threading.Thread:
        """Read it in a thread."""
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        request = urllib.request.Request(
            self.url, json.dumps(self.body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                last = 0.0
                for line in reply:
                    if not line.startswith(b"data: "):
                        continue
                    now = time.monotonic()
                    if last and self.chunks > 1:
                        self.gap = max(self.gap, now - last)
                    last = now
                    self._take(line.removeprefix(b"data: ").strip())
        except OSError as error:
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.ends.append("[DONE]")
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
            return
        self.chunks += 1
        self.id = event["id"]
        for choice in event["choices"]:
            self.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if choice.get("finish_reason"):
                self.ends.append(choice["finish_reason"])


def streams(endpoint: str, model: str, prompt: Sequence[int], tokens: int) -> dict[str, Stream]:
    """One of each kind, not started."""
    made = {}
    for kind, fields in KINDS.items():
        body = {"model": model, "max_tokens": tokens, "stream": True, **fields}
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": "My port is 4711. Tell me everything you know."}]
        else:
            body["prompt"] = list(prompt)
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        made[kind] = Stream(endpoint + path, body)
    return made


def wait(threads: Sequence[threading.Thread]) -> None:
    """Until all have ended. Raises TimeoutError."""
    for thread in threads:
        thread.join(300)
        if thread.is_alive():
            raise TimeoutError("a stream hangs")


def route(endpoint: str, request_id: str) -> dict[str, Any]:
    """The router's trace of a request; empty while it knows none."""
    try:
        with urllib.request.urlopen(f"{endpoint}/deltaserve/requests/{request_id}", timeout=10) as reply:
            found: dict[str, Any] = json.load(reply)
            return found
    except OSError:
        return {}


def victim(cluster: Cluster) -> str:
    """The decode worker with most of the streams, by its name in the cluster."""
    with urllib.request.urlopen(f"{cluster.endpoint}/health", timeout=10) as reply:
        workers = json.load(reply)["roles"]["decode"]["workers"]
    address = max(workers, key=lambda worker: worker["requests"])["address"]
    return next(name for name, status in cluster.statuses.items() if status.address == address)


def kill_once(
    cluster: Cluster, expected: dict[str, Stream], tokens: int, prompt: Sequence[int], hang: bool
) -> dict[str, Any]:
    """One kill in the middle of the four streams."""
    running = streams(cluster.endpoint, cluster.served_model_name, prompt, tokens)
    threads = [stream.start() for stream in running.values()]
    limit = time.monotonic() + 120
    while any(stream.chunks < 12 and not stream.ends for stream in running.values()):
        if time.monotonic() > limit:
            raise TimeoutError("the streams do not begin")
        time.sleep(0.02)
    name = victim(cluster)
    starts = cluster.statuses[name].starts
    if hang:
        cluster.kill(name, signal.SIGSTOP)
        threading.Timer(20, cluster.kill, (name, signal.SIGCONT)).start()
    else:
        cluster.kill(name)
    wait(threads)
    moved = {
        kind: stream
        for kind, stream in running.items()
        if route(cluster.endpoint, stream.id).get("resumes", 0)
    }
    wrong = {
        kind: stream.error or f"{stream.ends} {stream.text[-60:]!r} for {expected[kind].text[-60:]!r}"
        for kind, stream in running.items()
        if (stream.text, stream.ends, stream.error) != (expected[kind].text, expected[kind].ends, "")
    }
    if hang:
        time.sleep(25)
    else:
        cluster.wait_ready(name, 180, after_start=starts)
    return {"worker": name, "moved": sorted(moved), "wrong": wrong, "pauses": [s.gap for s in moved.values()]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a kill and the result; 1 when an aim is missed."""
    options = parser().parse_args(arguments)
    prompt = PromptMaker(options.model).make(400).tokens
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        router = {"token_timeout": 2.0} if options.hang else {}
        config = ClusterConfig(
            model=options.model,
            port=0,
            decode=2,
            run_dir=Path(folder),
            max_restarts=1000,
            router_options=router,
        )
        with Cluster(config) as cluster:
            expected = streams(cluster.endpoint, cluster.served_model_name, prompt, options.tokens)
            wait([stream.start() for stream in expected.values()])
            bad = {kind: stream.error for kind, stream in expected.items() if stream.error or not stream.ends}
            if bad:
                print(f"the undisturbed streams failed: {bad}", file=sys.stderr)
                return 2
            for number in range(options.kills):
                row = kill_once(cluster, expected, options.tokens, prompt, options.hang)
                rows.append(row)
                pauses = " ".join(f"{pause:.2f}" for pause in row["pauses"])
                print(
                    f"kill {number + 1:3}: {row['worker']}, moved {len(row['moved'])}, pauses {pauses} s",
                    flush=True,
                )
                for kind, what in row["wrong"].items():
                    print(f"          {kind}: {what}", flush=True)
    moved = sum(len(row["moved"]) for row in rows)
    exact = sum(not row["wrong"] for row in rows)
    pauses = sorted(pause for row in rows for pause in row["pauses"])
    median = statistics.median(pauses) if pauses else 0.0
    worst = pauses[-1] if pauses else 0.0
    normal = max(stream.gap for stream in expected.values())
    print(
        f"{exact} of {len(rows)} kills exact, {moved} streams moved; pause median {median:.2f} s, worst {worst:.2f} s; "
        f"undisturbed, the longest gap is {normal:.2f} s"
    )
    result = {
        "kills": rows,
        "exact": exact,
        "median_pause": median,
        "worst_pause": worst,
        "undisturbed_gap": normal,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(not moved or exact < EXACT_AIM * len(rows) or median > PAUSE_AIM)


if __name__ == "__main__":
    sys.exit(main())
