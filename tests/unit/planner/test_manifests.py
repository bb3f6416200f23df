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


def unknown_fields(value: Any, known: Any, at: str = "spec") -> list[str]:
    """Paths that `known` does not have, and types that are not its own; None stands for anything."""
    if known is None:
        return []
    if isinstance(known, list):
        inner = known[0]
        return [line for i, each in enumerate(value) for line in unknown_fields(each, inner, f"{at}[{i}]")]
    if isinstance(known, dict):
        if not isinstance(value, dict):
            return [f"{at}: {value!r} is no object"]
        found = [f"{at}.{key}: unknown" for key in value if key not in known and str not in known]
        return found + [
            line
            for key, each in value.items()
            for line in unknown_fields(each, known.get(key, known.get(str)), f"{at}.{key}")
        ]
    return [] if type(value) is known else [f"{at}: {value!r} is no {known.__name__}"]


START_PARAMS = {str: str}
"""rayStartParams is a map of strings to strings: a number without quotes is refused."""
HEAD_GROUP: dict[str, Any] = {
    "serviceType": str,
    "headService": None,
    "enableIngress": bool,
    "rayStartParams": START_PARAMS,
    "template": None,  # a pod template: checked against Kubernetes' own schema above
}
WORKER_GROUP: dict[str, Any] = {
    "groupName": str,
    "replicas": int,
    "minReplicas": int,
    "maxReplicas": int,
    "numOfHosts": int,
    "rayStartParams": START_PARAMS,
    "template": None,
    "scaleStrategy": {"workersToDelete": [str]},
}
RAY_KINDS: dict[str, dict[str, Any]] = {
    # The fields of KubeRay's v1 resources (ray-operator 1.1 and later); no package has their schemas.
    "RayCluster": {
        "rayVersion": str,
        "suspend": bool,
        "enableInTreeAutoscaling": bool,
        "headServiceAnnotations": {str: str},
        "autoscalerOptions": {
            "resources": None,
            "image": str,
            "imagePullPolicy": str,
            "idleTimeoutSeconds": int,
            "upscalingMode": str,
            "env": None,
            "envFrom": None,
            "volumeMounts": None,
            "securityContext": None,
        },
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": [WORKER_GROUP],
    },
    "RayJob": {
        "entrypoint": str,
        "entrypointNumCpus": int,
        "entrypointNumGpus": int,
        "entrypointResources": str,
        "clusterSelector": {str: str},
        "rayClusterSpec": None,
        "submissionMode": str,
        "submitterPodTemplate": None,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "runtimeEnvYAML": str,
        "metadata": {str: str},
        "suspend": bool,
    },
}
NEEDED = {
    "RayCluster": ("headGroupSpec.rayStartParams", "headGroupSpec.template"),
    "RayJob": ("entrypoint", "clusterSelector"),
}


def ray_faults(each: dict[str, Any]) -> list[str]:
    """What KubeRay's API would refuse, or drop without a word."""
    kind, spec = each["kind"], each["spec"]
    found = unknown_fields(spec, RAY_KINDS[kind])
    if each["apiVersion"] != "ray.io/v1":
        found.append(f"apiVersion {each['apiVersion']}")
    for path in NEEDED[kind]:
        holder: Any = spec
        for key in path.split("."):
            holder = holder.get(key) if isinstance(holder, dict) else None
        if holder is None:
            found.append(f"spec.{path}: missing")
    for group in spec.get("workerGroupSpecs", []):
        found += [
            f"{group.get('groupName')}: {key} is missing"
            for key in ("groupName", "minReplicas", "maxReplicas", "rayStartParams", "template")
            if key not in group
        ]
        if not group.get("minReplicas", 0) <= group.get("replicas", 0) <= group.get("maxReplicas", 0):
            found.append(f"{group.get('groupName')}: replicas out of bounds")
    return found


def test_rays_own_objects_have_the_fields_that_kuberay_knows() -> None:
    custom = [RAY_CLUSTER, *(each for each in RAY_OTHERS if "ray.io" in each["apiVersion"])]
    assert [each["kind"] for each in custom] == ["RayCluster", "RayJob"]
    assert [line for each in custom for line in ray_faults(each)] == []
    broken = copy.deepcopy(RAY_CLUSTER)
    prefill, decode = broken["spec"]["workerGroupSpecs"]
    prefill["rayStartParams"]["num-cpus"] = 8
    prefill["replica"] = 1
    decode["replicas"] = 9
    del decode["template"]
    broken["spec"]["autoscalerOptions"]["idleTimeoutSeconds"] = "60"
    said = " ".join(ray_faults(broken))
    for expected in (
        *("num-cpus: 8 is no str", "[0].replica: unknown", "decode: template is missing"),
        *("decode: replicas out of bounds", "idleTimeoutSeconds: '60' is no int"),
    ):
        assert expected in said


def test_rays_autoscaler_reads_the_groups_as_they_are_meant() -> None:
    """Ray's own reader of the object, which runs beside the head: what it sees is what it scales."""
    reader = pytest.importorskip("ray.autoscaler._private.kuberay.autoscaling_config")

    def types(cluster: dict[str, Any]) -> dict[str, Any]:
        named = {**cluster, "metadata": {**cluster["metadata"], "namespace": "serving"}}
        config = reader._derive_autoscaling_config_from_ray_cr(named)
        assert config["idle_timeout_minutes"] == 1.0
        found: dict[str, Any] = config["available_node_types"]
        return found

    seen = types(RAY_CLUSTER)
    assert set(seen) == {"headgroup", "prefill", "decode"}
    for role, group in GROUPS.items():
        assert (seen[role]["min_workers"], seen[role]["max_workers"]) == (1, group["maxReplicas"])
        taken = started().bundle(role)  # type: ignore[arg-type]
        assert all(seen[role]["resources"].get(name, 0) >= amount for name, amount in taken.items()), role
    assert seen["headgroup"]["resources"][resource("control")] == 1
    unquoted = copy.deepcopy(RAY_CLUSTER)
    unquoted["spec"]["workerGroupSpecs"][0]["rayStartParams"]["resources"] = '{"deltaserve_prefill": 1}'
    with pytest.raises(json.JSONDecodeError):
        types(unquoted)


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
