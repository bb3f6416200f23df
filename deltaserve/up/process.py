# SPDX-License-Identifier: Apache-2.0
"""One child of the supervisor: starting it, reading its stages out of its log, noticing its end.

A child writes standard output and error into one log file, and the supervisor reads that file: a child never blocks on
a pipe that nobody empties, and its last words are on disk whatever happens. Lines that mean something:

    STAGE <text>      what it does now
    READY <address>   it serves at this address
    error: <text>     why it is about to exit
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, Literal

from deltaserve.addresses import split
from deltaserve.up.plan import ProcessSpec

State = Literal["waiting", "starting", "ready", "restarting", "held", "failed", "stopped"]

_LAUNCHER = Path(__file__).with_name("launcher.py")
_PROBE_TIMEOUT = 0.25
TAIL_LINES = 20


class Child:
    """A process of the cluster through all of its starts. Used from the supervisor's thread only."""

    def __init__(self, spec: ProcessSpec, log: Path, environ: dict[str, str]) -> None:
        self.spec = spec
        self.log = log
        self.state: State = "waiting"
        self.stage = "waiting"
        self.address = spec.probe
        self.error = ""
        self.starts = 0
        self.failures = 0
        """Ends in a row without a long enough life between them."""
        self.started_at = 0.0
        self.restart_at = 0.0
        self.sessions: list[int] = []
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: IO[str] | None = None
        self._partial = ""
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def pid(self) -> int | None:
        """Pid of the running process, which is its session and group too; None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def tail(self) -> list[str]:
        """The last lines of the log."""
        return list(self._tail)

    def start(self) -> None:
        """Start the program in a session of its own. Raises OSError when not even the interpreter starts."""
        self.starts += 1
        self.state, self.stage, self.error = "starting", "starting", ""
        self.started_at = time.monotonic()
        argv = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), *self.spec.argv]
        with self.log.open("ab") as output:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            output.write(f"--- start {self.starts} at {stamp}: {' '.join(self.spec.argv)}\n".encode())
            output.flush()
            if self._reader is None:
                self._reader = self.log.open("r", encoding="utf-8", errors="replace")
                self._reader.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environ, **self.spec.env},
                start_new_session=True,
            )
        self.sessions.append(self._process.pid)

    def poll(self) -> int | None:
        """Read new log lines, probe readiness, and return the exit code once the process has ended."""
        ended = None if self._process is None else self._process.poll()
        self._read()
        if ended is None and self.state == "starting" and self.spec.probe and self._answers():
            self._ready(self.spec.probe)
        return ended

    def describe_end(self, code: int) -> str:
        """In words how the process ended; its own `error:` line where it wrote one."""
        if self.error:
            return self.error
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def send(self, number: int) -> None:
        """Signal the process and its whole group; a process that has ended is passed over."""
        if self.pid is not None:
            try:
                os.killpg(self.pid, number)
            except (ProcessLookupError, PermissionError):
                self._process.send_signal(number) if self._process is not None else None

    def close(self) -> None:
        """Reap the process if it has ended and close the log."""
        if self._process is not None:
            self._process.poll()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self) -> None:
        if self._reader is None:
            return
        *lines, self._partial = (self._partial + self._reader.read()).split("\n")
        for line in lines:
            self._tail.append(line)
            kind, _, rest = line.partition(" ")
            if kind == "STAGE" and self.state == "starting":
                self.stage = rest.strip()
            elif kind == "READY" and self.state == "starting":
                self._ready(rest.strip().removeprefix("http://").removeprefix("https://"))
            elif kind == "error:":
                self.error = rest.strip()

    def _ready(self, address: str) -> None:
        self.state, self.stage, self.address = "ready", "ready", address

    def _answers(self) -> bool:
        host, port = split(self.spec.probe)
        try:
            if not self.spec.health_path:
                socket.create_connection((host, port), timeout=_PROBE_TIMEOUT).close()
                return True
            connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT)
            try:
                connection.request("GET", self.spec.health_path)
                return connection.getresponse().status == 200
            finally:
                connection.close()
        except (OSError, http.client.HTTPException):
            return False
