# SPDX-License-Identifier: Apache-2.0
"""docs/by_hand.md, with two loopback addresses for its two machines: every role started alone, and one answer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deltaserve.up import binaries, ports
from tests.support.cluster import DEMO
from tests.support.processes import MARK, marked, new_mark, wait_until

pytestmark = pytest.mark.cluster
A, B = "127.0.0.2", "127.0.0.3"
Start = Callable[..., Path]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process with its output in a file; ends all of them in reverse order."""
    mark = new_mark()
    running: list[subprocess.Popen[bytes]] = []

    def launch(name: str, *argv: str) -> Path:
        log = tmp_path / f"{name}.log"
        with log.open("wb") as output:
            running.append(
                subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, MARK: mark},
                )
            )
        return log

    yield launch
    for process in reversed(running):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
    wait_until(lambda: not marked(mark), 30, "every process of the test has ended")


def _ready(log: Path, timeout: float) -> str:
    """The address that a process printed after READY; its log in the message when it does not come in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("READY "):
                return line.removeprefix("READY ").removeprefix("http://")
        time.sleep(0.1)
    raise AssertionError(f"{log.name} is not ready:\n{log.read_text(errors='replace')[-3000:]}")


def _get(url: str, body: object = None) -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.load(response))


def test_roles_by_hand_on_two_addresses(start: Start, tmp_path: Path) -> None:
    etcd, master = binaries.find_etcd().path, binaries.find_master().path
    client, peer, rpc, metrics = ports.choose(4, A)
    urls = [f"--listen-client-urls=http://{A}:{client}", f"--advertise-client-urls=http://{A}:{client}"]
    peers = [f"--listen-peer-urls=http://{A}:{peer}", f"--initial-advertise-peer-urls=http://{A}:{peer}"]
    start("etcd", str(etcd), "--name=a", f"--data-dir={tmp_path / 'etcd'}", *urls, *peers,
          f"--initial-cluster=a=http://{A}:{peer}")  # fmt: skip
    start("master", str(master), f"--rpc_address={A}", f"--rpc_port={rpc}", f"--metrics_host={A}",
          f"--metrics_port={metrics}", "--enable_http_metadata_server=false", "--default_kv_lease_ttl=1000",
          "--client_ttl=5", "--put_start_release_timeout_sec=180", "--eviction_ratio=0",
          "--eviction_high_watermark_ratio=1", "--logtostderr")  # fmt: skip
    role = [sys.executable, "-m", "deltaserve"]
    common = ["--model", str(DEMO), "--etcd-endpoints", f"{A}:{client}"]
    store = ["--store-master", f"{A}:{rpc}", "--store-hostname"]
    logs = [
        start("prefill", *role, "prefill", "--host", A, *common, *store, A),
        start("decode", *role, "decode", "--host", B, *common, *store, B),
    ]
    router = start("router", *role, "router", "--host", A, "--port=0", "--placement=handover", *common)
    endpoint = "http://" + _ready(router, 240)
    addresses = [_ready(log, 240).rpartition(":")[0] for log in logs]
    assert addresses == [A, B]
    deadline = time.monotonic() + 30
    moved = 0.0
    for attempt in range(1000):  # the router sees a worker a moment after it has registered
        if moved or time.monotonic() > deadline:
            break
        prompt = "<kv>" + "".join(f" {i + attempt} = {i} ;" for i in range(60)) + f" {attempt} ?"
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        answer = _get(f"{endpoint}/v1/completions", body)
        assert answer["choices"], answer
        moved = _tokens_from_store(endpoint)
        time.sleep(0.2)
    assert moved > 0, "no prompt went through the store"


def _tokens_from_store(endpoint: str) -> float:
    with urllib.request.urlopen(f"{endpoint}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = 'deltaserve_router_prompt_tokens_total{source="store"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))
