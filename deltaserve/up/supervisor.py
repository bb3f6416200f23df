# SPDX-License-Identifier: Apache-2.0
"""The thread that owns a cluster's processes: starts them in waves, watches them, restarts what dies, ends them all.

Happy path
    wave 0 (etcd, master) → all ready → wave 1 (workers, router) → all ready → service → stop
Crash while starting
    one process ends, or the time is up → everything is stopped, `failure` says why
Crash in service
    the process starts again after a pause that doubles from 0.5 s to 8 s; a life of 30 s clears the count; after
    `max_restarts` starts in a row without one it is given up and stays "failed", and the rest goes on
Stop
    SIGTERM to router and workers, and once they are gone (they still need etcd to leave it) to master and etcd; what
    is left after `stop_timeout` gets SIGKILL; then nothing of the cluster lives, and the temporary folder is removed
The supervisor is killed
    the kernel sends its children SIGTERM (launcher.py), and the guard ends the rest (reaper.py)

All children are started from this one thread, because the kernel ties their wish to die with the parent to the thread
that started them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from deltaserve.up import reaper
from deltaserve.up.caches import kernel_caches
from deltaserve.up.errors import ClusterError
from deltaserve.up.plan import ProcessSpec
from deltaserve.up.process import Child

POLL_STARTING = 0.05
POLL_SERVICE = 0.1
BACKOFF_FIRST = 0.5
BACKOFF_LAST = 8.0
LIFE_THAT_COUNTS = 30.0
INFRASTRUCTURE_GRACE = 1.5
GUARD_GRACE = 5.0


@dataclass(frozen=True)
class Event:
    """Something that happened to a process, for the display and the log."""

    at: float
    """Seconds since the supervisor started."""
    name: str
    text: str
    state: str


@dataclass(frozen=True)
class Status:
    """One process at one moment."""

    name: str
    state: str
    stage: str
    pid: int | None
    address: str
    starts: int
    log: Path


class Supervisor:
    """Runs processes; see the module's text for its life. All methods are safe from any thread."""

    def __init__(
        self,
        make_specs: Callable[[Path], list[ProcessSpec]],
        run_dir: Path,
        *,
        start_timeout: float,
        stop_timeout: float,
        max_restarts: int,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        """`make_specs` turns the temporary folder into the processes, in starting order."""
        self.run_dir = run_dir
        self.failure: ClusterError | None = None
        self.settled = threading.Event()
        """Set when the cluster is in service, or has failed."""
        self._make_specs = make_specs
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._max_restarts = max_restarts
        self._on_event = on_event
        self._token = uuid.uuid4().hex
        self._children: dict[str, Child] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._statuses: dict[str, Status] = {}
        self._stop = threading.Event()
        self._began = time.monotonic()
        self._guard: subprocess.Popen[str] | None = None
        self._data = Path()
        self._thread = threading.Thread(target=self._run, name="deltaserve-supervisor", daemon=True)

    def start(self) -> None:
        """Begin; `settled` tells when it is done."""
        self._thread.start()

    def stop(self) -> None:
        """End everything and wait for it; a second call waits for the first. At most stop_timeout + 4 s."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def statuses(self) -> dict[str, Status]:
        """Every process as of the last look (at most 0.1 s ago), in starting order."""
        return dict(self._statuses)

    def kill(self, name: str, number: int, hold: bool) -> None:
        """Signal one process's group. With `hold` it is not started again before `restart`."""
        self._ask(lambda: self._kill(name, number, hold))

    def restart(self, name: str) -> None:
        """Start a held or failed process now; one that runs is ended with SIGTERM first, and comes back."""
        self._ask(lambda: self._restart(name))

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._data = Path(tempfile.mkdtemp(prefix="deltaserve-"))
        try:
            self._start_guard()
            specs = self._make_specs(self._data)
            environ = self._environment()
            for spec in specs:
                self._children[spec.name] = Child(spec, self.run_dir / f"{spec.name}.log", environ)
            self._publish()
            for wave in sorted({spec.wave for spec in specs}):
                self._start_wave([c for c in self._children.values() if c.spec.wave == wave])
            if not self._stop.is_set():
                self.settled.set()
                self._serve()
        except ClusterError as error:
            self.failure = error
        except Exception as error:  # a defect here must not leave processes behind
            self.failure = ClusterError(f"supervisor: {type(error).__name__}: {error}")
        finally:
            self._end()
            self.settled.set()

    def _environment(self) -> dict[str, str]:
        temporary = self._data / "tmp"
        temporary.mkdir()
        return {
            **kernel_caches(temporary),
            **os.environ,
            reaper.TOKEN_VARIABLE: self._token,
            "TMPDIR": str(temporary),
        }

    def _start_guard(self) -> None:
        argv = [sys.executable, "-I", "-S", reaper.__file__, self._token, str(self._data), str(GUARD_GRACE)]
        self._guard = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, text=True)
        for child in self._children.values():
            for session in child.sessions:
                self._tell_guard(str(session))

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                pipe: IO[str] = self._guard.stdin
                pipe.write(line + "\n")
                pipe.flush()

    def _start_wave(self, children: list[Child]) -> None:
        for child in children:
            self._launch(child)
        deadline = self._began + self._start_timeout
        while not self._stop.is_set():
            self._drain_commands()
            for child in self._children.values():
                code = self._look(child)
                if code is not None:
                    raise ClusterError(
                        f"{child.spec.name}: {child.describe_end(code)} (log: {child.log})", child.tail
                    )
            if all(child.state == "ready" for child in children):
                return
            if time.monotonic() > deadline:
                late = next(child for child in children if child.state != "ready")
                raise ClusterError(
                    f"{late.spec.name}: not ready after {self._start_timeout:.0f} s, it is at: {late.stage} "
                    f"(log: {late.log}); --start-timeout gives more time",
                    late.tail,
                )
            self._publish()
            self._stop.wait(POLL_STARTING)

    def _serve(self) -> None:
        while not self._stop.is_set():
            self._drain_commands()
            for child in self._children.values():
                if child.state in ("starting", "ready"):
                    code = self._look(child)
                    if code is not None:
                        self._ended_in_service(child, code)
                    elif time.monotonic() - child.started_at > LIFE_THAT_COUNTS:
                        child.failures = 0
                elif child.state == "restarting" and time.monotonic() >= child.restart_at:
                    self._launch(child)
            if self._guard is not None and self._guard.poll() is not None:
                self._start_guard()
            self._publish()
            self._stop.wait(POLL_SERVICE)

    def _launch(self, child: Child) -> None:
        self._end_leftovers(child, signal.SIGKILL)
        child.start()
        self._tell_guard(str(child.sessions[-1]))
        self._tell(child)

    def _look(self, child: Child) -> int | None:
        before = (child.state, child.stage)
        code = child.poll()
        if (child.state, child.stage) != before:
            self._tell(child)
        return code

    def _ended_in_service(self, child: Child, code: int) -> None:
        reason = child.describe_end(code)
        self._end_leftovers(child, signal.SIGTERM)
        if child.state == "held":
            return
        child.failures += 1
        if child.failures > self._max_restarts:
            child.state, child.stage = "failed", f"given up after {self._max_restarts} restarts: {reason}"
        else:
            pause = min(BACKOFF_FIRST * 2 ** (child.failures - 1), BACKOFF_LAST)
            child.restart_at = time.monotonic() + pause
            child.state, child.stage = "restarting", f"{reason}; starts again in {pause:.1f} s"
        self._tell(child)

    def _end_leftovers(self, child: Child, number: int) -> None:
        # What a dead worker started (its ranks) holds memory and ports. It is asked to go at once, and made to go
        # before the worker comes back.
        if child.sessions:
            reaper.signal_all(reaper.members("", child.sessions[-1:], {os.getpid()}), number)

    def _kill(self, name: str, number: int, hold: bool) -> None:
        child = self._child(name)
        if hold:
            child.state, child.stage = "held", "held"
            self._tell(child)
        child.send(number)
        if hold and number in (signal.SIGKILL, signal.SIGTERM):
            deadline = time.monotonic() + self._stop_timeout
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_STARTING)
            self._end_leftovers(child, signal.SIGKILL)

    def _restart(self, name: str) -> None:
        child = self._child(name)
        child.failures = 0
        if child.pid is None:
            self._launch(child)
        else:
            child.send(signal.SIGTERM)

    def _child(self, name: str) -> Child:
        if name not in self._children:
            raise KeyError(f"no process {name!r}; there are {', '.join(self._children)}")
        return self._children[name]

    def _ask(self, action: Callable[[], None]) -> None:
        done = threading.Event()
        failures: list[Exception] = []

        def run() -> None:
            try:
                action()
            except Exception as error:
                failures.append(error)
            finally:
                done.set()

        self._commands.put(run)
        while not done.wait(0.1):
            if not self._thread.is_alive():
                raise ClusterError("the cluster is stopped")
        if failures:
            raise failures[0]

    def _drain_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()
            self._publish()

    def _tell(self, child: Child) -> None:
        self._publish()
        # A display whose terminal or pipe has gone must not take the cluster with it.
        with contextlib.suppress(OSError, ValueError):
            self._on_event(Event(time.monotonic() - self._began, child.spec.name, child.stage, child.state))

    def _publish(self) -> None:
        self._statuses = {
            name: Status(name, c.state, c.stage, c.pid, c.address, c.starts, c.log)
            for name, c in self._children.items()
        }

    def _end(self) -> None:
        sessions = {session for child in self._children.values() for session in child.sessions}
        spare = {os.getpid()} | ({self._guard.pid} if self._guard is not None else set())
        # Looked up now: a process that has been killed can neither unlink its shared memory nor be asked about it.
        shared = reaper.shared_memory(reaper.members(self._token, sessions, spare))
        waves = sorted({child.spec.wave for child in self._children.values()}, reverse=True)
        for wave in waves:
            group = [child for child in reversed(self._children.values()) if child.spec.wave == wave]
            grace = INFRASTRUCTURE_GRACE if wave == 0 else self._stop_timeout
            self._end_group(group, grace)
        gone = reaper.end_all(self._token, sessions, spare, grace=0.0)
        reaper.unlink_all(shared)
        for child in self._children.values():
            child.close()
            if child.state != "failed":
                child.state, child.stage = "stopped", "stopped"
        self._publish()
        reaper.remove_folder(str(self._data))
        if gone:
            self._tell_guard("done")
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(OSError):
                self._guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout=1.0)

    def _end_group(self, group: list[Child], grace: float) -> None:
        for child in group:
            child.send(signal.SIGTERM)
            child.send(signal.SIGCONT)
        deadline = time.monotonic() + grace
        while any(child.pid is not None for child in group) and time.monotonic() < deadline:
            time.sleep(POLL_STARTING)
        for child in group:
            child.send(signal.SIGKILL)
