# SPDX-License-Identifier: Apache-2.0
"""The actors: each hosts a supervisor of the processes of its part of the cluster, and answers for them.

    ControlActor    etcd, the Mooncake master, the router
    WorkerActor     one prefill or decode worker, all of its ranks

An actor is a thin shell. The processes are those of `deltaserve up`, under the same supervisor: what dies is started
again after a pause, ranks that a dead worker leaves behind are ended, and when the actor itself is killed a guard
process ends what it had started. Ray starts a lost actor again, on another node if its node is gone, and the
constructor starts the processes anew; nothing in an actor's memory is worth keeping.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deltaserve.config import Role
from deltaserve.up import ports
from deltaserve.up.errors import ClusterError
from deltaserve.up.plan import Ports, ProcessSpec
from deltaserve.up.supervisor import Supervisor
from deploy.ray.config import RayConfig
from deploy.ray.plan import ControlPlane, control_specs, worker_spec

PORTS_SECONDS = 30.0
"""How long a control actor waits for the ports of the one before it."""
DRAIN_MARGIN = 10.0
"""Seconds beyond `drain_seconds` before a worker that was told to go is killed."""


@dataclass(frozen=True)
class Report:
    """What an actor says of one process."""

    name: str
    state: str
    """As the supervisor has it: starting, ready, restarting, held, failed, stopped."""
    stage: str
    """In words; the reason where something failed."""
    address: str
    pid: int | None
    starts: int
    node: str
    """The node's address."""


class _Host:
    """A supervisor and what both actors say of it."""

    def __init__(
        self,
        config: RayConfig,
        node: str,
        specs: Callable[[Path], list[ProcessSpec]],
        stop_timeout: float,
    ) -> None:
        self._node = node
        self._names: list[str] = []
        # Ray sets it to the actor's logical CPUs; a worker takes its cores from its own configuration.
        os.environ.pop("OMP_NUM_THREADS", None)

        def make(data: Path) -> list[ProcessSpec]:
            made = specs(data)
            self._names = [spec.name for spec in made]
            return made

        folder = config.log_dir / config.name
        folder.mkdir(parents=True, exist_ok=True)
        self.supervisor = Supervisor(
            make,
            folder,
            start_timeout=config.start_timeout,
            stop_timeout=stop_timeout,
            max_restarts=config.max_restarts,
        )
        self.supervisor.start()

    def reports(self) -> list[Report]:
        """Every process; one that failed while starting says why."""
        failure = self.supervisor.failure
        found = [
            Report(s.name, s.state, s.stage, s.address, s.pid, s.starts, self._node)
            for s in self.supervisor.statuses().values()
        ]
        if failure is None:
            return found
        return [Report(r.name, "failed", str(failure), r.address, None, r.starts, r.node) for r in found] or [
            Report("", "failed", str(failure), "", None, 0, self._node)
        ]


class ControlActor:
    """etcd, the Mooncake master and the router of one cluster."""

    def __init__(self, config: RayConfig, control: ControlPlane) -> None:
        """Starts them, and returns at once. Raises ClusterError when their ports stay taken."""
        _wait_free(control)
        self._host = _Host(
            config, control.host, lambda data: control_specs(config, control, data), config.stop_timeout
        )

    def reports(self) -> list[Report]:
        """Every process."""
        return self._host.reports()

    def stop(self) -> None:
        """End them; returns when nothing is left."""
        self._host.supervisor.stop()


class WorkerActor:
    """One worker."""

    def __init__(self, config: RayConfig, control: ControlPlane, role: Role, name: str) -> None:
        """Starts it, and returns at once."""
        node = node_address()
        self._name = name
        self._patience = config.drain_seconds + DRAIN_MARGIN
        self._host = _Host(
            config, node, lambda data: [worker_spec(config, control, role, name, node, data)], self._patience
        )

    def reports(self) -> list[Report]:
        """The worker's one report."""
        return self._host.reports()

    def drain(self) -> bool:
        """Tell the worker to finish what it holds and go (docs/drain.md); returns when it has gone.

        True: by itself. False: it was killed, because it had not gone after `drain_seconds` and a margin.
        """
        began = time.monotonic()
        self._host.supervisor.kill(self._name, signal.SIGTERM, hold=True)
        return time.monotonic() - began < self._patience

    def stop(self) -> None:
        """End it at once; what it holds is moved by the routers."""
        self._host.supervisor.kill(self._name, signal.SIGKILL, hold=True)
        self._host.supervisor.stop()


def node_address() -> str:
    """The address of the node this runs on, as other nodes reach it."""
    from ray import util

    look: Callable[[], str] = util.get_node_ip_address
    return look()


def choose_control(config: RayConfig) -> ControlPlane:
    """Address and ports of a control plane on the node where this runs. Raises ClusterError when a port is taken."""
    import ray

    host = node_address()
    ports.require_free(config.host or host, config.port)
    chosen = ports.choose(5, host)
    names = ("etcd_client", "etcd_peer", "master", "master_metrics", "router")
    numbers = dict(zip(names, chosen, strict=True))
    if config.port:
        numbers["router"] = config.port
    return ControlPlane(host, Ports(**numbers), ray.get_runtime_context().get_node_id())


def _wait_free(control: ControlPlane) -> None:
    deadline = time.monotonic() + PORTS_SECONDS
    while taken := [port for port in control.all_ports if not ports.is_free(control.host, port)]:
        if time.monotonic() > deadline:
            raise ClusterError(
                f"ports {', '.join(map(str, taken))} on {control.host} are still taken after {PORTS_SECONDS:.0f} s; "
                "end what holds them, Ray starts the control actor again"
            )
        time.sleep(0.2)
