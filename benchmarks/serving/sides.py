# SPDX-License-Identifier: Apache-2.0
"""What is measured: starting it, sending it a request, ending it.

Engines of one side start one after the other while the kernels' cache is empty, since each would compile all kernels
for itself; else at once. Every process is a group of its own, and only those groups are ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving.client import Answer, completion, post
from benchmarks.serving.load import Ask, Sent
from benchmarks.serving.workload import Arrival
from deltaserve.config import ClusterConfig, WorkerConfig
from deltaserve.up import ports
from deltaserve.up.caches import kernel_caches
from deltaserve.up.cluster import Cluster
from deltaserve.up.devices import visible_devices

START_SECONDS = 300.0
STOP_SECONDS = 10.0
MODEL = "bench"
"""The model's name on every side."""
PREFILL_ONLY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""`kv_transfer_params` of the prefill request, as vLLM's own proxy sends them."""


class SideMissing(RuntimeError):
    """A side cannot run on this machine; the message says what it lacks."""


@dataclass(frozen=True)
class Sizes:
    """Of every engine on every side."""

    model: Path
    device: str
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    kv_cache_bytes: int = 24 << 30
    prefix_match_unit: int = 128
    extra: dict[str, object] = field(default_factory=dict)
    """Further engine arguments, load_format for example."""
    segment_bytes: int = 8 << 30
    """Lent to the store by each worker of `delta`."""

    def worker(self) -> WorkerConfig:
        """As a worker's configuration."""
        return WorkerConfig.model_validate(
            {
                "model": self.model.resolve(),
                "device": self.device,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "kv_cache_bytes": self.kv_cache_bytes,
                "prefix_match_unit": self.prefix_match_unit,
                "extra_args": self.extra,
            }
        )


class Side(ABC):
    """Something that answers prompts."""

    name: str
    metrics: dict[str, str]
    """URLs of Prometheus metrics, by process."""
    logs: Sequence[Path] = ()
    """Of its engines."""

    @abstractmethod
    def ask(self, number: int, arrival: Arrival) -> Ask:
        """How request `number` is sent; its bodies are encoded now, not when it goes out."""

    def warm_ups(self) -> list[dict[str, Any]]:
        """Further fields of requests that are sent alone, one after the other, before anything is measured."""
        return [{}, {}]


class Aggregated(Side):
    """Two engines in turn, on one GPU where there is only one."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.name, self.urls = "agg", list(urls)
        self.metrics = {f"engine {n}": f"{url}/metrics" for n, url in enumerate(urls)}

    def ask(self, number: int, arrival: Arrival) -> Ask:
        body = completion(MODEL, arrival.prompt, arrival.answer)
        url = self.urls[number % len(self.urls)]

        async def send(sent: Sent, begin: float) -> None:
            _keep(sent, begin, await post(url, body, stream=True))

        return send


class Nixl(Side):
    """A prefill and a decode engine, joined as vLLM's proxy does it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.name = "nixl"
        self.prefill, self.decode = urls
        self.metrics = {"prefill": f"{self.prefill}/metrics", "decode": f"{self.decode}/metrics"}

    def ask(self, number: int, arrival: Arrival) -> Ask:
        first = completion(MODEL, arrival.prompt, 1, stream=False, kv_transfer_params=PREFILL_ONLY)
        begun = completion(MODEL, arrival.prompt, arrival.answer)[:-1] + b', "kv_transfer_params": '
        name = f"serving-{time.monotonic_ns()}-{number}"

        async def send(sent: Sent, begin: float) -> None:
            answer = await post(self.prefill, first, stream=False, request_id=name)
            given = json.loads(answer.body)["kv_transfer_params"]
            if not given:
                raise ValueError("the prefill engine gave no kv_transfer_params")
            sent.prefilled = time.monotonic() - begin
            body = begun + json.dumps(given).encode() + b"}"
            _keep(sent, begin, await post(self.decode, body, stream=True, request_id=name))

        return send


class Delta(Side):
    """This project's cluster."""

    def __init__(self, cluster: Cluster, worker_metrics: dict[str, str], notes: Path, placement: str) -> None:
        """`notes`: folder of what the roles note (role.py); `placement`: of every request; empty: the policy's."""
        self.name, self.url, self.notes = "delta", cluster.endpoint, notes
        self._more = {"kv_transfer_params": {"placement": placement}} if placement else {}
        self.metrics = {"router": f"{self.url}/metrics", **worker_metrics}

    def ask(self, number: int, arrival: Arrival, **more: Any) -> Ask:
        body = completion(MODEL, arrival.prompt, arrival.answer, **{**self._more, **more})

        async def send(sent: Sent, begin: float) -> None:
            _keep(sent, begin, await post(self.url, body, stream=True))

        return send

    def warm_ups(self) -> list[dict[str, Any]]:
        # A policy that prices placements has to have seen both.
        return [{"kv_transfer_params": {"placement": name}} for name in ("handover", "local") * 4]


def _keep(sent: Sent, begin: float, answer: Answer) -> None:
    sent.request_id = answer.request_id
    sent.events = [event - begin for event in answer.events]
    if not sent.events:
        raise ValueError("the answer has no tokens")


@contextlib.contextmanager
def engines(
    sizes: Sizes,
    folder: Path,
    name: str,
    nixl: bool,
    number: int = 2,
    flags: Sequence[str] = (),
    warm: Callable[[], None] = lambda: None,
) -> Iterator[list[str]]:
    """URLs of `number` servers of vLLM, one a device while there are enough; then they share them.

    `warm` is called when kernels need not be compiled any more. Raises RuntimeError with the log's end, SideMissing.
    """
    if nixl and sizes.device == "cpu":
        raise SideMissing("nixl: NixlConnector moves the memory of GPUs; use --device cuda")
    if nixl and importlib.util.find_spec("nixl") is None:
        raise SideMissing("nixl: the package nixl is not installed; pip install nixl")
    devices = visible_devices() if sizes.device == "cuda" else []
    if sizes.device == "cuda" and not devices:
        raise SideMissing(f"{name}: no GPU is visible; use --device cpu")
    caches = kernel_caches(folder / "kernels")
    cold = sizes.device == "cuda" and not _holds_any(Path(caches["TRITON_CACHE_DIR"]))
    with contextlib.ExitStack() as stack:
        waiting: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        urls = []
        for index in range(number):
            environment = {**caches, **os.environ}
            more = [f"--served-model-name={MODEL}", "--uvicorn-log-level=warning", *flags]
            if devices:
                environment["CUDA_VISIBLE_DEVICES"] = devices[index % len(devices)]
                environment["VLLM_PLUGINS"] = ""  # a peer is vLLM alone; on a CPU it has no kernels but ours
            if nixl:
                environment |= _nixl_environment()
                more.append('--kv-transfer-config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
            else:
                more.append("--disable-log-stats")
            log = folder / f"{name}-{index}.log"
            url, process = stack.enter_context(_server(sizes.worker(), more, environment, log))
            waiting.append((url, process, log))
            urls.append(url)
            if index == 0:
                if cold:
                    _wait(*waiting.pop())
                warm()
        for one in waiting:
            _wait(*one)
        yield urls


def _nixl_environment() -> dict[str, str]:
    """NIXL wants the convolution's state with its columns outside, and a port of its own for each engine."""
    return {
        "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.choose(1)[0]),
        "UCX_TLS": os.environ.get("UCX_TLS", "cuda_copy,cuda_ipc,sm,tcp,self"),
    }


def _holds_any(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


@contextlib.contextmanager
def _server(
    config: WorkerConfig, flags: Sequence[str], environment: dict[str, str], log: Path
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = ports.choose(1)[0]
    more = [*flags, "--host=127.0.0.1", f"--port={port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.serving.engine"),
                *(config.model_dump_json(), json.dumps(more)),
            ],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server with the engine that it has started: both are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when a server answers. Raises RuntimeError with the end of its log."""
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            if reply.status == 200:
                return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{log.stem} did not start:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def delta(sizes: Sizes, folder: Path, options: dict[str, Any], placement: str = "") -> Iterator[Delta]:
    """The cluster. `options`: fields of ClusterConfig that win; of `*_options`, what they hold is added.

    `placement`: of every request that does not say its own; empty: the policy's.
    """
    config = cluster_config(sizes, folder, options)
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    for old in notes.glob("*.jsonl"):
        old.unlink()
    command = (sys.executable, "-m", "benchmarks.serving.role", str(notes.resolve()))
    with Cluster(config, role_command=command) as cluster:
        names = [f"prefill-{n}" for n in range(config.prefill)] + [
            f"decode-{n}" for n in range(config.decode)
        ]
        urls = {
            name: f"http://127.0.0.1:{config.metrics_port + index}/metrics"
            for index, name in enumerate(names)
        }
        made = Delta(cluster, urls, notes, placement)
        made.logs = [log for name, log in cluster.logs.items() if name in names]
        yield made


def cluster_config(sizes: Sizes, folder: Path, options: dict[str, Any]) -> ClusterConfig:
    """See `delta`. Raises ValidationError."""
    worker = sizes.worker()
    own: dict[str, Any] = {
        # The peers keep nothing beyond their own caches either.
        "checkpoint_bytes": 0,
        "prefix_match_unit": worker.prefix_match_unit,
        "extra_args": worker.extra_args,
    }
    fields: dict[str, Any] = {
        "model": worker.model,
        "served_model_name": MODEL,
        "device": worker.device,
        "max_model_len": worker.max_model_len,
        "max_num_seqs": worker.max_num_seqs,
        "max_num_batched_tokens": worker.max_num_batched_tokens,
        "kv_cache_bytes": worker.kv_cache_bytes,
        "segment_bytes": sizes.segment_bytes,
        "port": 0,
        # Workers take this port and the following ones.
        "metrics_port": ports.choose(1)[0],
        "run_dir": folder / "delta",
        "start_timeout": START_SECONDS,
        "router_options": {"policy": "price"},
        "prefill_options": own,
        "decode_options": own,
    }
    for name, value in options.items():
        if isinstance(value, dict):
            merged = {**fields.get(name, {}), **value}
            if "extra_args" in value:
                merged["extra_args"] = {**worker.extra_args, **value["extra_args"]}
            value = merged
        fields[name] = value
    return ClusterConfig.model_validate(fields)
