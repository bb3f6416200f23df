# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused before anything is installed, with a message that names it."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import Chart
from helm_python.errors import HelmError

from deltaserve.cli.options import options_of
from deltaserve.config import RouterConfig, WorkerConfig
from deploy.helm import schema
from tests.unit.deploy.invariants import config_of, violations
from tests.unit.deploy.rendering import CHART, changed, example, render, workloads

REMOVE = object()
PREFILL, DECODE = "versions.0.pools.0", "versions.0.pools.1"


def without(values: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy without one entry."""
    *outer, last = path.split(".")
    result = changed(values, path, None)
    holder: Any = result
    for key in outer:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    del holder[last]
    return result


REFUSED = [
    # what the schema says
    ("versions", [], "minItems"),
    ("model.path", "", "/model/path"),
    ("model.heads", 0, "/model/heads"),
    ("model.pth", "/models", "additional properties 'pth' not allowed"),
    ("models", {}, "additional properties 'models' not allowed"),
    (f"{DECODE}.dcp", 3, f"/{DECODE.replace('.', '/')}/dcp"),
    (f"{PREFILL}.dcp", 2, f"/{PREFILL.replace('.', '/')}/dcp"),
    (f"{DECODE}.tp", REMOVE, "missing property 'tp'"),
    (f"{DECODE}.kvCacheBytes", REMOVE, "missing property 'kvCacheBytes'"),
    (f"{DECODE}.tpp", 8, "additional properties 'tpp' not allowed"),
    (f"{DECODE}.role", "deocde", "/role"),
    (f"{DECODE}.device", "rocm", "/device"),
    (f"{DECODE}.replicas", -1, "/replicas"),
    (
        f"{DECODE}.options",
        {"prefix_match_units": 1},
        "additional properties 'prefix_match_units' not allowed",
    ),
    (f"{DECODE}.options", {"checkpoint_tokens": -1}, "/checkpoint_tokens"),
    (f"{DECODE}.options", {"kv_cache_bytes": 1}, "additional properties 'kv_cache_bytes' not allowed"),
    (f"{DECODE}.options", {"damage": "flip"}, "additional properties 'damage' not allowed"),
    ("router.options", {"placement": "everywhere"}, "/placement"),
    ("router.options", {"port": 9}, "additional properties 'port' not allowed"),
    (f"{DECODE}.autoscaling", {"enabled": True, "minReplicas": 1, "maxReplicas": 2}, "metrics"),
    ("versions.0.name", "a_b", "/name"),
    ("etcd.replicas", 2, "/etcd/replicas"),
    ("etcd.endpoints", ["http://etcd:2379"], "/etcd/endpoints"),
    ("router.service.type", "Loadbalancer", "/type"),
    ("worker.shmSize", "8 GB", "/shmSize"),
    ("images.cuda.digest", "sha256:abc", "/digest"),
    ("podSecurity.runAsUser", 0, "/runAsUser"),
    # what only the templates can see
    (f"{PREFILL}.tp", 5, "pools[prefill]: tp 5 does not divide the model's 96 heads; choose a divisor"),
    (f"{DECODE}.dcp", 1, "pools[decode]: dcpInterleave without dcp"),
    ("model.mountPath", "", "model.volume needs model.mountPath"),
    ("model.path", "/elsewhere/k3", "is not below model.mountPath"),
    ("router.serve", "b", 'there is no version "b"'),
    (f"{DECODE}.name", "prefill", "two pools have this name"),
    (f"{DECODE}.replicas", 0, "routers but no decode worker"),
    (f"{DECODE}.rdma", {"devices": "mlx5_0"}, "rdma without resources"),
    (
        f"{DECODE}.autoscaling",
        {"enabled": True, "minReplicas": 3, "maxReplicas": 2, "metrics": [{"type": "External"}]},
        "maxReplicas 2 is less than minReplicas 3",
    ),
    ("master.etcdEndpoints", [], "Mooncake speaks neither TLS nor passwords"),
    ("etcd.bundled", True, "bundled and endpoints exclude each other"),
    ("etcd.endpoints", [], "bundled is false and endpoints is empty"),
    ("router.ingress.enabled", True, "router.ingress: needs a host"),
    ("router.httpRoute.parentRefs", [], "router.httpRoute: needs parentRefs"),
]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    REFUSED,
    ids=[f"{p}={'removed' if v is REMOVE else repr(v)[:40]}" for p, v, _ in REFUSED],
)
def test_what_cannot_work_is_refused(path: str, value: Any, expected: str) -> None:
    values = example("k3-b300")
    values = without(values, path) if value is REMOVE else changed(values, path, value)
    with pytest.raises(HelmError) as refusal:
        render(values)
    assert expected in str(refusal.value)


def test_a_tp_beyond_what_the_schema_knows_is_refused_by_the_templates() -> None:
    values = changed(changed(example("k3-b300"), f"{DECODE}.tp", 32), f"{DECODE}.dcp", 12)
    with pytest.raises(HelmError, match="dcp 12 does not divide tp 32; choose a divisor"):
        render(values)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"etcd.bundled": True, "etcd.endpoints": []}, "tlsSecret without serverTlsSecret"),
        ({"etcd.tlsSecret": "", "etcd.serverTlsSecret": "x"}, "serverTlsSecret without tlsSecret"),
        (
            {"etcd": {"storage": {"ephemeral": True}}, "master.etcdEndpoints": []},
            "storage.ephemeral with several replicas",
        ),
    ],
)
def test_combinations_that_cannot_work_are_refused(changes: dict[str, Any], expected: str) -> None:
    values = example("k3-b300")
    for path, value in changes.items():
        values = changed(values, path, value)
    with pytest.raises(HelmError, match=expected):
        render(values)


def test_two_versions_of_one_name_are_refused() -> None:
    values = example("k3-b300")
    values["versions"] *= 2
    with pytest.raises(HelmError, match="two versions have this name"):
        render(values)


def test_the_chart_alone_asks_for_a_model() -> None:
    with pytest.raises(HelmError, match="minItems"):
        render({})


def test_without_the_schema_the_templates_still_refuse_a_missing_model() -> None:
    with Chart.load(CHART) as chart:
        defaults = chart.values
    assert defaults["versions"] == []
    assert defaults["model"]["path"] == ""
    assert defaults["model"]["heads"] == 0


# ---- options


def test_every_option_of_the_schema_is_one_of_deltaserve() -> None:
    definitions = schema.json.loads(schema.PATH.read_text(encoding="utf-8"))["$defs"]
    for name, model, command in (
        ("workerOptions", WorkerConfig, "decode"),
        ("routerOptions", RouterConfig, "router"),
    ):
        known = {"_".join(option.path) for option in options_of(model, command)}
        unknown = set(definitions[name]["properties"]) - known
        assert not unknown, f"{name}: {sorted(unknown)} are no options; run python -m deploy.helm.schema"


def test_what_is_written_by_hand_in_the_schema_is_what_the_file_has() -> None:
    """All but the options, which other changes add to: the file may be behind there, never wrong (see above)."""
    file = schema.json.loads(schema.PATH.read_text(encoding="utf-8"))
    made = schema.values_schema()
    for document in (file, made):
        for name in ("workerOptions", "routerOptions"):
            del document["$defs"][name]
    assert file == made, "run python -m deploy.helm.schema"


def test_options_reach_the_process() -> None:
    values = changed(example("laptop-cpu"), "router.options", {"placement": "handover", "worker_wait": 1.5})
    options = {
        "checkpoint_tokens": 1024,
        "checkpoint_bytes": 68719476736,
        "prefix_match_unit": 32,
        "dtype": "float32",
    }
    values = changed(values, f"{DECODE}.options", options)
    values = changed(
        values, f"{DECODE}.engineArgs", {"kv_cache_dtype": "fp8", "max_logprobs": 5, "o": {"a": [1.5]}}
    )
    objects = render(values)
    router = config_of(workloads(objects, "router")[0])
    decode = config_of(workloads(objects, "decode")[0])
    assert (router.placement, router.worker_wait) == ("handover", 1.5)
    assert {name: getattr(decode, name) for name in options} == options
    assert decode.extra_args == {"kv_cache_dtype": "fp8", "max_logprobs": 5, "o": {"a": [1.5]}}
    assert violations(objects) == []


def test_values_reach_the_process_exactly() -> None:
    """Helm keeps numbers as floats: large ones must not come out as 6.87e+10."""
    pool = example("k3-b300")["versions"][0]["pools"][1]
    decode = config_of(workloads(render(example("k3-b300")), "decode")[0])
    assert decode.kv_cache_bytes == pool["kvCacheBytes"]
    assert decode.store.segment_bytes == pool["segmentBytes"]
    assert decode.max_model_len == example("k3-b300")["model"]["maxLen"]
    assert (decode.dcp, decode.dcp_interleave) == (pool["dcp"], pool["dcpInterleave"])
    assert decode.store.rdma_devices == pool["rdma"]["devices"]
