# SPDX-License-Identifier: Apache-2.0
"""`deltaserve plan`: look at the routers, plan, tell the targets; every few seconds until a signal.

A look that fails changes nothing: the last plan stays in force, and is counted. A plan that a target does not take is
offered again at the next look.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server

from deltaserve.addresses import join
from deltaserve.config import Role
from deltaserve.plan_config import PlanConfig
from deploy.planner.load import Load, Profile, Promise
from deploy.planner.policy import Plan, Planner, Settings
from deploy.planner.reader import Reader, ReadFailed
from deploy.planner.targets import Gauges, RayTarget, Target

ROLES: tuple[Role, ...] = ("prefill", "decode")
PATIENCE = 4.0
"""Times `start_seconds` after which a worker that was asked for and did not come counts as starting no longer."""


class Loop:
    """Looks, plans, tells. One look is one call of `step`."""

    def __init__(
        self,
        reader: Reader,
        planner: Planner,
        gauges: Gauges,
        targets: Sequence[Target],
        start_seconds: float,
        say: Callable[[str], None] = print,
    ) -> None:
        """`targets` beside the gauges; `say` gets a line for each change and each failure."""
        self._reader = reader
        self._planner = planner
        self._gauges = gauges
        self._targets = (*targets, gauges)
        self._patience = PATIENCE * start_seconds
        self._say = say
        self._wanted: dict[Role, int] = {}
        self._since: dict[Role, float] = {}
        self._ready: dict[Role, int] = {}

    def step(self, now: float) -> Plan | None:
        """One look at second `now`; None when there was nothing to plan from."""
        try:
            load = self._reader.read(now, self._starting(now))
        except ReadFailed as error:
            self._gauges.failures.labels("read").inc()
            self._say(f"not read: {error}; the last plan stays in force")
            return None
        if load is None:
            return None
        self._note(load)
        if min(self._ready.values()) < 1:
            self._say("a role has no worker that serves; nothing is planned until it has")
            return None
        plan = self._planner.plan(load)
        self._gauges.correction.set(self._planner.correction)
        for role, wish in (("prefill", plan.prefill), ("decode", plan.decode)):
            self._tell(role, wish.replicas, wish.why, now)  # type: ignore[arg-type]
        return plan

    def _note(self, load: Load) -> None:
        self._ready = {"prefill": load.prefill.ready, "decode": load.decode.ready}
        for role, ready in self._ready.items():
            self._gauges.ready.labels(role).set(ready)

    def _starting(self, now: float) -> dict[Role, int]:
        return {
            role: max(0, self._wanted.get(role, 0) - self._ready.get(role, 0))
            if now - self._since.get(role, now) < self._patience
            else 0
            for role in ROLES
        }

    def _tell(self, role: Role, replicas: int, why: str, now: float) -> None:
        before = self._wanted.get(role)
        for target in self._targets:
            try:
                target.set(role, replicas)
            except (OSError, RuntimeError) as error:
                self._gauges.failures.labels("set").inc()
                self._say(f"{role}: {replicas} not set: {error}; tried again at the next look")
                return
        if before != replicas:
            self._since[role] = now
            self._say(f"{role}: {before if before is not None else '-'} -> {replicas}: {why}")
            if before is not None:
                self._gauges.changes.labels(role, "up" if replicas > before else "down").inc()
        self._wanted[role] = replicas


def read_profile(path: Path) -> Profile:
    """A profile from its JSON file. Raises ValueError naming the file and what is wrong with it."""
    names = {each.name for each in fields(Profile)}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given = {name: document[name] for name in names}
    except KeyError as error:
        raise ValueError(
            f"profile {path}: {error} is missing; python -m benchmarks.scaling.calibrate writes one"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"profile {path}: {error}; name a JSON file with --profile") from error
    return Profile(**given)


def run(config: PlanConfig) -> int:
    """Plan until SIGTERM or SIGINT; returns the exit code."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return plan(config, stop)


def plan(config: PlanConfig, stop: threading.Event) -> int:
    """Plan until `stop` is set; returns the exit code: 0, or 1 with a line on standard error when it cannot begin."""
    try:
        profile = read_profile(config.profile)
        reader = Reader(config.routers, config.ttft)
        targets = [_ray(config)] if config.ray else []
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    registry = CollectorRegistry()
    gauges = Gauges(registry)
    try:
        server, thread = start_http_server(config.port, config.host, registry)
    except OSError as error:
        print(f"error: port {config.port}: {error.strerror}; choose another with --port", file=sys.stderr)
        return 1
    settings = Settings(lowest=config.lowest, highest=config.highest)
    planner = Planner(profile, Promise(config.ttft, config.tpot, config.target), settings)
    loop = Loop(reader, planner, gauges, targets, profile.start_seconds, lambda line: print(line, flush=True))
    print(f"READY {join(config.host, int(server.server_address[1]))}", flush=True)
    while not stop.is_set():
        loop.step(time.monotonic())
        stop.wait(config.interval)
    server.shutdown()
    thread.join()
    return 0


def _ray(config: PlanConfig) -> Target:
    from deltaserve.up.errors import ClusterError
    from deploy.ray.cluster import RayCluster

    try:
        return RayTarget(RayCluster.attach(config.ray, config.ray_address))
    except ClusterError as error:
        raise RuntimeError(str(error)) from error
