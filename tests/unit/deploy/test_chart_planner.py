# SPDX-License-Identifier: Apache-2.0
"""The planner in the chart: what it exports is what the pools' autoscalers, through the adapter, ask for."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import yaml
from helm_python.errors import HelmError
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.scaling.model import WORKER
from benchmarks.scaling.planned import profile
from deploy.planner.main import read_profile
from deploy.planner.targets import Gauges
from tests.unit.deploy.invariants import config_of, require_caught, violations
from tests.unit.deploy.rendering import (
    NAMESPACE,
    ROOT,
    Object,
    changed,
    example,
    of_kind,
    render,
    workloads,
)
from tests.unit.deploy.test_chart_examples import KUBERNETES, refusals

ADAPTER = ROOT / "deploy" / "planner" / "kubernetes" / "prometheus-adapter.yaml"
PROFILE = asdict(profile(WORKER))
DECODE = "versions.0.pools.1"


def planned() -> Object:
    """Values of two versions whose pools, prefill and decode of both, follow planners."""
    values = changed(changed(example("k3-b300"), "tls.routerSecret", ""), "planner.profile", PROFILE)
    for pool, most in zip(values["versions"][0]["pools"], (4, 6), strict=True):
        pool["autoscaling"] = {"enabled": True, "minReplicas": 1, "maxReplicas": most, "planner": True}
    second = copy.deepcopy(values["versions"][0])
    second["name"] = "b"
    values["versions"].append(second)
    return values


@functools.cache
def _rendered() -> list[Object]:
    return render(planned())


def scraped(
    objects: list[Object], wanted: dict[str, dict[str, int]]
) -> list[tuple[str, dict[str, str], float]]:
    """Series in Prometheus when each version's planner wants so many: its page, and the labels of its Service."""
    series = []
    monitor = next(
        each for each in of_kind(objects, "ServiceMonitor") if "planner" in each["metadata"]["name"]
    )
    assert "honorLabels" not in monitor["spec"]["endpoints"][0]
    for service in of_kind(objects, "Service"):
        labels = service["metadata"]["labels"]
        if labels["app.kubernetes.io/component"] != "planner":
            continue
        registry = CollectorRegistry()
        gauges = Gauges(registry)
        for role, replicas in wanted[labels["deltaserve/version"]].items():
            gauges.set(role, replicas)  # type: ignore[arg-type]
        own = {"service": service["metadata"]["name"], "namespace": NAMESPACE}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            series += [(s.name, {**s.labels, **own}, s.value) for s in family.samples]
    return series


def served(series: list[tuple[str, dict[str, str], float]], asked: Object) -> list[float]:
    """What the adapter answers an autoscaler of the namespace: `max by` of the series that rule and labels choose."""
    (rule,) = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]["external"]
    matched = re.fullmatch(r'\{__name__="(\w+)",namespace!="",service!=""\}', rule["seriesQuery"])
    assert matched
    query = re.fullmatch(
        r"max by \(([\w, ]+)\) \(<<\.Series>>\{<<\.LabelMatchers>>\}\)", rule["metricsQuery"]
    )
    assert query
    by = query[1].split(", ")
    labels = {**asked["selector"]["matchLabels"], "namespace": NAMESPACE}
    if asked["name"] != matched[1]:
        return []
    found: dict[tuple[str, ...], float] = {}
    for name, own, value in series:
        if name == asked["name"] and labels.items() <= own.items():
            key = tuple(own[label] for label in by)
            found[key] = max(value, found.get(key, -math.inf))
    return list(found.values())


def test_every_pool_gets_the_number_that_its_own_planner_has_for_its_role() -> None:
    objects = copy.deepcopy(_rendered())
    wanted = {"a": {"prefill": 2, "decode": 5}, "b": {"prefill": 3, "decode": 4}}
    series = scraped(objects, wanted)
    scalers = list(of_kind(objects, "HorizontalPodAutoscaler"))
    assert len(scalers) == 4
    for scaler in scalers:
        (metric,) = scaler["spec"]["metrics"]
        labels = scaler["metadata"]["labels"]
        role, version = labels["app.kubernetes.io/component"], labels["deltaserve/version"]
        (value,) = served(series, metric["external"]["metric"])
        target = float(metric["external"]["target"]["averageValue"])
        assert math.ceil(value / target) == wanted[version][role]
        for name in ("deltaserve_planner_desired", "deltaserve_planner_ready_replicas"):
            assert served(series, {**metric["external"]["metric"], "name": name}) == [], "the control"


def test_the_objects_are_right_and_the_planner_keeps_its_own_windows() -> None:
    objects = copy.deepcopy(_rendered())
    assert violations(objects) == []
    assert refusals([each for each in objects if "planner" in each["metadata"]["name"]], KUBERNETES[-1]) == []
    assert refusals(list(of_kind(objects, "HorizontalPodAutoscaler")), KUBERNETES[0]) == []
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        for way in ("scaleUp", "scaleDown"):
            assert scaler["spec"]["behavior"][way]["stabilizationWindowSeconds"] == 0
            assert scaler["spec"]["behavior"][way]["policies"][0]["value"] == scaler["spec"]["maxReplicas"]
    for planner in workloads(objects, "planner"):
        assert planner.replicas == 1
        config = config_of(planner)
        assert (config.lowest, config.highest, config.ttft) == (1, 6, 4)


def test_the_profile_reaches_the_planner(tmp_path: Any) -> None:
    objects = copy.deepcopy(_rendered())
    (planner, _) = workloads(objects, "planner")
    mapped = next(each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"] == planner.name)
    file = tmp_path / config_of(planner).profile.name
    file.write_text(mapped["data"][file.name], encoding="utf-8")
    assert read_profile(file) == profile(WORKER)
    assert json.loads(mapped["data"][file.name])["kv_tokens"] == PROFILE["kv_tokens"]


def test_a_pool_on_its_own_metrics_brings_no_planner() -> None:
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization"}}}
    scaling = {"enabled": True, "minReplicas": 1, "maxReplicas": 2, "metrics": [metric]}
    objects = render(changed(example("h200x8"), f"{DECODE}.autoscaling", scaling))
    assert workloads(objects, "planner") == []
    assert not [each for each in of_kind(objects, "Service") if each["metadata"]["name"].endswith("-routers")]


def _ask(name: str, value: str) -> Callable[[Object], None]:
    def damage(scaler: Object) -> None:
        scaler["spec"]["metrics"][0]["external"]["metric"]["selector"]["matchLabels"][name] = value

    return damage


BROKEN: list[tuple[str, str, Callable[[Object], Any], str]] = [
    (
        "Deployment",
        "a-planner",
        lambda o: _container(o)["args"].append("--slo=1"),
        "a flag that this command",
    ),
    ("Service", "a-routers", lambda o: o["spec"].pop("clusterIP"), "no Service with an address for each"),
    ("Service", "a-routers", lambda o: o["spec"]["selector"].popitem(), "not just the routers of version a"),
    (
        "Deployment",
        "a-planner",
        lambda o: _container(o)["args"].append("--highest=3"),
        "its planner plans 1 to 3",
    ),
    ("HorizontalPodAutoscaler", "a-prefill", _ask("role", "decode"), "no planner exports for prefill"),
    (
        "HorizontalPodAutoscaler",
        "b-prefill",
        _ask("service", "ds-deltaserve-a-planner"),
        "['a'], not its own",
    ),
    (
        "HorizontalPodAutoscaler",
        "a-prefill",
        lambda o: o["spec"]["metrics"][0]["external"]["metric"].update(name="deltaserve_planner_replicas"),
        "which no planner exports",
    ),
    ("NetworkPolicy", "-router", lambda o: o["spec"]["ingress"][0]["from"].pop(), "planner does not reach"),
    (
        "NetworkPolicy",
        "-planner",
        lambda o: o["spec"].update(ingress=[{}]),
        "a pod of this namespace reaches",
    ),
    (
        "ServiceMonitor",
        "-planner",
        lambda o: o["spec"]["selector"].update(matchLabels={"x": "y"}),
        "scraped 0 times",
    ),
    (
        "PodDisruptionBudget",
        "a-planner",
        lambda o: o["spec"]["selector"]["matchLabels"].clear(),
        "disruption budgets",
    ),
]


def _container(deployment: Object) -> Object:
    container: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


@pytest.mark.parametrize(("kind", "name", "damage", "expected"), BROKEN, ids=[each[3] for each in BROKEN])
def test_damage_to_the_planners_objects_is_found(
    kind: str, name: str, damage: Callable[[Object], Any], expected: str
) -> None:
    objects = copy.deepcopy(_rendered())
    damage(next(each for each in of_kind(objects, kind) if each["metadata"]["name"].endswith(name)))
    require_caught(objects, expected)


PLANNER: dict[str, Any] = {"enabled": True, "minReplicas": 1, "maxReplicas": 4, "planner": True}
REFUSED = [
    ({f"{DECODE}.autoscaling": PLANNER}, "autoscaling.planner without planner.profile"),
    (
        {"planner.profile": PROFILE, f"{DECODE}.autoscaling": {**PLANNER, "metrics": [{"type": "External"}]}},
        "planner and metrics exclude each other",
    ),
    (
        {"planner.profile": PROFILE, f"{DECODE}.autoscaling": PLANNER, "tls.routerSecret": "x"},
        "autoscaling.planner with tls.routerSecret",
    ),
    ({"planner.profile": {**PROFILE, "kv_tokens": 1.5}}, "/planner/profile"),
    ({"planner.profile": {"slots": 8}}, "/planner/profile"),
    ({"planner.target": 1}, "/planner/target"),
    ({f"{DECODE}.autoscaling": {**PLANNER, "planner": False}}, "/autoscaling"),
    ({f"{DECODE}.name": "planner"}, "planner is the name of something else"),
]


@pytest.mark.parametrize(("changes", "expected"), REFUSED, ids=[each[1] for each in REFUSED])
def test_what_cannot_work_with_a_planner_is_refused(changes: Object, expected: str) -> None:
    values = changed(example("k3-b300"), "tls.routerSecret", "")
    for path, value in changes.items():
        values = changed(values, path, value)
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert expected in str(refusal.value)


def test_two_pools_of_a_role_cannot_both_follow_one_number() -> None:
    values = planned()
    other = {**copy.deepcopy(values["versions"][0]["pools"][1]), "name": "long"}
    values["versions"][0]["pools"].append(other)
    with pytest.raises(HelmError, match="has the same role"):
        render(values)
