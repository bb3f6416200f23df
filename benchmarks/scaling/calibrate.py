# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.scaling.calibrate`: the simulator's worker fitted to a real cluster, and checked against it.

A cluster of one prefill and one decode worker is started here (`--endpoint` takes one that runs). First it is
measured: prompts of several lengths alone, and several requests at once. The worker's model is fitted to that by least
squares. Then comes another load, a small Poisson trace, which the fit has not seen: the cluster serves it, the
simulator simulates it with the fitted worker, and the table has both. `--profile FILE` writes what `deltaserve plan`
needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scaling.baselines import Static
from benchmarks.scaling.model import Slo, WorkerModel
from benchmarks.scaling.planned import profile
from benchmarks.scaling.simulator import Simulator
from benchmarks.scaling.traces import Trace
from deltaserve.config import ClusterConfig
from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker

LENGTHS = (300, 600, 1000, 1500)
CROWDS = (1, 2, 4)
ANSWER = 48
"""Tokens of an answer while measuring."""
RATE, REQUESTS, SEED = 0.35, 30, 7
"""Of the trace that the fit has not seen: requests a second, their number, and its seed."""


@dataclass(frozen=True)
class Served:
    """One request as its client saw it. Seconds."""

    prompt: int
    output: int
    ttft: float
    tpot: float


class Client:
    """Sends token prompts that no cache knows, and times their streams."""

    def __init__(self, endpoint: str, model: str, maker: PromptMaker) -> None:
        self._url, self._model, self._maker = f"{endpoint}/v1/completions", model, maker
        self._lock, self._salt = threading.Lock(), int(time.time())

    def send(self, prompt: int, output: int) -> Served:
        """One request, handed over. Raises OSError when it fails."""
        with self._lock:
            self._salt += 1
            salt, tokens = str(self._salt), list(self._maker.make(prompt).tokens)
        body = {
            "model": self._model,
            "prompt": tokens,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "cache_salt": salt,
            "kv_transfer_params": {"placement": "handover"},
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began, first, last = time.monotonic(), 0.0, 0.0
        with urllib.request.urlopen(request, timeout=300) as reply:
            for line in reply:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"]:
                    last = time.monotonic()
                    first = first or last
        return Served(len(tokens), output, first - began, (last - first) / (output - 1))


def measure(client: Client) -> tuple[list[Served], list[tuple[int, float]]]:
    """(requests alone, by length; (requests at once, median seconds a token))."""
    client.send(LENGTHS[0], 8)  # whatever is compiled or allocated at first use
    alone = [client.send(length, ANSWER) for length in LENGTHS for _ in range(2)]
    together = []
    for crowd in CROWDS:
        with ThreadPoolExecutor(crowd) as pool:
            served = list(pool.map(lambda _: client.send(LENGTHS[0], 2 * ANSWER), range(crowd)))
        together.append((crowd, float(np.median([each.tpot for each in served]))))
    return alone, together


def fit(alone: Sequence[Served], together: Sequence[tuple[int, float]], base: WorkerModel) -> WorkerModel:
    """Least squares: time to the first token over the prompt's length, time a token over the requests at once.

    What the first token takes beyond the prompt's computation (handoff, one step, HTTP) cannot be told from a fixed
    cost of computing from outside; half of what is left after one step counts as each.
    """
    step_sequence, step_fixed = np.polyfit([c for c, _ in together], [t for _, t in together], 1)
    step_fixed = max(1e-4, float(step_fixed))
    step_sequence = max(0.0, float(step_sequence))
    token, fixed = np.polyfit([s.prompt for s in alone], [s.ttft for s in alone], 1)
    rest = max(0.0, float(fixed) - step_fixed - step_sequence)
    return WorkerModel(
        prefill_fixed=rest / 2,
        prefill_token=max(1e-7, float(token)),
        handoff_fixed=rest / 2,
        handoff_token=0.0,
        step_fixed=step_fixed,
        step_sequence=step_sequence,
        step_context=0.0,
        slots=base.slots,
        kv_tokens=base.kv_tokens,
        start_seconds=base.start_seconds,
    )


def unseen() -> Trace:
    """The trace that checks the fit."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    arrivals = np.cumsum(generator.exponential(1 / RATE, REQUESTS))
    prompts = generator.integers(280, 1400, REQUESTS)
    outputs = generator.integers(16, 96, REQUESTS)
    return Trace("unseen", SEED, arrivals.tolist(), prompts.tolist(), outputs.tolist())


def replay(client: Client, trace: Trace) -> list[Served]:
    """The trace against the real cluster, at its own pace."""
    began = time.monotonic()

    def at(index: int) -> Served:
        time.sleep(max(0.0, trace.arrivals[index] - (time.monotonic() - began)))
        return client.send(trace.prompts[index], trace.outputs[index])

    with ThreadPoolExecutor(len(trace.arrivals)) as pool:
        return list(pool.map(at, range(len(trace.arrivals))))


def compare(worker: WorkerModel, trace: Trace, served: Sequence[Served]) -> dict[str, tuple[float, float]]:
    """Measure → (real, simulated), seconds."""
    result = Simulator(trace, worker, Slo(), Static(1, 1), (1, 1)).run()
    pairs = {
        "TTFT": ([s.ttft for s in served], result.ttfts),
        "TPOT": ([s.tpot for s in served], result.tpots),
    }
    return {
        f"{name} {label}": (float(np.quantile(real, q)), float(np.quantile(simulated, q)))
        for name, (real, simulated) in pairs.items()
        for label, q in (("p50", 0.5), ("p90", 0.9))
    }


def run(endpoint: str, model: str, folder: Path, base: WorkerModel) -> tuple[WorkerModel, dict[str, Any]]:
    """Measure, fit, replay, compare."""
    client = Client(endpoint, model, PromptMaker(folder))
    alone, together = measure(client)
    worker = fit(alone, together, base)
    trace = unseen()
    served = replay(client, trace)
    return worker, {"worker": asdict(worker), "real and simulated": compare(worker, trace, served)}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fit and the comparison; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling.calibrate", description=__doc__)
    parser.add_argument("--endpoint", default="", help="a running cluster's URL; empty: start one")
    parser.add_argument("--served-model-name", default="demo")
    parser.add_argument("--model", type=Path, default=Path("models/demo"))
    parser.add_argument("--slots", type=int, default=8, help="requests that a decode worker runs at once")
    parser.add_argument("--kv-tokens", type=int, default=100_000, help="tokens that its cache holds")
    parser.add_argument("--start-seconds", type=float, default=35.0)
    parser.add_argument("--profile", type=Path, help="file that gets the profile for deltaserve plan")
    given = parser.parse_args(argv)
    base = WorkerModel(slots=given.slots, kv_tokens=given.kv_tokens, start_seconds=given.start_seconds)
    if given.endpoint:
        worker, report = run(given.endpoint, given.served_model_name, given.model, base)
    else:
        with tempfile.TemporaryDirectory() as folder:
            config = ClusterConfig(model=given.model, port=0, run_dir=Path(folder), max_num_seqs=given.slots)
            with Cluster(config) as cluster:
                worker, report = run(cluster.endpoint, cluster.served_model_name, given.model, base)
    for name, value in report["worker"].items():
        print(f"{name:16} {value:.6g}")
    print(f"{'':10}{'real s':>10}{'simulated s':>13}{'ratio':>8}")
    for name, (real, simulated) in report["real and simulated"].items():
        print(f"{name:10}{real:10.4f}{simulated:13.4f}{simulated / real:8.2f}")
    if given.profile:
        given.profile.parent.mkdir(parents=True, exist_ok=True)
        given.profile.write_text(json.dumps(asdict(profile(worker)), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
