# SPDX-License-Identifier: Apache-2.0
"""Clusters for a benchmark, several at a time: each is a `deltaserve up` of its own, with an environment of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from deltaserve.up import ports

START_SECONDS = 240.0


class Started:
    """A cluster that is starting; `ready` waits for it, `stop` ends it."""

    def __init__(
        self, name: str, options: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        """`options`: of `deltaserve up`; logs go below `folder`."""
        self.name = name
        port, self._metrics = ports.choose(2)
        self.url = f"http://127.0.0.1:{port}"
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "deltaserve", "up", "--port", str(port), *options]
        command += ["--metrics-port", str(self._metrics), "--run-dir", str(folder / name)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, env={**os.environ, **environment}
            )

    def ready(self) -> None:
        """Wait until it has a worker of either role. Raises RuntimeError with the end of its log."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    if json.loads(reply.read())["status"] == "ok":
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        tail = self.log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"cluster {self.name} did not start in {START_SECONDS:.0f} s:\n{tail}")

    def counter(self, name: str) -> float:
        """Sum of a counter of the first worker, which is a prefill worker."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def stop(self) -> None:
        """End it and wait."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
