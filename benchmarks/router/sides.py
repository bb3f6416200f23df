# SPDX-License-Identifier: Apache-2.0
"""What is measured: processes in front of the engine simulator, started and stopped, and the CPU time they take."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.router.engine import DIGEST, WORKER_ID
from benchmarks.router.peers import router, rust_front

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
START_SECONDS = 240.0


@dataclass
class Usage:
    """What some processes have taken so far."""

    cpu: float
    """Seconds."""
    memory: int
    """Bytes that are theirs alone."""


@dataclass
class Side:
    """Something that answers at `url`; `pids` are the processes that do the work, without the engine."""

    name: str
    url: str
    pids: list[int]

    def usage(self) -> Usage:
        """CPU time and memory of the processes and their children."""
        cpu, memory = 0.0, 0
        for pid in self.pids:
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                times = process.cpu_times()
                cpu += times.user + times.system
                memory += process.memory_info().rss
        return Usage(cpu, memory)


def free_port() -> int:
    """A port that nobody listened on just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Program(subprocess.Popen[str]):
    """A process of which the stderr is kept."""

    errors: IO[str]

    def said(self) -> str:
        """What it has written there so far."""
        self.errors.seek(0)
        return self.errors.read()


@contextlib.contextmanager
def process(*command: str | Path, **options: Any) -> Iterator[Program]:
    """A process, ended at the end; its stderr is kept for the message when it does not come up."""
    with tempfile.TemporaryFile("w+") as errors:
        made = Program(
            [str(part) for part in command],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            **options,
        )
        made.errors = errors
        try:
            yield made
        finally:
            made.send_signal(signal.SIGTERM)
            try:
                made.wait(10)
            except subprocess.TimeoutExpired:
                made.kill()
                made.wait()


def line(made: Program, start: str) -> str:
    """The first line of a process's output that begins with `start`; the rest is read and thrown away."""
    assert made.stdout is not None
    for text in made.stdout:
        if text.startswith(start):
            threading.Thread(target=made.stdout.read, daemon=True).start()
            return text
    raise RuntimeError(f"{made.args!r}: ended early: {made.said()[-2000:]}")


def wait_ready(url: str, made: Program) -> None:
    """Return when a chat is answered."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    end = time.monotonic() + START_SECONDS
    while True:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            urllib.request.urlopen(request, timeout=10).read()
            return
        except OSError as error:
            if made.poll() is not None or time.monotonic() > end:
                text = made.said()[-2000:]
                raise RuntimeError(f"{made.args!r}: does not answer: {error}; {text}") from error
            time.sleep(0.2)


@contextlib.contextmanager
def engine(step_ms: float, zmq: tuple[str, str] | None = None) -> Iterator[dict[str, str]]:
    """The simulator; its addresses."""
    more = ["--zmq", *zmq] if zmq else []
    with process(sys.executable, "-m", "benchmarks.router.engine", "--step-ms", str(step_ms), *more) as made:
        yield json.loads(line(made, "{"))


@contextlib.contextmanager
def direct(addresses: dict[str, str]) -> Iterator[Side]:
    """The simulator itself: nothing in between."""
    yield Side("engine alone", addresses["http"], [])


@contextlib.contextmanager
def face(
    addresses: dict[str, str], front: str = "python", direct: bool = False, processes: int = 1
) -> Iterator[Side]:
    """This cluster's router over the simulator; `direct`: clients speak to its Rust front end themselves."""
    configuration: dict[str, Any] = {
        "model": str(MODEL),
        "port": 0,
        "placement": "local",
        "max_queued": 4096,
        "token_timeout": 3600.0,  # an idle stream is no worker that hangs
        "front": front,
        "processes": processes,
    }
    if front == "rust":
        configuration["rust_binary"] = str(rust_front())
        if direct:
            configuration["rust_port"] = free_port()
    member = {
        "worker_id": WORKER_ID,
        "role": "decode",
        "address": addresses["grpc"],
        "model_digest": DIGEST,
        "geometry": "",
        "lease": 1,
    }
    with process(
        sys.executable,
        *("-m", "tests.doubles.router_process", json.dumps(configuration), json.dumps([member])),
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    ) as made:
        url = line(made, "READY ").split()[1]
        if direct:
            url = f"http://127.0.0.1:{configuration['rust_port']}"
        wait_ready(url, made)
        if front == "rust":
            wait_child(made)
        yield Side(front, url, [made.pid])


def wait_child(made: Program) -> None:
    """Return when the Rust front end says that it serves."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if "vllm-rs serves" in made.said():
            return
        time.sleep(0.2)
    raise RuntimeError("the router's Rust front end does not come up")


@contextlib.contextmanager
def peer(name: str, worker_url: str, extra_pids: list[int] | None = None) -> Iterator[Side]:
    """`vllm-router` or `smg` over one worker's URL."""
    port = free_port()
    command = [router(name)] if name == "vllm-router" else [router(name), "launch"]
    with process(
        *command,
        *("--worker-urls", worker_url, "--host", "127.0.0.1", "--port", str(port)),
        *("--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error"),
    ) as made:
        assert made.stdout is not None
        threading.Thread(target=made.stdout.read, daemon=True).start()
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, made)
        behind = " + vllm-rs" if extra_pids else ""
        yield Side(f"{name}{behind}", url, [made.pid, *(extra_pids or [])])


@contextlib.contextmanager
def bare_rust(step_ms: float) -> Iterator[Side]:
    """vLLM's Rust front end over a simulator of its own, which speaks vLLM's protocol."""
    from router.faces.rust_front import command

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        paths = [f"{folder}/in", f"{folder}/out"]
        listeners = [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for listener, path in zip(listeners, paths, strict=True):
            listener.bind(path)
            listener.listen()
        public = socket.create_server(("127.0.0.1", 0), backlog=2048)
        fds = [public.fileno(), *(listener.fileno() for listener in listeners)]
        arguments = command(rust_front(), fds[0], fds[1], fds[2], MODEL, "demo", 16384)
        made = stack.enter_context(process(*arguments, pass_fds=fds))
        assert made.stdout is not None
        threading.Thread(target=made.stdout.read, daemon=True).start()
        stack.enter_context(engine(step_ms, (f"ipc://{paths[0]}", f"ipc://{paths[1]}")))
        url = f"http://127.0.0.1:{public.getsockname()[1]}"
        wait_ready(url, made)
        yield Side("vllm-rs alone", url, [made.pid])
