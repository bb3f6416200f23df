# SPDX-License-Identifier: Apache-2.0
"""From routers' answers to a load, and from a plan to gauges and targets; no router is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from deltaserve.cli.main import build_parser
from deltaserve.plan_config import PlanConfig
from deploy.planner.load import Profile, Promise
from deploy.planner.main import Loop, read_profile
from deploy.planner.policy import Planner, Settings
from deploy.planner.reader import Reader, ReadFailed
from deploy.planner.targets import Gauges, RayTarget, Target
from router.metrics import Metrics
from router.roster import Roster

PROFILE = Profile(0.03, 160e-6, 0.02, 0.01, 0.001, 0.0, 24, 120_000, 35.0)


class Router:
    """A router's two pages, made with the router's own metrics so that names cannot drift apart."""

    def __init__(self) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.workers: dict[str, list[dict[str, Any]]] = {
            "prefill": [worker("prefill-a", requests=2, outstanding_tokens=3000)],
            "decode": [
                worker("decode-a", requests=5, kv_usage=0.4),
                worker("decode-b", requests=3, waiting=1),
            ],
        }
        self.down = False

    def get(self, url: str) -> str:
        if self.down:
            raise ReadFailed(f"{url}: away")
        if url.endswith("/health"):
            return json.dumps({"roles": {role: {"workers": w} for role, w in self.workers.items()}})
        assert url.endswith("/metrics")
        return generate_latest(self.metrics.registry).decode()

    def serve(self, requests: int, prompt: int, ttft: float, tpot: float) -> None:
        """So many requests have ended."""
        for _ in range(requests):
            self.metrics.requests.labels("finished").inc()
            self.metrics.prompt_tokens.labels("store").inc(prompt)
            self.metrics.ttft.observe(ttft)
            self.metrics.tpot.observe(tpot)


def worker(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "state": "ready",
        "requests": 0,
        "outstanding_tokens": 0,
        "waiting": 0,
        "kv_usage": 0.0,
    } | fields


def test_the_worker_fields_read_are_those_that_a_router_reports() -> None:
    described = Roster._describe.__code__.co_consts
    names = {name for group in described if isinstance(group, tuple) for name in group} | set(described)
    assert set(worker("x")) <= names


def test_counters_become_an_intervals_counts() -> None:
    router = Router()
    reader = Reader(["http://r/"], ttft=1.0, get=router.get)
    assert reader.read(100.0, {}) is None, "one look says nothing about an interval"
    router.serve(8, 1000, ttft=0.4, tpot=0.02)
    router.serve(2, 1000, ttft=4.0, tpot=0.07)
    router.metrics.in_flight.set(3)
    router.workers["prefill"][0]["outstanding_tokens"] = 5000
    load = reader.read(105.0, {"decode": 1})
    assert load is not None
    assert (load.interval, load.prefill.ready, load.decode.ready, load.decode.starting) == (5.0, 1, 2, 1)
    assert load.prefill.arrived_requests == 13
    assert load.prefill.arrived_tokens == 10_000 + 2_000
    assert (load.prefill.queued_tokens, load.prefill.queued_requests) == (5000, 2)
    assert load.prefill.ttft_late == pytest.approx(0.2)
    assert load.decode.tpot == pytest.approx((8 * 0.02 + 2 * 0.07) / 10)
    assert (load.decode.requests, load.decode.waiting) == (8, 1)
    assert load.decode.kv_usage == pytest.approx(0.2)


def test_two_routers_are_one_cluster() -> None:
    one, two = Router(), Router()
    by_name = {"http://one": one, "http://two": two}
    reader = Reader(list(by_name), 1.0, lambda url: by_name[url.rpartition("/")[0]].get(url))
    reader.read(0.0, {})
    one.serve(3, 100, 0.1, 0.01)
    two.serve(4, 100, 0.1, 0.01)
    load = reader.read(5.0, {})
    assert load is not None
    assert load.prefill.arrived_requests == 7
    assert load.decode.ready == 2, "a worker that both know is one worker"
    assert load.decode.requests == 16, "each has requests of its own on it"
    assert load.decode.waiting == 1, "what a worker says of itself is not added up"


def test_a_router_that_began_anew_gives_no_load() -> None:
    router = Router()
    router.serve(5, 100, 0.1, 0.01)
    reader = Reader(["http://r"], 1.0, lambda url: router.get(url))
    reader.read(0.0, {})
    router = Router()
    assert reader.read(5.0, {}) is None
    assert reader.read(10.0, {}) is not None


@pytest.mark.parametrize("page", ["/health", "/metrics"])
def test_what_is_no_router_is_named(page: str) -> None:
    router = Router()

    def get(url: str) -> str:
        return "hello" if url.endswith(page) else router.get(url)

    with pytest.raises(ReadFailed, match=page):
        Reader(["http://r"], 1.0, get).read(0.0, {})


class Wanted(Target):
    """Remembers what it was told; fails while `broken`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.broken = False

    def set(self, role: str, replicas: int) -> None:
        if self.broken:
            raise RuntimeError("nobody answers")
        self.told.append((role, replicas))


def loop(router: Router, target: Target) -> tuple[Loop, CollectorRegistry, list[str]]:
    registry, said = CollectorRegistry(), list[str]()
    planner = Planner(PROFILE, Promise(4.0, 0.025), Settings(lowest=1, highest=8, learning=0.0))
    reader = Reader(["http://r"], 4.0, router.get)
    return Loop(reader, planner, Gauges(registry), [target], 35.0, said.append), registry, said


def test_a_plan_reaches_the_gauges_and_the_target() -> None:
    router, target = Router(), Wanted()
    looks, registry, said = loop(router, target)
    for step in range(10):
        router.serve(40, 4000, 0.5, 0.02)
        looks.step(step * 5.0)
    wanted = dict(target.told[-2:])
    assert wanted["prefill"] >= 5
    assert (
        registry.get_sample_value("deltaserve_planner_desired_replicas", {"role": "prefill"})
        == wanted["prefill"]
    )
    assert registry.get_sample_value("deltaserve_planner_ready_replicas", {"role": "decode"}) == 2
    assert any(line.startswith("prefill: ") for line in said)


def test_a_failed_look_changes_nothing_and_a_failed_change_is_tried_again() -> None:
    router, target = Router(), Wanted()
    looks, registry, said = loop(router, target)
    for step in range(3):
        router.serve(5, 1000, 0.5, 0.02)
        looks.step(step * 5.0)
    told = list(target.told)
    router.down = True
    assert looks.step(20.0) is None
    assert target.told == told
    assert registry.get_sample_value("deltaserve_planner_failures_total", {"stage": "read"}) == 1
    router.down, target.broken = False, True
    looks.step(25.0)
    assert registry.get_sample_value("deltaserve_planner_failures_total", {"stage": "set"}) == 2
    target.broken = False
    looks.step(30.0)
    assert len(target.told) == len(told) + 2
    assert any("stays in force" in line for line in said)


def test_a_role_without_workers_is_not_planned_for() -> None:
    router, target = Router(), Wanted()
    looks, _, said = loop(router, target)
    router.workers["prefill"] = []
    looks.step(0.0)
    looks.step(5.0)
    assert target.told == []
    assert any("no worker" in line for line in said)


def test_ray_is_asked_to_scale_and_its_failures_are_tried_again() -> None:
    class Cluster:
        def scale(self, role: str, replicas: int) -> None:
            if replicas == 3:
                raise TimeoutError("no answer")
            if replicas == 0:
                raise ValueError("at least 1")

    target = RayTarget(Cluster())  # type: ignore[arg-type]
    target.set("decode", 2)
    with pytest.raises(RuntimeError, match="no answer"):
        target.set("decode", 3)
    with pytest.raises(ValueError, match="at least 1"):
        target.set("decode", 0)


def test_profiles_are_read_or_refused(tmp_path: Path) -> None:
    shipped = read_profile(Path(__file__).parents[3] / PlanConfig.model_fields["profile"].default)
    assert shipped.sequences(0.1, 300) >= 1
    incomplete = tmp_path / "profile.json"
    incomplete.write_text('{"slots": 3}')
    with pytest.raises(ValueError, match="is missing"):
        read_profile(incomplete)
    with pytest.raises(ValueError, match="--profile"):
        read_profile(tmp_path / "none.json")


def test_the_command_is_there() -> None:
    arguments = build_parser().parse_args(["plan", "--ttft", "2", "--ray", "default"])
    assert arguments.command == "plan"


def test_a_name_stands_for_the_routers_that_it_has_now() -> None:
    routers = {"10.0.0.1": Router(), "fd00::2": Router()}
    present = ["10.0.0.1"]
    asked: list[tuple[str, int]] = []

    def look_up(name: str, port: int) -> list[str]:
        asked.append((name, port))
        if not present:
            raise OSError("no such name")
        return list(present)

    urls = {"http://10.0.0.1:8000": "10.0.0.1", "http://[fd00::2]:8000": "fd00::2"}
    reader = Reader(
        ["dns+http://r-routers:8000"],
        1.0,
        lambda url: routers[urls[url.rpartition("/")[0]]].get(url),
        look_up,
    )
    reader.read(0.0, {})
    routers["fd00::2"].serve(50, 100, 0.1, 0.01)
    present.append("fd00::2")
    assert reader.read(5.0, {}) is None, "what a router has counted before it was seen is not this interval's"
    for router in routers.values():
        router.serve(3, 100, 0.1, 0.01)
    load = reader.read(10.0, {})
    assert load is not None
    assert load.prefill.arrived_requests == 6
    assert set(asked) == {("r-routers", 8000)}
    present.clear()
    with pytest.raises(ReadFailed, match="r-routers:8000: the name has no address"):
        reader.read(15.0, {})
    for wrong in ("dns+http://r-routers", "dns+http://:8000", "dns+http://r:port"):
        with pytest.raises(ValueError, match="give both"):
            Reader([wrong], 1.0)
