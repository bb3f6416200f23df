# SPDX-License-Identifier: Apache-2.0
"""Every example renders, is what Kubernetes takes, and keeps every invariant."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint, package
from kubernetes_validate import utils

from deltaserve.up.binaries import find_etcd, find_master
from tests.unit.deploy.invariants import config_of, violations
from tests.unit.deploy.rendering import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RELEASE,
    ROOT,
    Object,
    changed,
    example,
    of_kind,
    render,
    rendered,
    workloads,
)

KUBERNETES = ("1.27", "1.32", "1.37")
"""The oldest that Chart.yaml lets in, one between, and the newest that schemas are to be had of."""

CUSTOM: dict[str, Any] = {
    # The package has no schemas of other projects' resources: these are the fields that the chart may use, no others.
    "ServiceMonitor": {
        "jobLabel": ...,
        "selector": {"matchLabels": ..., "matchExpressions": ...},
        "targetLabels": ...,
        "endpoints": [
            {
                "port": ...,
                "path": ...,
                "interval": ...,
                "scheme": ...,
                "tlsConfig": {"insecureSkipVerify": ...},
            }
        ],
    },
    "PrometheusRule": {
        "groups": [
            {
                "name": ...,
                "interval": ...,
                "rules": [
                    {
                        **dict.fromkeys(("alert", "record", "expr", "for", "keep_firing_for"), ...),
                        "labels": ...,
                        "annotations": ...,
                    }
                ],
            }
        ]
    },
    "HTTPRoute": {
        "parentRefs": ...,
        "hostnames": ...,
        "rules": [{"backendRefs": [{"name": ..., "port": ..., "weight": ...}]}],
    },
}


@pytest.fixture(scope="module", autouse=True)
def _schemas_read_once() -> Iterator[None]:
    """The package reads a file of a megabyte for each object that it looks at; the answers are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


def unknown_fields(value: Any, known: Any, at: str = "spec") -> list[str]:
    """Paths in `value` that `known` does not have."""
    if known is ...:
        return []
    if isinstance(known, list):
        return [
            line
            for index, each in enumerate(value)
            for line in unknown_fields(each, known[0], f"{at}[{index}]")
        ]
    found = [f"{at}.{key}" for key in value if key not in known]
    for key in set(value) & set(known):
        found += unknown_fields(value[key], known[key], f"{at}.{key}")
    return found


def refusals(objects: list[Object], version: str) -> list[str]:
    """What Kubernetes of this version would not take; fields that it does not know included."""
    found = []
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in CUSTOM:
            found += [f"{name}: {line}" for line in unknown_fields(each["spec"], CUSTOM[each["kind"]])]
            continue
        try:
            kubernetes_validate.validate(each, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{name}: {error.message}")
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_kubernetes_takes_it(name: str) -> None:
    for version in KUBERNETES:
        assert refusals(rendered(name), version) == []


def test_kubernetes_would_refuse_what_it_does_not_know() -> None:
    objects = [each for each in rendered("h200x8") if each["kind"] in ("Deployment", "ServiceMonitor")]
    first, second, *_ = of_kind(objects, "Deployment")
    first["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    second["spec"]["replicas"] = "two"
    next(of_kind(objects, "ServiceMonitor"))["spec"]["endpoints"][0]["intervall"] = "1s"
    for version in KUBERNETES:
        said = " ".join(refusals(objects, version))
        assert "terminationGraceSeconds" in said
        assert "'two' is not" in said
        assert "intervall" in said


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_invariant_holds(name: str) -> None:
    assert violations(rendered(name)) == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_finds_nothing_to_say(name: str) -> None:
    report = lint(CHART, example(name), strict=True, namespace=NAMESPACE)
    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


def test_rendering_is_the_same_each_time() -> None:
    assert render(example("k3-b300")) == render(example("k3-b300"))


def test_the_layouts_are_those_that_the_examples_are_named_after() -> None:
    def layout(name: str) -> list[tuple[str, str, int, int, int]]:
        found = []
        for each in workloads(rendered(name), "prefill", "decode"):
            config = config_of(each)
            found.append((config.role, config.device, each.replicas or 0, config.tp, config.dcp))
        return sorted(found)

    assert layout("laptop-cpu") == [("decode", "cpu", 1, 1, 1), ("prefill", "cpu", 1, 1, 1)]
    assert layout("h200x8") == [("decode", "cuda", 2, 2, 1), ("prefill", "cuda", 2, 2, 1)]
    assert sum(replicas * tp for _, _, replicas, tp, _ in layout("h200x8")) == 8
    assert layout("k3-b300") == [("decode", "cuda", 3, 8, 8), ("prefill", "cuda", 2, 8, 1)]


def flags_of(program: Path, *arguments: str) -> set[str]:
    """Names of the flags that a program's own help lists."""
    done = subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return set(re.findall(r"^\s+'?--?([a-z][\w-]*)", done.stdout + done.stderr, re.MULTILINE))


def unknown_flags(objects: list[Object], component: str, known: set[str]) -> list[str]:
    """Flags that a component's pods are started with, and its program does not have."""
    return [
        argument
        for each in workloads(objects, component)
        for argument in each.args
        if argument.lstrip("-").partition("=")[0] not in known
    ]


@pytest.mark.parametrize("name", EXAMPLES)
def test_mooncake_and_etcd_have_the_flags(name: str) -> None:
    master, etcd = flags_of(find_master().path, "--helpfull"), flags_of(find_etcd().path, "--help")
    objects = render(changed(changed(example(name), "etcd.tlsSecret", ""), "etcd.serverTlsSecret", ""))
    assert unknown_flags(objects, "master", master) == []
    assert unknown_flags(objects, "etcd", etcd) == []


def test_etcd_with_tls_has_its_flags_and_a_flag_that_is_none_is_found() -> None:
    values = example("laptop-cpu")
    for path, value in (("etcd.tlsSecret", "client"), ("etcd.serverTlsSecret", "server")):
        values = changed(values, path, value)
    objects = render(values)
    known = flags_of(find_etcd().path, "--help")
    assert workloads(objects, "etcd")[0].flag("peer-key-file")
    assert unknown_flags(objects, "etcd", known) == []
    assert violations(objects) == []
    workloads(objects, "etcd")[0].container["args"].append("--quota=1")
    assert unknown_flags(objects, "etcd", known) == ["--quota=1"]


def test_the_names_of_etcds_members_are_in_each_ones_list() -> None:
    values = changed(changed(example("laptop-cpu"), "etcd.replicas", 3), "etcd.storage.ephemeral", False)
    objects = render(values)
    (etcd,) = workloads(objects, "etcd")
    members = dict(pair.split("=", 1) for pair in (etcd.flag("initial-cluster") or "").split(","))
    assert list(members) == [f"{etcd.name}-{index}" for index in range(3)]
    for member, url in members.items():
        assert url == (etcd.flag("initial-advertise-peer-urls") or "").replace("$(POD_NAME)", member)
    router = config_of(workloads(objects, "router")[0])
    assert router.etcd.endpoints == [f"{member}.{etcd.name}.{NAMESPACE}.svc:2379" for member in members]
    assert violations(objects) == []


def test_the_rules_and_dashboards_are_those_of_the_repository() -> None:
    (rule,) = of_kind(rendered("k3-b300"), "PrometheusRule")
    wanted = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    assert wanted
    assert rule["spec"]["groups"] == wanted
    (boards,) = [
        each
        for each in of_kind(rendered("k3-b300"), "ConfigMap")
        if each["metadata"]["name"].endswith("boards")
    ]
    dashboards = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
    assert sorted(boards["data"]) == [path.name for path in dashboards] != []
    for path in dashboards:
        assert boards["data"][path.name].rstrip() == path.read_text(encoding="utf-8").rstrip()


def test_the_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    """The links to rules and dashboards become files in the archive."""
    archive = package(CHART, destination=tmp_path)
    assert render(example("k3-b300"), chart=Path(archive)) == rendered("k3-b300")


def test_a_long_release_name_stays_within_what_a_name_may_be() -> None:
    assert violations(render(example("h200x8"), name=f"{RELEASE}-" + "x" * 50)) == []
