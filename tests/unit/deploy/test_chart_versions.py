# SPDX-License-Identifier: Apache-2.0
"""An upgrade is a second version beside the first: they never pair, and requests go where the values say.

The steps are those of docs/operate.md: add, shift, drain, remove.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.unit.deploy.invariants import config_of, deltaserves, violations
from tests.unit.deploy.rendering import Object, changed, example, of_kind, render, selects, workloads

DECODE = "versions.0.pools.1"


def two_versions(serve: str = "a") -> dict[str, Any]:
    """The K3 example with a second version beside the first: another image, an fp8 cache, other ranks."""
    values = example("k3-b300")
    second = copy.deepcopy(values["versions"][0])
    second |= {"name": "b", "weight": 0, "images": {"cpu": {"tag": "0.2.0"}, "cuda": {"tag": "0.2.0"}}}
    for pool in second["pools"]:
        pool["engineArgs"] = {"kv_cache_dtype": "fp8"}
    second["pools"][1] |= {"tp": 4, "dcp": 4}
    values["versions"].append(second)
    values["router"]["serve"] = serve
    return values


def prefixes(objects: list[Object], version: str) -> set[str]:
    """The clusters that a version's pods are in."""
    return {config_of(each).etcd.prefix for each in deltaserves(objects) if each.version == version}


def served(objects: list[Object]) -> set[str]:
    """The versions whose routers the Service of the release sends requests to."""
    (front,) = [
        each
        for each in of_kind(objects, "Service")
        if each["metadata"]["labels"]["app.kubernetes.io/component"] == "front"
    ]
    return {
        each.version
        for each in workloads(objects)
        if selects({"matchLabels": front["spec"]["selector"]}, each.labels)
    }


def pods(objects: list[Object], version: str) -> dict[str, Any]:
    """Pod templates of a version: what has to change for Kubernetes to replace pods."""
    return {
        each.name: each.object["spec"]["template"] for each in deltaserves(objects) if each.version == version
    }


def test_two_versions_keep_every_invariant() -> None:
    objects = render(two_versions())
    assert violations(objects) == []
    assert len(prefixes(objects, "a") | prefixes(objects, "b")) == 2


def test_adding_a_version_leaves_the_pods_of_the_first_alone() -> None:
    before, after = render(example("k3-b300")), render(two_versions())
    assert pods(before, "a") == pods(after, "a")
    assert prefixes(before, "a") == prefixes(after, "a")
    assert served(after) == {"a"}


@pytest.mark.parametrize(("serve", "expected"), [("a", {"a"}), ("b", {"b"}), ("all", {"a", "b"})])
def test_shifting_requests_replaces_no_pod(serve: str, expected: set[str]) -> None:
    before, after = render(two_versions()), render(two_versions(serve))
    assert served(after) == expected
    for version in ("a", "b"):
        assert pods(before, version) == pods(after, version)


def test_a_route_shares_requests_by_weight() -> None:
    values = changed(changed(two_versions(), "versions.0.weight", 90), "versions.1.weight", 10)
    (route,) = of_kind(render(values), "HTTPRoute")
    found = {each["name"]: each["weight"] for each in route["spec"]["rules"][0]["backendRefs"]}
    assert found == {"ds-deltaserve-a-router": 90, "ds-deltaserve-b-router": 10}


def test_removing_the_first_leaves_the_second_alone() -> None:
    values = two_versions("b")
    before = render(values)
    values["versions"].pop(0)
    after = render(values)
    assert pods(before, "b") == pods(after, "b")
    assert not pods(after, "a")
    assert violations(after) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{DECODE}.engineArgs", {"kv_cache_dtype": "fp8"}),
        (f"{DECODE}.options", {"dtype": "float32"}),
        (f"{DECODE}.options", {"prefix_match_unit": 64}),
        ("model.path", "/models/Kimi-K3-instruct"),
        ("images.cuda.tag", "0.2.0"),
    ],
)
def test_what_changes_the_state_in_place_moves_to_a_cluster_of_its_own(path: str, value: Any) -> None:
    before, after = render(example("k3-b300")), render(changed(example("k3-b300"), path, value))
    assert not prefixes(before, "a") & prefixes(after, "a")
    assert violations(after) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{DECODE}.replicas", 7),
        (f"{DECODE}.maxNumSeqs", 64),
        (f"{DECODE}.dcp", 4),
        (f"{DECODE}.segmentBytes", 1 << 38),
        ("router.requestTimeout", 3600),
        ("versions.0.router.replicas", 9),
    ],
)
def test_what_does_not_change_the_state_stays_in_the_cluster(path: str, value: Any) -> None:
    before, after = render(example("k3-b300")), render(changed(example("k3-b300"), path, value))
    assert prefixes(before, "a") == prefixes(after, "a")


def test_scaling_replaces_no_pod_and_the_longest_request_sets_the_grace() -> None:
    before = render(example("k3-b300"))
    assert pods(before, "a") == pods(render(changed(example("k3-b300"), f"{DECODE}.replicas", 7)), "a")
    for seconds in (60, 3600):
        objects = render(changed(example("k3-b300"), "router.requestTimeout", seconds))
        graces = {each.component: each.pod["terminationGracePeriodSeconds"] for each in deltaserves(objects)}
        assert graces == {"router": seconds + 35, "prefill": seconds + 30, "decode": seconds + 30}
        assert violations(objects) == []


def test_a_pool_that_scales_by_itself_has_no_replicas_of_its_own() -> None:
    metric = {
        "type": "External",
        "external": {"metric": {"name": "m"}, "target": {"type": "AverageValue", "averageValue": "1"}},
    }
    scaling = {"enabled": True, "minReplicas": 2, "maxReplicas": 6, "metrics": [metric]}
    objects = render(changed(example("k3-b300"), f"{DECODE}.autoscaling", scaling))
    (decode,) = workloads(objects, "decode")
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert decode.replicas is None  # an upgrade must not set it back
    assert scaler["spec"]["scaleTargetRef"]["name"] == decode.name
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 6)
    # Never faster down than a worker drains.
    down = scaler["spec"]["behavior"]["scaleDown"]
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 1800}]
    assert violations(objects) == []
