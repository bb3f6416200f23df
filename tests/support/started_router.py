# SPDX-License-Identifier: Apache-2.0
"""A router as a process of its own, over worker doubles that live in the test's process."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from tests.doubles.worker import Knobs, WorkerDouble
from tests.support import processes

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "demo"
START_SECONDS = 240.0


class Workers:
    """Worker doubles on an event loop of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.prefill = WorkerDouble("prefill", "p0")
        self.decode = WorkerDouble("decode", "d0")
        for double in (self.prefill, self.decode):
            with socket.create_server(("127.0.0.1", 0)) as free:
                double.port = free.getsockname()[1]

    def start(self) -> None:
        """Serve, at the ports that the register has known all along."""
        for double in (self.prefill, self.decode):
            self.call(double.start(double.port))

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the doubles' loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def reset(self) -> None:
        """As new."""
        for double in (self.prefill, self.decode):
            double.knobs = Knobs()
            for record in (double.adds, double.aborted, double.released):
                record.clear()


class Router:
    """A router process."""

    def __init__(self, workers: list[WorkerDouble], **config: Any) -> None:
        settings = {
            "model": str(MODEL),
            "port": 0,
            "handover_min_tokens": 20,
            "worker_wait": 0.5,
            "resume_wait": 3.0,
            **config,
        }
        members = [asdict(double.member) for double in workers]
        arguments = ["-m", "tests.doubles.router_process", json.dumps(settings), json.dumps(members)]
        self.process = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.before_workers: httpx.Response | None = None
        self.lines: list[str] = []
        self.errors: list[str] = []
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=lambda s=stream, to=lines: to.extend(s), daemon=True).start()
        wait_until(lambda: self.url != "" or self.process.poll() is not None, START_SECONDS)
        assert self.url, "".join(self.errors)

    @property
    def url(self) -> str:
        """Where it serves; empty before it does."""
        return next((line.split()[1] for line in self.lines if line.startswith("READY ")), "")


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Return once `condition()` holds; fail the test otherwise."""
    processes.wait_until(condition, seconds, "what the router or its workers are waited for")
