# SPDX-License-Identifier: Apache-2.0
"""A cluster as an object: what `deltaserve up`, `deltaserve verify` and the cluster tests use.

with Cluster(ClusterConfig(port=0)) as cluster:
    requests.get(cluster.endpoint + "/health")
    cluster.kill("decode-0")
    cluster.wait_ready("decode-0", timeout=60)
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from deltaserve.config import ClusterConfig
from deltaserve.engine.plugin_check import PluginMissingError, require_plugins
from deltaserve.model_check import ModelError, require_servable
from deltaserve.up import binaries, plan, ports
from deltaserve.up.errors import ClusterError
from deltaserve.up.supervisor import Event, Status, Supervisor

ROLE_COMMAND = (sys.executable, "-m", "deltaserve")


class Cluster:
    """etcd, the Mooncake master, workers and the router on this machine. Not for use after `stop`."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        on_folder: Callable[[Path], None] = lambda folder: None,
        role_command: Sequence[str] | None = None,
    ) -> None:
        """`on_folder` hears of the run folder once it is there, before anything starts.

        `role_command` starts a role when its name and flags are appended; tests put doubles there.
        """
        self.config = config
        self.run_dir = config.run_dir or _default_run_dir()
        self._on_event = on_event
        self._on_folder = on_folder
        self._role_command = tuple(role_command or ROLE_COMMAND)
        self._supervisor: Supervisor | None = None

    def start(self) -> Cluster:
        """Start everything and return when all processes are ready.

        Raises ClusterError, with nothing left behind, when the model, a port or a binary is not as it must be, when a
        process ends while starting, or after `start_timeout` seconds.
        """
        if self._supervisor is not None:
            raise ClusterError("this cluster was started before; make a new one")
        self._supervisor = self._prepare()
        self._supervisor.start()
        try:
            while not self._supervisor.settled.wait(0.5):
                pass
        except BaseException:
            self._supervisor.stop()
            raise
        if self._supervisor.failure is not None:
            self._supervisor.stop()
            raise self._supervisor.failure
        return self

    def _prepare(self) -> Supervisor:
        """The processes, when the options and this machine allow them. Makes the run folder; starts nothing."""
        try:
            require_servable(self.config.model)
            require_plugins()
        except (ModelError, PluginMissingError) as error:
            raise ClusterError(str(error)) from error
        ports.require_free(self.config.host, self.config.port)
        etcd = binaries.find_etcd(self.config.etcd_binary)
        master = binaries.find_master(self.config.master_binary)
        chosen = ports.choose(5)
        fixed = plan.Ports(
            etcd_client=chosen[0],
            etcd_peer=chosen[1],
            master=chosen[2],
            master_metrics=chosen[3],
            router=self.config.port or chosen[4],
        )
        # Mistakes in the options show before a folder or a process exists.
        plan.build(self.config, fixed, Path(), etcd.path, master.path, self._role_command)
        self._make_run_dir()
        self._on_folder(self.run_dir)
        return Supervisor(
            lambda data: plan.build(self.config, fixed, data, etcd.path, master.path, self._role_command),
            self.run_dir,
            start_timeout=self.config.start_timeout,
            stop_timeout=self.config.stop_timeout,
            max_restarts=self.config.max_restarts,
            on_event=self._on_event,
        )

    def stop(self) -> None:
        """End every process and remove what is temporary. Returns when nothing is left; at most 10 s."""
        if self._supervisor is not None:
            self._supervisor.stop()

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """The OpenAI endpoint's URL, without a path."""
        scheme = "https" if self.config.router_options.get("tls_cert") else "http"
        return f"{scheme}://{self.statuses['router'].address}"

    @property
    def served_model_name(self) -> str:
        """The name that clients give as `model`."""
        return self.config.model_name

    @property
    def etcd_endpoint(self) -> str:
        """host:port of this cluster's etcd."""
        return self.statuses["etcd"].address

    @property
    def master_address(self) -> str:
        """host:port of this cluster's Mooncake master."""
        return self.statuses["master"].address

    @property
    def statuses(self) -> dict[str, Status]:
        """Every process by name, in starting order."""
        return self._running().statuses()

    @property
    def pids(self) -> dict[str, int]:
        """Pids of the processes that run now."""
        return {name: status.pid for name, status in self.statuses.items() if status.pid is not None}

    @property
    def logs(self) -> dict[str, Path]:
        """The log file of each process."""
        return {name: status.log for name, status in self.statuses.items()}

    @property
    def failure(self) -> ClusterError | None:
        """Why the supervisor ended on its own; None while all is well."""
        return self._supervisor.failure if self._supervisor is not None else None

    def kill(self, name: str, number: int = signal.SIGKILL, *, hold: bool = False) -> None:
        """Send a signal to one process and its children. It comes back by itself, with `hold` only on `restart`."""
        self._running().kill(name, number, hold)

    def restart(self, name: str) -> None:
        """Bring a held or failed process back, or end a running one gracefully so that it comes back."""
        self._running().restart(name)

    def wait_ready(self, name: str, timeout: float, after_start: int = 0) -> Status:
        """Wait until a process is ready, and has been started more often than `after_start` times.

        Raises TimeoutError naming its stage.
        """
        deadline = time.monotonic() + timeout
        while True:
            status = self.statuses[name]
            if status.state == "ready" and status.starts > after_start:
                return status
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{name} is not ready after {timeout:.0f} s: {status.stage} (log: {status.log})"
                )
            time.sleep(0.05)

    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise ClusterError("this cluster was not started")
        return self._supervisor

    def _make_run_dir(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            # Else the logs' first lines would fail, with less to say.
            tempfile.TemporaryFile(dir=self.run_dir).close()
        except OSError as error:
            raise ClusterError(
                f"run folder {self.run_dir}: {error.strerror}; name another with --run-dir"
            ) from error


def _default_run_dir() -> Path:
    base = Path.cwd() / ".deltaserve" / "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    number = 1
    path = base / stamp
    while path.exists():  # two clusters within one second
        number += 1
        path = base / f"{stamp}-{number}"
    return path
