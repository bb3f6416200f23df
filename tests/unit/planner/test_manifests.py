# SPDX-License-Identifier: Apache-2.0
"""The KubeRay manifests: pods that Kubernetes takes, and roles where the configuration puts them."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deltaserve.cli.options import load
from deploy.ray.__main__ import COMMAND, parser
from deploy.ray.actors import DRAIN_MARGIN
from deploy.ray.config import RayConfig, resource

ROOT = Path(__file__).parents[3] / "deploy"
VERSIONS = ("1.33", "1.35", "1.37")


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a manifest file."""
    return [each for each in yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8")) if each]


RAY_CLUSTER = documents("ray/kuberay/raycluster.yaml")[0]
RAY_OTHERS = documents("ray/kuberay/deltaserve.yaml")
GROUPS = {group["groupName"]: group for group in RAY_CLUSTER["spec"]["workerGroupSpecs"]}
TEMPLATES = {
    "control": RAY_CLUSTER["spec"]["headGroupSpec"]["template"],
    **{name: group["template"] for name, group in GROUPS.items()},
}


def pod_template(template: dict[str, Any]) -> dict[str, Any]:
    """A template as an object of its own, which is what Kubernetes' schemas know."""
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_and_every_pod_is_valid(version: str) -> None:
    objects = [each for each in RAY_OTHERS if "ray.io" not in each["apiVersion"]]
    objects += [pod_template(template) for template in TEMPLATES.values()]
    assert len(objects) == 6
    for each in objects:
        kubernetes_validate.validate(each, version, strict=True)
    broken = pod_template(copy.deepcopy(TEMPLATES["decode"]))
    broken["template"]["spec"]["containers"][0]["comand"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, version, strict=True)


def resources_of(start: dict[str, str]) -> dict[str, float]:
    """What a node of the group offers; KubeRay passes the quoted JSON on to `ray start`."""
    offered: dict[str, float] = json.loads(json.loads(start["resources"]))
    offered["CPU"] = float(start["num-cpus"])
    offered["GPU"] = float(start.get("num-gpus", 0))
    return offered


def test_each_group_holds_just_what_its_role_takes() -> None:
    config = started()
    starts = {name: group["rayStartParams"] for name, group in GROUPS.items()}
    starts["control"] = RAY_CLUSTER["spec"]["headGroupSpec"]["rayStartParams"]
    for kind in ("control", "prefill", "decode"):
        taken = config.bundle(kind)  # type: ignore[arg-type]
        offered = resources_of(starts[kind])
        assert all(offered.get(name, 0) >= amount for name, amount in taken.items()), kind
        others = {"control", "prefill", "decode"} - {kind}
        assert not any(resource(other) in offered for other in others), "one role a pod"


def started() -> RayConfig:
    """The configuration that the job's entry point gives."""
    job = next(each for each in RAY_OTHERS if each["kind"] == "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:4] == ["python", "-m", "deploy.ray", "up"]
    return load(RayConfig, COMMAND, parser().parse_args(words[3:]), {})


def test_the_job_fits_the_cluster_and_the_service() -> None:
    config = started()
    assert (config.device, config.prefill, config.decode) == ("cuda", 1, 1)
    assert GROUPS["prefill"]["maxReplicas"] <= config.highest
    service = next(each for each in RAY_OTHERS if each["kind"] == "Service")
    assert [port["port"] for port in service["spec"]["ports"]] == [config.port]
    mounts = TEMPLATES["decode"]["spec"]["containers"][0]["volumeMounts"]
    assert str(config.model) in [mount["mountPath"] for mount in mounts]
    for name in GROUPS:
        grace = TEMPLATES[name]["spec"]["terminationGracePeriodSeconds"]
        assert grace >= config.drain_seconds + DRAIN_MARGIN, "a deleted pod's worker has time to drain"


def test_only_the_routers_port_is_open() -> None:
    policies = [each["spec"] for each in RAY_OTHERS if each["kind"] == "NetworkPolicy"]
    for policy in policies:
        for rule in policy["ingress"]:
            anybody = "from" not in rule
            assert not anybody or [port["port"] for port in rule["ports"]] == [started().port]
