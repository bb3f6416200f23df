# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (lines of the chart are as long as they are there)
"""Negative controls: a chart that is broken in one place, and the check that must say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deploy.invariants import require_caught, violations
from tests.unit.deploy.rendering import example, mutated_chart, of_kind, render, rendered

ROUTER, POOLS, ETCD = "templates/router.yaml", "templates/pools.yaml", "templates/etcd.yaml"
POD, HELPERS, NETWORK = "templates/_pod.tpl", "templates/_helpers.tpl", "templates/networkpolicy.yaml"
MASTER, PDB, MONITORING = "templates/master.yaml", "templates/pdb.yaml", "templates/monitoring.yaml"

BROKEN = [
    # command lines
    (POOLS, "- --tp={{ $tp }}", "- --tensor-parallel={{ $tp }}", "a flag that this command does not have"),
    (POOLS, "--max-num-seqs={{ int64 $pool.maxNumSeqs }}", "--max-num-seqs=0", "--max-num-seqs"),
    (POOLS, "--kv-cache-bytes={{ int64 $pool", "--kv-cache-bytes={{ $pool", "--kv-cache-bytes"),
    (POOLS, "--host=0.0.0.0", "--host=127.0.0.1", "where nobody reaches it"),
    (POOLS, "--advertise=$(POD_IP):", "--advertise=127.0.0.1:", "would not find it"),
    (POOLS, "--store-hostname=$(POD_IP)", "--store-hostname=localhost", "would not find it"),
    (POOLS, 'default "nvidia.com/gpu" $pool.gpuResource) $tp', 'default "nvidia.com/gpu" $pool.gpuResource) 1', "GPUs for tp"),
    (POOLS, "{name: MC_STORE_CLUSTER_ID", "{name: MC_STORE_CLUSTER", "do not go together"),
    (POOLS, '"deltaserve.etcd.env" (list $root $pool.role)', '"deltaserve.etcd.env" (list $root "worker")', "is no option"),
    ("values.yaml", "putReleaseSeconds: 180", "putReleaseSeconds: 120", "may write for 180 s, the masters take room back after 120"),
    (MASTER, "--eviction_ratio=0", "--eviction_ratio=0.05", "tries to evict what is pinned"),
    (POD, "enableServiceLinks: false", "enableServiceLinks: true", "service links"),
    # life of a pod
    (POOLS, "path: /ready", "path: /alive", "alive and ready are the same question"),
    (ROUTER, "httpGet: {path: /version", "httpGet: {path: /health", "depends on other pods"),
    (ETCD, "livenessProbe:\n            tcpSocket: {port: metrics}", "livenessProbe:\n            httpGet: {path: /health, port: metrics}", "depends on other pods"),
    (MASTER, "readinessProbe:", "readinessProbee:", "has no readinessProbe"),
    (POOLS, "{path: /alive, port: metrics}", "{path: /alive, port: http}", "asks port http"),
    (HELPERS, '{{- add (include "deltaserve.longestRequest" . | int) (int .Values.drain.marginSeconds) -}}', "60", "is killed after 60 s"),
    (HELPERS, "{{- int .Values.router.requestTimeout -}}", "25", "the longest request takes 1800 s"),
    (POOLS, "preStop:", "postStart:", "does not drain before it stops"),
    (ROUTER, "127.0.0.1:{{ $router.port }}/health", "127.0.0.1:80/health", "which is not itself"),
    (POOLS, 'deltaserve drain "$POD_IP:{{ $worker.grpcPort }}"', 'deltaserve drain "$POD_IP:9100"', "which is not itself"),
    (POOLS, "deltaserve drain", "deltaserve leave", "preStop"),
    (POOLS, "--wait={{", "--patience={{", "preStop: drain: a flag"),
    ("templates/_args.tpl", '_ETCD_PREFIX, value: {{ include "deltaserve.prefix" $where | quote }}', "_ETCD_PREFIX, value: /deltaserve/default", "speaks to another etcd"),
    (PDB, "maxUnavailable: 1", "minAvailable: 1", "not one pod at a time"),
    (PDB, '"app.kubernetes.io/component" "master"', '"app.kubernetes.io/component" "store"', "0 disruption budgets"),
    # who finds whom
    (POOLS, "targetPort: metrics}", "targetPort: http}", "is no port of"),
    ("templates/router-service.yaml", "app.kubernetes.io/component: router\n    {{- if", "app.kubernetes.io/component: front\n    {{- if", "has no pods"),
    (MONITORING, '"name" "worker" "port" "metrics"', '"name" "worker" "port" "stats"', "has no port stats"),
    (MONITORING, "jobLabel: app.kubernetes.io/name", "jobLabel: app.kubernetes.io/component", "its job is not called"),
    (MONITORING, '(list "prefill" "decode")', '(list "prefill")', "scraped 0 times"),
    # the network: Mooncake's data ports above all
    (NETWORK, '    - from: {{- include "deltaserve.peers" (list . (list "prefill" "decode" "master")) | nindent 8 }}', "    - {}", "a pod of this namespace reaches any of"),
    (NETWORK, '(list . (list "prefill" "decode" "master")) | nindent 8 }}\n    - ports: [{port: grpc', '(list . (list "router" "prefill" "decode" "master")) | nindent 8 }}\n    - ports: [{port: grpc', "router reaches any of"),
    (NETWORK, '(list "prefill" "decode" "master")) | nindent 8 }}\n    - ports: [{port: grpc', '(list "decode" "master")) | nindent 8 }}\n    - ports: [{port: grpc', "does not reach any of"),
    (NETWORK, "{port: 53, protocol: UDP}", "{port: 53, protocol: TCP}", "cannot resolve names"),
    (NETWORK, "- ports: [{port: peer, protocol: TCP}]", "- ports: [{port: peer, protocol: TCP}, {port: metrics, protocol: TCP}]", "reaches metrics of"),
    (HELPERS, "matchLabels: {{- include \"deltaserve.instance\" (index . 0) | nindent 6 }}", "matchLabels: {app.kubernetes.io/name: deltaserve}", "reaches"),
    # hardening
    (POD, "runAsNonRoot: true", "runAsNonRoot: false", "may run as root"),
    (POD, "capabilities: {drop: [ALL]}", "capabilities: {drop: [NET_RAW]}", "keeps capabilities"),
    (POD, "readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "root file system"),
    (POD, "automountServiceAccountToken: false", "automountServiceAccountToken: true", "token of Kubernetes"),
    (POD, "seccompProfile: {type: RuntimeDefault}", "seccompProfile: {type: Unconfined}", "seccomp"),
    ("values.yaml", 'cpu: {repository: deltaserve/cpu, tag: "0.1.0"', 'cpu: {repository: deltaserve/cpu, tag: "latest"', "is not pinned"),
    (POOLS, "medium: Memory, sizeLimit: {{ $worker.shmSize }}", "medium: Memory, sizeLimit: 1Ti", "are left of its memory"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    BROKEN,
    ids=[f"{each[0].split('/')[-1]}: {each[3]}" for each in BROKEN],
)
def test_a_broken_chart_is_found(tmp_path: Path, file: str, old: str, new: str, expected: str) -> None:
    chart = mutated_chart(tmp_path, file, old, new)
    # Of the two, the one that has what was broken: a bundled etcd, or TLS, passwords and DCP.
    name = "h200x8" if file in (ETCD, "templates/router-service.yaml") or "peer" in old else "k3-b300"
    require_caught(render(example(name), chart=chart), expected)


def test_versions_that_share_a_prefix_are_found(tmp_path: Path) -> None:
    from tests.unit.deploy.test_chart_versions import two_versions

    chart = mutated_chart(
        tmp_path,
        HELPERS,
        "$version.name (toJson $parts | sha256sum | trunc 8) -}}",
        '"x" "y" -}}',
    )
    require_caught(render(two_versions(), chart=chart), "two versions share a prefix")


def test_pods_of_a_version_that_are_apart_are_found() -> None:
    objects = rendered("h200x8")
    text = "--etcd-prefix="
    for each in of_kind(objects, "Deployment"):
        if each["metadata"]["name"].endswith("decode"):
            arguments = each["spec"]["template"]["spec"]["containers"][0]["args"]
            arguments[:] = [f"{a}x" if a.startswith(text) else a for a in arguments]
    require_caught(objects, "its pods are in 2 clusters")


@pytest.mark.parametrize(
    ("kind", "damage", "expected"),
    [
        ("Service", lambda each: each["spec"]["selector"].update({"x": "y"}), "has no pods"),
        ("Deployment", lambda each: each["spec"]["selector"]["matchLabels"].clear(), "its selector chooses"),
        (
            "ServiceMonitor",
            lambda each: each["spec"]["selector"]["matchLabels"].update(x="y"),
            "chooses no Service",
        ),
        ("PrometheusRule", lambda each: each["spec"].update(groups=[]), "has no rules"),
        ("NetworkPolicy", lambda each: each["metadata"].update(name="x" * 64), "longer than 63"),
    ],
)
def test_damaged_objects_are_found(kind: str, damage: object, expected: str) -> None:
    objects = rendered("h200x8")
    assert callable(damage)
    for each in of_kind(objects, kind):
        damage(each)
    require_caught(objects, expected)


def test_a_secret_or_a_password_in_plain_sight_is_found() -> None:
    objects = rendered("k3-b300")
    assert violations(objects) == []
    objects.append({"kind": "Secret", "metadata": {"name": "keys"}})
    require_caught(objects, "made out of values")
    worker = next(
        each for each in of_kind(objects, "Deployment") if each["metadata"]["name"].endswith("decode")
    )
    container = worker["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "DELTASERVE_DECODE_ETCD_PASSWORD", "value": "hunter2"})
    require_caught(objects, "is in plain sight")
    container["args"].append("--etcd-password=hunter2")
    require_caught(objects, "a password is in its command line")


def test_the_same_object_twice_is_found() -> None:
    objects = rendered("h200x8")
    require_caught([*objects, objects[0]], "is there twice")
