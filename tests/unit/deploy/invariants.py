# SPDX-License-Identifier: Apache-2.0
"""What must hold for every rendering of the chart. Each check yields one line for each thing that is wrong."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from deltaserve.cli.main import COMMANDS, build_parser
from deltaserve.cli.options import OptionError, load, options_of
from deploy.planner.targets import Gauges
from tests.unit.deploy.network import Pod, reaches
from tests.unit.deploy.rendering import NAMESPACE, Object, Workload, of_kind, selects, workloads

Check = Callable[[list[Object]], Iterator[str]]


def exported(label: str) -> set[str]:
    """Names under which the planner really exports series with this label, read from its own page of metrics."""
    registry = CollectorRegistry()
    gauges = Gauges(registry)
    gauges.set("prefill", 3)
    page = generate_latest(registry).decode()
    return {
        sample.name
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if label in sample.labels
    }


POD_IP = "10.1.2.3"
EXPORTED = exported("role")
"""Names of the planner's own metrics that say something of a role."""
ANY_PORT = 15428
"""A port that a Mooncake client may have chosen."""


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()


@functools.cache
def _parse(argv: tuple[str, ...], variables: frozenset[tuple[str, str]]) -> BaseModel:
    try:
        namespace = _parser().parse_args(argv)
    except SystemExit as error:  # argparse has printed why
        raise OptionError(f"{argv[0]}: a flag that this command does not have") from error
    command = next(each for each in COMMANDS if each.name == namespace.command)
    return load(command.model, command.name, namespace, dict(variables), command.fixed)


def parse(argv: list[str], environ: dict[str, str]) -> BaseModel:
    """A command line of the chart through the parser of `deltaserve`. Raises OptionError with its words."""
    return _parse(tuple(argv), frozenset(environ.items()))


def environ_of(workload: Workload) -> dict[str, str]:
    """The variables of a container as its process sees them; values out of Secrets and fields made up."""
    return {
        name: str(each.get("value", POD_IP if name == "POD_IP" else "made-up"))
        for name, each in workload.env.items()
    }


def config_of(workload: Workload) -> Any:
    """The configuration that a router or worker of the chart runs with."""
    argv = [argument.replace("$(POD_IP)", POD_IP) for argument in workload.args]
    return parse(argv, environ_of(workload))


def deltaserves(objects: list[Object]) -> list[Workload]:
    """The workloads that run `deltaserve`."""
    return workloads(objects, "router", "prefill", "decode")


# ---- command lines


def command_lines(objects: list[Object]) -> Iterator[str]:
    """Every command line and environment is one that `deltaserve` takes, and means what the objects say."""
    for workload in (*deltaserves(objects), *workloads(objects, "planner")):
        if "command" in workload.container:
            yield f"{workload.name}: command replaces the image's entrypoint"
        if workload.pod.get("enableServiceLinks", True):
            yield f"{workload.name}: service links would put DELTASERVE_ variables in that are no options"
        try:
            config = config_of(workload)
        except OptionError as error:
            yield f"{workload.name}: {error}"
            continue
        if config.host != "0.0.0.0":
            yield f"{workload.name}: listens on {config.host}, where nobody reaches it"
        if config.port not in workload.ports.values():
            yield f"{workload.name}: listens on {config.port}, which is no port of the container"
        if workload.component in ("router", "planner"):
            continue
        if workload.component != config.role:
            yield f"{workload.name}: runs {config.role}"
        if config.advertise != f"{POD_IP}:{config.port}" or config.store.hostname != POD_IP:
            yield f"{workload.name}: others would not find it at {config.advertise} and {config.store.hostname}"
        if config.metrics_port != workload.ports.get("metrics"):
            yield f"{workload.name}: metrics are at {config.metrics_port}, not where the container says"
        limits = workload.container["resources"].get("limits", {})
        if config.device == "cuda" and limits.get("nvidia.com/gpu") != config.tp:
            yield f"{workload.name}: {limits.get('nvidia.com/gpu')} GPUs for tp {config.tp}"
        if config.store.protocol == "rdma" and not any(name.startswith("rdma/") for name in limits):
            yield f"{workload.name}: RDMA without a device"
        ha = config.store.master.startswith("etcd://")
        if ha != ("MC_STORE_CLUSTER_ID" in workload.env):
            yield f"{workload.name}: the cluster id of the masters and their address do not go together"


def patience_of_the_store(objects: list[Object]) -> Iterator[str]:
    """Masters do not take back room that a worker may still be writing into."""
    release = max(
        int(argument.partition("=")[2])
        for master in workloads(objects, "master")
        for argument in master.container["args"]
        if argument.startswith("--put_start_release_timeout_sec=")
    )
    for master in workloads(objects, "master"):
        if not {"--eviction_ratio=0", "--eviction_high_watermark_ratio=1"} <= set(master.container["args"]):
            yield f"{master.name}: tries to evict what is pinned, and then does not take room back"
    for workload in deltaserves(objects):
        config = config_of(workload)
        if workload.component != "router" and config.longest_put > release:
            yield f"{workload.name}: may write for {config.longest_put:g} s, the masters take room back after {release}"


def options_known(objects: list[Object]) -> Iterator[str]:
    """The variables of all commands are options of them."""
    known = {option.env for command in COMMANDS for option in options_of(command.model, command.name)}
    for workload in deltaserves(objects):
        for name in workload.env:
            if name.startswith("DELTASERVE_") and name not in known:
                yield f"{workload.name}: {name} is no option"


def administration(objects: list[Object]) -> Iterator[str]:
    """Commands that somebody runs inside a pod see the cluster that the pod is in, without flags."""
    for workload in deltaserves(objects):
        listing: Any = parse(["boundaries"], environ_of(workload))
        if listing.etcd != config_of(workload).etcd:
            yield f"{workload.name}: `deltaserve boundaries` looks into another etcd or prefix"


# ---- life of a pod


def probes(objects: list[Object]) -> Iterator[str]:
    """Every container tells started, alive and ready apart; alive hangs on nothing outside the pod."""
    for workload in workloads(objects):
        container = workload.container
        missing = [p for p in ("startupProbe", "livenessProbe", "readinessProbe") if p not in container]
        if missing:
            yield f"{workload.name}: has no {' and no '.join(missing)}"
            continue
        alive, ready = (_target(container[f"{kind}nessProbe"]) for kind in ("live", "readi"))
        if alive == ready:
            yield f"{workload.name}: alive and ready are the same question, {alive}"
        if alive[-1] in ("/health", "/ready"):
            yield f"{workload.name}: {alive[-1]} depends on other pods; asking it for life restarts what is well"
        for kind in ("startup", "liveness", "readiness"):
            port = _target(container[f"{kind}Probe"])[1]
            if port not in workload.ports and port not in workload.ports.values():
                yield f"{workload.name}: {kind}Probe asks port {port}, which the container does not have"


def _target(probe: Object) -> tuple[str, Any, str]:
    for kind in ("httpGet", "grpc", "tcpSocket"):
        if kind in probe:
            return kind, probe[kind]["port"], str(probe[kind].get("path") or probe[kind].get("service") or "")
    raise AssertionError(probe)


def drain(objects: list[Object]) -> Iterator[str]:
    """A pod that is told to go has the time that the longest request may take, and uses it."""
    routers = workloads(objects, "router")
    longest = max((config_of(each).request_timeout for each in routers), default=0.0)
    for workload in deltaserves(objects):
        grace = workload.pod.get("terminationGracePeriodSeconds", 30)
        hook = workload.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if not hook:
            yield f"{workload.name}: does not drain before it stops"
            continue
        if workload.component == "router":
            *_, url, propagation, limit = hook
            if not url.endswith(f":{config_of(workload).port}/health"):
                yield f"{workload.name}: waits at {url}, which is not itself"
            budget = float(propagation) + float(limit)
            if float(limit) < longest:
                yield f"{workload.name}: waits {limit} s for requests that may take {longest:g} s"
        else:
            config = config_of(workload)
            budget = float(config.drain_seconds)
            if budget < longest:
                yield f"{workload.name}: drains for {budget:g} s, the longest request takes {longest:g} s"
            yield from _drain_command(workload, hook, longest)
        if grace < budget + 10:
            yield f"{workload.name}: is killed after {grace} s, but may need {budget:g} s and some to end"


def _drain_command(workload: Workload, hook: list[str], longest: float) -> Iterator[str]:
    if hook[:2] != ["sh", "-c"]:
        yield f"{workload.name}: the variables of {hook} would not be expanded"
        return
    words = shlex.split(hook[2].replace("$POD_IP", POD_IP))
    if words[:2] != ["exec", "deltaserve"]:
        yield f"{workload.name}: preStop runs {words[:2]}"
        return
    try:
        order: Any = parse(words[2:], environ_of(workload))
    except OptionError as error:
        yield f"{workload.name}: preStop: {error}"
        return
    config = config_of(workload)
    if order.worker != config.advertise:
        yield f"{workload.name}: preStop drains {order.worker}, which is not itself"
    if order.seconds is not None and order.seconds < longest:
        yield f"{workload.name}: preStop gives {order.seconds} s, the longest request takes {longest:g} s"
    if order.etcd != config.etcd:
        yield f"{workload.name}: preStop speaks to another etcd or prefix than the worker"


def budgets(objects: list[Object]) -> Iterator[str]:
    """Every workload has exactly one budget of its own, and each lets a node be emptied one pod at a time."""
    found = list(of_kind(objects, "PodDisruptionBudget"))
    for workload in workloads(objects):
        own = [each for each in found if selects(each["spec"]["selector"], workload.labels)]
        if len(own) != 1:
            yield f"{workload.name}: {len(own)} disruption budgets"
        elif own[0]["spec"].get("maxUnavailable") != 1:
            yield f"{workload.name}: its budget is not one pod at a time: {own[0]['spec']}"


# ---- who finds whom


def services(objects: list[Object]) -> Iterator[str]:
    """Every Service has pods behind it, of one component, and its ports are theirs."""
    everything = workloads(objects)
    for service in of_kind(objects, "Service"):
        name = service["metadata"]["name"]
        behind = [w for w in everything if selects({"matchLabels": service["spec"]["selector"]}, w.labels)]
        if not behind:
            yield f"Service {name}: has no pods"
        if len({workload.component for workload in behind}) > 1:
            yield f"Service {name}: mixes {sorted({w.component for w in behind})}"
        for port in service["spec"]["ports"]:
            for workload in behind:
                if workload.ports.get(port["targetPort"]) != port["port"]:
                    yield f"Service {name}: {port} is no port of {workload.name}"


def selectors(objects: list[Object]) -> Iterator[str]:
    """A workload selects its own pods and no other's."""
    everything = workloads(objects)
    for workload in everything:
        chosen = [w.name for w in everything if selects(workload.object["spec"]["selector"], w.labels)]
        if chosen != [workload.name]:
            yield f"{workload.name}: its selector chooses {chosen}"


def one_prefix_a_version(objects: list[Object]) -> Iterator[str]:
    """Routers and workers of a version share a key prefix; no two versions do."""
    prefixes: dict[str, set[str]] = {}
    for workload in deltaserves(objects):
        prefixes.setdefault(workload.version, set()).add(config_of(workload).etcd.prefix)
    for version, found in prefixes.items():
        if len(found) != 1:
            yield f"version {version}: its pods are in {len(found)} clusters: {sorted(found)}"
    everywhere = [prefix for found in prefixes.values() for prefix in found]
    if len(set(everywhere)) != len(everywhere):
        yield f"two versions share a prefix: {sorted(everywhere)}"


def network(objects: list[Object]) -> Iterator[str]:
    """Only pods of this release reach what has no authentication, and only those who need it."""
    pods = {w.name: (w.component, Pod(w.labels, w.ports)) for w in workloads(objects)}
    outsiders = {
        "a pod of this namespace": Pod({"app": "other"}),
        "another release's worker": Pod(
            {
                "app.kubernetes.io/name": "deltaserve",
                "app.kubernetes.io/instance": "x",
                "app.kubernetes.io/component": "decode",
            }
        ),
        "a pod of another namespace with our labels": Pod(
            next(iter(pods.values()))[1].labels, {}, "elsewhere"
        ),
    }
    worker = ("prefill", "decode")
    for name, (component, pod) in pods.items():
        numbers = {**pod.ports, "any": ANY_PORT}
        for who, outsider in outsiders.items():
            for port, number in numbers.items():
                allowed = component == "router" and port == "http"
                if not allowed and reaches(objects, outsider, pod, number):
                    yield f"{who} reaches {port} of {name}"
        for other, (caller, source) in pods.items():
            for port, number in numbers.items():
                wanted = {
                    "router": port == "http",
                    "prefill": caller in (*worker, "master") or (caller == "router" and port == "grpc"),
                    "decode": caller in (*worker, "master") or (caller == "router" and port == "grpc"),
                    "master": port == "rpc" and caller in (*worker, "master"),
                    "planner": False,
                    "etcd": (port == "client") or (port == "peer" and caller == "etcd"),
                }[component]
                if component == "router" and port == "http":
                    continue  # who may be a client is the operator's to say
                if reaches(objects, source, pod, number) != wanted:
                    yield f"{other} {'does not reach' if wanted else 'reaches'} {port} of {name}"
    dns = Pod({"k8s-app": "kube-dns"}, {}, "kube-system")
    for name, (_, pod) in pods.items():
        if not reaches(objects, pod, dns, 53, "UDP"):
            yield f"{name} cannot resolve names"


def planners(objects: list[Object]) -> Iterator[str]:
    """Each version's planner sees all of its routers, and the pools that follow it ask for the number it exports."""
    behind = list(of_kind(objects, "Service"))
    planned = workloads(objects, "planner")
    for workload in planned:
        config: Any = config_of(workload)
        (url,) = config.routers
        name, _, port = url.removeprefix("dns+http://").partition(":")
        service = next((each for each in behind if each["metadata"]["name"] == name), None)
        if service is None or service["spec"].get("clusterIP") != "None":
            yield f"{workload.name}: {url} is no Service with an address for each router"
            continue
        selector = {"matchLabels": service["spec"]["selector"]}
        routers = [w for w in workloads(objects, "router") if w.version == workload.version]
        if [w.name for w in workloads(objects) if selects(selector, w.labels)] != [w.name for w in routers]:
            yield f"{workload.name}: {url} is not just the routers of version {workload.version}"
        for router in routers:
            if int(port) != router.ports["http"]:
                yield f"{workload.name}: {router.name} does not listen on {port}"
            source, target = (Pod(w.labels, w.ports) for w in (workload, router))
            if not reaches(objects, source, target, router.ports["http"]):
                yield f"{workload.name} does not reach {router.name}"
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        pool = next(w for w in workloads(objects) if w.name == scaler["spec"]["scaleTargetRef"]["name"])
        for metric in scaler["spec"]["metrics"]:
            asked = metric.get("external", {}).get("metric", {})
            if asked.get("name", "").startswith("deltaserve_planner"):
                yield from _follows(objects, scaler, pool, asked)


def _follows(objects: list[Object], scaler: Object, pool: Workload, asked: Object) -> Iterator[str]:
    labels = asked["selector"]["matchLabels"]
    if asked["name"] not in EXPORTED or labels.get("role") != pool.component:
        yield f"{pool.name}: asks for {asked}, which no planner exports for {pool.component}"
    service = next(
        (each for each in of_kind(objects, "Service") if each["metadata"]["name"] == labels.get("service")),
        None,
    )
    sources = [
        w.version
        for w in workloads(objects, "planner")
        if service is not None and selects({"matchLabels": service["spec"]["selector"]}, w.labels)
    ]
    if sources != [pool.version]:
        yield f"{pool.name}: follows the planners of versions {sources}, not its own"
    limits: Any = config_of(next(w for w in workloads(objects, "planner") if w.version == pool.version))
    own = scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]
    if not limits.lowest <= own[0] <= own[1] <= limits.highest:
        yield f"{pool.name}: {own} replicas, but its planner plans {limits.lowest} to {limits.highest}"


def monitors(objects: list[Object]) -> Iterator[str]:
    """Every component is scraped once, at a port that it has; rules and dashboards are not empty."""
    scraped: list[str] = []
    services_ = list(of_kind(objects, "Service"))
    for monitor in of_kind(objects, "ServiceMonitor"):
        name = monitor["metadata"]["name"]
        if "deltaserve" not in {
            s["metadata"]["labels"].get(monitor["spec"].get("jobLabel", "")) for s in services_
        }:
            yield f"ServiceMonitor {name}: its job is not called deltaserve, by which alerts choose"
        chosen = [s for s in services_ if selects(monitor["spec"]["selector"], s["metadata"]["labels"])]
        if not chosen:
            yield f"ServiceMonitor {name}: chooses no Service"
        for service in chosen:
            ports = {port["name"] for port in service["spec"]["ports"]}
            for endpoint in monitor["spec"]["endpoints"]:
                if endpoint["port"] not in ports:
                    yield f"ServiceMonitor {name}: {service['metadata']['name']} has no port {endpoint['port']}"
            selector = {"matchLabels": service["spec"]["selector"]}
            scraped += [w.name for w in workloads(objects) if selects(selector, w.labels)]
    if any(of_kind(objects, "ServiceMonitor")):
        for workload in workloads(objects):
            if scraped.count(workload.name) != 1:
                yield f"{workload.name}: scraped {scraped.count(workload.name)} times"
    for rule in of_kind(objects, "PrometheusRule"):
        if not [each for group in rule["spec"].get("groups") or [] for each in group["rules"]]:
            yield f"PrometheusRule {rule['metadata']['name']}: has no rules"


# ---- hardening


def restricted(objects: list[Object]) -> Iterator[str]:
    """Kubernetes' Pod Security Standard "restricted", and a root file system that nobody writes to."""
    for workload in workloads(objects):
        pod, container = workload.pod, workload.container
        security = container.get("securityContext", {})
        if not pod["securityContext"].get("runAsNonRoot") or pod["securityContext"].get("runAsUser", 0) == 0:
            yield f"{workload.name}: may run as root"
        if pod["securityContext"].get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{workload.name}: has no seccomp profile"
        if security.get("allowPrivilegeEscalation", True) or security.get("privileged"):
            yield f"{workload.name}: may gain privileges"
        if security.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{workload.name}: keeps capabilities"
        if not security.get("readOnlyRootFilesystem"):
            yield f"{workload.name}: may write to its root file system"
        if pod.get("automountServiceAccountToken", True):
            yield f"{workload.name}: has a token of Kubernetes'"
        if any(pod.get(each) for each in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{workload.name}: shares a namespace with its node"
        allowed = {
            "configMap",
            "emptyDir",
            "persistentVolumeClaim",
            "secret",
            "projected",
            "csi",
            "ephemeral",
        }
        for volume in pod.get("volumes", []):
            if set(volume) - {"name"} - allowed:
                yield f"{workload.name}: volume {volume} is not of a kind that is allowed"


def pinned(objects: list[Object]) -> Iterator[str]:
    """Images say which one they mean."""
    for workload in workloads(objects):
        image = workload.container["image"]
        if not re.search(r"(:[0-9][^:/]*|@sha256:[0-9a-f]{64})$", image) or image.endswith(":latest"):
            yield f"{workload.name}: image {image} is not pinned"


def no_secrets(objects: list[Object]) -> Iterator[str]:
    """Secrets are named, never made, and no password is in an argument or a plain variable."""
    for secret in of_kind(objects, "Secret"):
        yield f"Secret {secret['metadata']['name']} is made out of values"
    for workload in workloads(objects):
        if any("password" in argument.lower() for argument in workload.args):
            yield f"{workload.name}: a password is in its command line"
        for name, each in workload.env.items():
            if re.search("PASSWORD|SECRET|TOKEN$", name) and "value" in each:
                yield f"{workload.name}: {name} is in plain sight"


# ---- sizes


def memory(objects: list[Object]) -> Iterator[str]:
    """What a worker lends to the store and its shared memory fit into its memory, with room for the process."""
    for workload in workloads(objects, "prefill", "decode"):
        limit = quantity(workload.container["resources"]["limits"]["memory"])
        config = config_of(workload)
        shm = sum(
            quantity(volume["emptyDir"]["sizeLimit"])
            for volume in workload.pod["volumes"]
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        )
        cache = config.kv_cache_bytes * config.tp if config.device == "cpu" else 0
        room = limit - config.store.segment_bytes - shm - cache
        if room < 1 << 30:
            yield f"{workload.name}: {room / (1 << 30):.1f} GiB are left of its memory for the process"


def quantity(value: object) -> int:
    """A Kubernetes quantity of bytes."""
    match = re.fullmatch(r"([0-9.]+)([kMGT]i?)?", str(value))
    assert match, value
    factor = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
    binary = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return int(float(match[1]) * (factor | binary)[match[2] or ""])


def names(objects: list[Object]) -> Iterator[str]:
    """Names are unique a kind, and short enough to be names and labels."""
    seen: set[tuple[str, str]] = set()
    for each in objects:
        key = (each["kind"], each["metadata"]["name"])
        if key in seen:
            yield f"{key} is there twice"
        seen.add(key)
        if len(key[1]) > 63:
            yield f"{key}: longer than 63"
        for label, value in each["metadata"].get("labels", {}).items():
            if len(value) > 63:
                yield f"{key}: label {label} is longer than 63"
        if each["metadata"].get("namespace", NAMESPACE) != NAMESPACE:
            yield f"{key}: is put into another namespace"


CHECKS: tuple[Check, ...] = (
    command_lines,
    patience_of_the_store,
    options_known,
    administration,
    probes,
    drain,
    budgets,
    services,
    selectors,
    one_prefix_a_version,
    network,
    planners,
    monitors,
    restricted,
    pinned,
    no_secrets,
    memory,
    names,
)


def violations(objects: list[Object], checks: tuple[Check, ...] = CHECKS) -> list[str]:
    """Everything that is wrong."""
    found: list[str] = []
    for check in checks:
        try:
            found += [f"{check.__name__}: {line}" for line in check(objects)]
        except OptionError as error:  # a command line that cannot be read stops the checks that build on it
            found.append(f"{check.__name__}: {error}")
    return found


def require_caught(objects: list[Object], expected: str) -> None:
    """Fail unless some check says something that contains `expected`."""
    found = violations(objects)
    if not any(expected in line for line in found):
        pytest.fail(f"nothing says {expected!r}; the checks say {found}")
