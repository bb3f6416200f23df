# SPDX-License-Identifier: Apache-2.0
"""A cluster on Ray as an object: what the command line, the planner and the tests use.

cluster = RayCluster.start(RayConfig(name="default"))
cluster.wait_ready(300)
cluster.scale("decode", 2)
cluster.stop()
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import Any, Self, cast

from deltaserve.config import Role
from deltaserve.model_check import ModelError, require_servable
from deltaserve.up.errors import ClusterError
from deploy.ray.actors import choose_control
from deploy.ray.config import CONTROL, ROLES, RayConfig, resource
from deploy.ray.controller import CONTROLLER, Controller
from deploy.ray.plan import ControlPlane

CALL_SECONDS = 30.0
"""How long a call to the controller may take."""
POLL = 0.25
CONNECT_SECONDS = 5.0


class RayCluster:
    """A handle; several processes may hold one. The cluster lives on when they end."""

    def __init__(self, name: str, controller: Any) -> None:
        """Use `start` or `attach`."""
        self.name = name
        self._controller = controller

    @classmethod
    def start(cls, config: RayConfig) -> Self:
        """Start a cluster and return at once; `wait_ready` waits.

        Raises ClusterError when the model, a port or a binary is not as it must be, when a cluster of that name runs,
        or when no node offers the control plane's resource.
        """
        ray = connect(config.address)
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            require_servable(config.model)
        except ModelError as error:
            raise ClusterError(str(error)) from error
        config = config.model_copy(update={"model": config.model.resolve()})
        with contextlib.suppress(ValueError):
            ray.get_actor(CONTROLLER, config.namespace)
            raise ClusterError(f"name {config.name}: a cluster of that name runs; choose another with --name")
        need = resource(CONTROL)
        if not ray.cluster_resources().get(need):
            raise ClusterError(
                f"no node of this Ray has the resource {need}; start one with "
                f"ray start --resources='{{\"{need}\": 1}}' (docs/ray.md)"
            )
        on_control = {"num_cpus": 0, "resources": {need: 0.001}}
        choose = ray.remote(choose_control).options(**on_control, max_retries=0)
        try:
            control: ControlPlane = ray.get(choose.remote(config), timeout=120)
        except ray.exceptions.RayTaskError as error:
            raise ClusterError(str(error.cause)) from error
        controller = (
            ray.remote(Controller)
            .options(
                name=CONTROLLER,
                namespace=config.namespace,
                lifetime="detached",
                num_cpus=0,
                # Beside the control plane: a node of workers that is lost shall not take the controller with it.
                scheduling_strategy=NodeAffinitySchedulingStrategy(control.node, soft=True),
                max_restarts=-1,
                max_task_retries=3,
                max_concurrency=4,
            )
            .remote(config, control)
        )
        return cls(config.name, controller)

    @classmethod
    def attach(cls, name: str, address: str = "auto") -> Self:
        """The running cluster of that name. Raises ClusterError when there is none."""
        ray = connect(address)
        try:
            return cls(name, ray.get_actor(CONTROLLER, f"deltaserve-{name}"))
        except ValueError as error:
            raise ClusterError(
                f"name {name}: no such cluster on this Ray; start it with python -m deploy.ray up --name {name}"
            ) from error

    @property
    def endpoint(self) -> str:
        """URL of the OpenAI endpoint, without a path."""
        return cast("str", self._call(self._controller.endpoint))

    @property
    def control(self) -> ControlPlane:
        """Where etcd, the master and the router are."""
        return cast("ControlPlane", self._call(self._controller.control_plane))

    def scale(self, role: Role, replicas: int) -> None:
        """From now on so many workers of a role; returns at once. Raises ValueError for none or too many."""
        self._call(self._controller.scale, role, replicas)

    def status(self) -> dict[str, Any]:
        """What the controller knows; see `Controller.status`."""
        return cast("dict[str, Any]", self._call(self._controller.status))

    def ready(self, role: Role) -> list[dict[str, Any]]:
        """The workers of a role that serve."""
        return [r for r in self.status()["roles"][role]["replicas"] if r["state"] == "ready"]

    def settled(self) -> bool:
        """Whether each role has exactly the workers that are wanted, all of them serve, and so does the router."""
        status = self.status()
        if not status["control"] or any(process["state"] != "ready" for process in status["control"]):
            return False
        return all(
            [replica["state"] for replica in entry["replicas"]] == ["ready"] * entry["wanted"]
            for entry in status["roles"].values()
        )

    def wait_ready(self, timeout: float) -> None:
        """Wait until `settled`. Raises ClusterError after `timeout` seconds, or as soon as the control plane failed."""
        deadline = time.monotonic() + timeout
        while not self.settled():
            failed = [process for process in self.status()["control"] if process["state"] == "failed"]
            if failed:
                raise ClusterError(f"the control plane failed: {failed[0]['stage']}")
            if time.monotonic() > deadline:
                raise ClusterError(f"not ready after {timeout:.0f} s: {self.describe()}")
            time.sleep(POLL)

    def describe(self) -> str:
        """One line a process: its state and stage."""
        status = self.status()
        lines = [
            f"{process['name']}: {process['state']}, {process['stage']}" for process in status["control"]
        ]
        for role in ROLES:
            entry = status["roles"][role]
            lines.append(f"{role}: {entry['wanted']} wanted")
            lines += [
                f"{r['name']}: {r['state']}, {r['stage']} {r['node']} {r['address']}".rstrip()
                for r in entry["replicas"]
            ]
        return "\n".join(lines)

    def stop(self) -> None:
        """End every process and actor of this cluster; Ray stays. Returns when they are gone."""
        import ray

        with contextlib.suppress(ray.exceptions.RayActorError):
            self._call(self._controller.stop, timeout=60)
        ray.kill(self._controller, no_restart=True)

    @staticmethod
    def _call(method: Any, *arguments: Any, timeout: float = CALL_SECONDS) -> Any:
        """Ask the controller. While Ray starts it anew its callers wait: every call may be repeated."""
        import ray

        deadline = time.monotonic() + timeout
        while True:
            try:
                return ray.get(method.remote(*arguments), timeout=timeout)
            except ray.exceptions.ActorUnavailableError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, (ValueError, ClusterError)) else error from error


def connect(address: str) -> Any:
    """Ray, connected. Raises ClusterError when there is none at the address, or Ray is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ClusterError("ray is not installed; pip install 'deltaserve[ray]'") from error
    if not ray.is_initialized():
        _require_answer(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ClusterError(
                f"address {address}: no Ray answers there; start one (ray start --head) or name it with --address"
            ) from error
    return ray


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"address {address}: no Ray answers there ({error.strerror or error}); start one (ray start --head) "
            "or name it with --address"
        ) from error
