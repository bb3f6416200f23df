# SPDX-License-Identifier: Apache-2.0
"""The controller: a named, detached actor that keeps as many workers of each role as are wanted.

Every replica is an actor of its own in a placement group of its own (one bundle: all ranks of a worker on one node).
Ray starts an actor whose node or process is gone again by itself, and waits while no node has room; the controller
only adds and takes away:

    more    a placement group and an actor
    fewer   those that do not serve yet go first, then the newest: its worker drains, then actor and group go

At least one worker of each role stays, and a worker that serves is never taken away while too few others do, because
those that do not serve go first. A controller that is started again finds its replicas by their names; how many are
wanted is what it finds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from deltaserve.config import Role
from deploy.ray.actors import ControlActor, Report, WorkerActor
from deploy.ray.config import CONTROL, ROLES, RayConfig
from deploy.ray.plan import ControlPlane

log = logging.getLogger(__name__)

CONTROLLER = "controller"
PAUSE = 0.25
"""Seconds between two looks at the replicas."""
REPLACE_AFTER = 5.0
"""Seconds before a worker that could not be started, or was given up, is replaced."""


@dataclass
class Replica:
    """One worker's actor."""

    name: str
    index: int
    actor: Any
    group: Any
    report: Report | None = None
    """The last one; None: it has not said anything yet, or its actor is away."""
    asked: Any = None
    """The report that is on its way."""
    drain: Any = None
    """The drain that is under way."""
    failed_at: float | None = None

    @property
    def state(self) -> str:
        """draining, the worker's own state, or pending: no node has room, or its actor is being started again."""
        if self.drain is not None:
            return "draining"
        return self.report.state if self.report is not None else "pending"


@dataclass
class Books:
    """What the controller keeps of one role."""

    wanted: int
    replicas: list[Replica] = field(default_factory=list)
    drained: int = 0
    """Workers that were scaled away and went by themselves ..."""
    killed: int = 0
    """... and those that did not in time."""

    @property
    def active(self) -> list[Replica]:
        """Those that are meant to stay."""
        return [replica for replica in self.replicas if replica.drain is None]

    def surplus(self) -> list[Replica]:
        """Those to take away, in order: not serving first, then the newest."""
        ordered = sorted(self.active, key=lambda replica: (replica.state == "ready", -replica.index))
        return ordered[: max(0, len(ordered) - self.wanted)]


class Controller:
    """See the module's text. Methods are short; the work is done by a thread."""

    def __init__(self, config: RayConfig, control: ControlPlane) -> None:
        """Starts what is missing; returns at once."""
        self._config = config
        self._control_plane = control
        self._books = {role: Books(config.replicas(role)) for role in ROLES}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._control_reports: list[Report] = []
        self._control_asked: Any = None
        self._control_failed_at: float | None = None
        self._control = self._start_control()
        self._adopt()
        self._thread = threading.Thread(target=self._run, name="deltaserve-controller", daemon=True)
        self._thread.start()

    # -- what callers ask --------------------------------------------------------------------------------------------

    def endpoint(self) -> str:
        """URL of the OpenAI endpoint, without a path."""
        return self._control_plane.endpoint

    def control_plane(self) -> ControlPlane:
        """Where etcd, master and router are."""
        return self._control_plane

    def scale(self, role: Role, replicas: int) -> None:
        """From now on so many workers of the role. Raises ValueError for none, or for more than `highest`."""
        if role not in self._books:
            raise ValueError(f"role {role!r}: there are {', '.join(ROLES)}")
        if not 1 <= replicas <= self._config.highest:
            raise ValueError(
                f"replicas {replicas}: a role keeps at least 1 and at most {self._config.highest} (--highest)"
            )
        with self._lock:
            if self._books[role].wanted != replicas:
                log.info("%s: %d replicas wanted, was %d", role, replicas, self._books[role].wanted)
            self._books[role].wanted = replicas

    def status(self) -> dict[str, Any]:
        """By role: wanted, drained, killed, and the replicas as dictionaries; the control plane's processes as well."""
        with self._lock:
            roles = {
                role: {
                    "wanted": books.wanted,
                    "drained": books.drained,
                    "killed": books.killed,
                    "replicas": [_describe(replica) for replica in books.replicas],
                }
                for role, books in self._books.items()
            }
        return {"roles": roles, "control": [report.__dict__ for report in self._control_reports]}

    def stop(self) -> None:
        """End every process and every actor but this one; returns when they are gone."""
        import ray

        self._stop.set()
        self._thread.join()
        with self._lock:
            replicas = [replica for books in self._books.values() for replica in books.replicas]
            ending = [replica.actor.stop.remote() for replica in replicas]
            ray.wait(ending, num_returns=len(ending), timeout=15) if ending else None
            for replica in replicas:
                self._remove(replica)
            with contextlib.suppress(Exception):
                ray.get(self._control.stop.remote(), timeout=15)
            self._end(self._control, self._control_group)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(PAUSE):
            try:
                with self._lock:
                    self._look()
                    for role in ROLES:
                        self._reconcile(role)
            except Exception:
                log.exception("the controller's look at its replicas failed; the next one follows")

    def _look(self) -> None:
        self._control_asked, answer = _poll(self._control_asked, self._control)
        if isinstance(answer, list):
            self._control_reports = answer
            self._heal_control()
        for books in self._books.values():
            for replica in books.replicas:
                if replica.drain is not None:
                    continue
                replica.asked, answer = _poll(replica.asked, replica.actor)
                if isinstance(answer, Exception):
                    replica.report = None
                elif answer:
                    replica.report = answer[0]
                self._note_failure(replica, answer)

    def _heal_control(self) -> None:
        """A control actor whose processes were given up is ended after a while; Ray starts it anew."""
        import ray

        if not any(report.state == "failed" for report in self._control_reports):
            self._control_failed_at = None
        elif self._control_failed_at is None:
            self._control_failed_at = time.monotonic()
        elif time.monotonic() - self._control_failed_at > REPLACE_AFTER:
            log.error("control: started anew: %s", self._control_reports[0].stage)
            self._control_failed_at = None
            ray.kill(self._control, no_restart=False)

    def _note_failure(self, replica: Replica, answer: list[Report] | Exception | None) -> None:
        """A worker that was given up, or whose actor Ray will not start again, is replaced after a while."""
        gone = isinstance(answer, Exception) and "Unavailable" not in type(answer).__name__
        if gone or replica.state == "failed":
            replica.failed_at = replica.failed_at or time.monotonic()
        elif answer is not None:
            replica.failed_at = None

    def _reconcile(self, role: Role) -> None:
        books = self._books[role]
        for replica in list(books.replicas):
            if replica.drain is not None and (went := _result(replica.drain)) is not None:
                books.drained += went is True
                books.killed += went is not True
                self._remove(replica)
            elif replica.failed_at is not None and time.monotonic() - replica.failed_at > REPLACE_AFTER:
                log.warning("%s: replaced: %s", replica.name, replica.report and replica.report.stage)
                self._remove(replica)
        for _ in range(books.wanted - len(books.active)):
            books.replicas.append(self._create(role))
        for replica in books.surplus():
            if replica.state == "ready":
                log.info("%s: drains", replica.name)
                replica.drain = replica.actor.drain.remote()
            else:
                self._remove(replica)

    def _create(self, role: Role) -> Replica:
        index = next(self._numbers)
        name = f"{role}-{index}"
        actor, group = self._make(
            WorkerActor, name, role, (self._config, self._control_plane, role, name), name
        )
        return Replica(name, index, actor, group)

    def _make(
        self,
        kind: type,
        name: str,
        role: Role | Literal["control"],
        arguments: tuple[Any, ...],
        group_name: str,
    ) -> tuple[Any, Any]:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(
            [self._config.bundle(role)],
            strategy="STRICT_PACK",
            name=f"{self._config.namespace}/{group_name}",
            lifetime="detached",
        )
        bundle = dict(self._config.bundle(role))
        cpus, gpus = bundle.pop("CPU", 0), bundle.pop("GPU", 0)
        actor: Any = (
            ray.remote(kind)
            .options(
                name=name,
                namespace=self._config.namespace,
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                resources=bundle,
                max_restarts=-1,
                max_concurrency=2,  # reports go on while a drain waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=0, placement_group_capture_child_tasks=False
                ),
            )
            .remote(*arguments)
        )
        return actor, group

    def _start_control(self) -> Any:
        import ray

        with contextlib.suppress(ValueError):  # there is none yet
            actor = ray.get_actor(CONTROL, self._config.namespace)
            self._control_group = _group(f"{self._config.namespace}/{CONTROL}")
            return actor
        actor, self._control_group = self._make(
            ControlActor, CONTROL, "control", (self._config, self._control_plane), CONTROL
        )
        return actor

    def _adopt(self) -> None:
        """Find the replicas of the controller before this one."""
        import ray

        names = [
            found["name"]
            for found in ray.util.list_named_actors(all_namespaces=True)
            if found["namespace"] == self._config.namespace
        ]
        for role, books in self._books.items():
            for name in names:
                kind, _, number = name.rpartition("-")
                if kind == role:
                    actor = ray.get_actor(name, self._config.namespace)
                    group = _group(f"{self._config.namespace}/{name}")
                    books.replicas.append(Replica(name, int(number), actor, group))
            if books.replicas:
                books.wanted = len(books.replicas)
        highest = max((r.index for b in self._books.values() for r in b.replicas), default=-1)
        self._numbers = itertools.count(highest + 1)

    def _remove(self, replica: Replica) -> None:
        for books in self._books.values():
            if replica in books.replicas:
                books.replicas.remove(replica)
        self._end(replica.actor, replica.group)

    @staticmethod
    def _end(actor: Any, group: Any) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # gone already
            ray.kill(actor, no_restart=True)
        if group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(group)


def _group(name: str) -> Any:
    from ray.util.placement_group import get_placement_group

    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _poll(asked: Any, actor: Any) -> tuple[Any, list[Report] | Exception | None]:
    """(the question that is on its way, the answer to the one before): None while there is none."""
    if asked is None:
        return actor.reports.remote(), None
    answer = _result(asked)
    return (asked, None) if answer is None else (actor.reports.remote(), answer)


def _result(reference: Any) -> Any:
    """What a call returned, or the exception it raised; None while it runs."""
    import ray

    done, _ = ray.wait([reference], timeout=0)
    if not done:
        return None
    try:
        return ray.get(reference)
    except Exception as error:
        return error


def _describe(replica: Replica) -> dict[str, Any]:
    report = replica.report
    return {
        "name": replica.name,
        "state": replica.state,
        "stage": report.stage if report else "waits for a node with room",
        "address": report.address if report else "",
        "node": report.node if report else "",
        "pid": report.pid if report else None,
        "starts": report.starts if report else 0,
    }
