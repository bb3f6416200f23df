# SPDX-License-Identifier: Apache-2.0
"""What real processes expose: the metrics of docs/metrics.md, one trace across three processes, JSON logs, the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltaserve.config import LogConfig, TraceConfig
from deltaserve.up import Cluster, ports
from tests.cluster.calls import call, complete
from tests.support.cluster import cluster_config
from tests.support.metrics_table import Row, read_table
from tests.support.otlp import TREE, Collector, Seen, collecting, parents
from tests.support.processes import wait_until

pytestmark = pytest.mark.cluster

PROMPT = [3 + (7 * i) % 200 for i in range(400)]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A collector that lives as long as the cluster."""
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Cluster]:
    """A cluster with everything on, that has answered one request of a client that traces."""
    first = next(port for port in ports.choose(8) if ports.is_free("127.0.0.1", port + 1))
    config = cluster_config(
        tmp_path_factory.mktemp("observed"),
        metrics_port=first,
        log=LogConfig(format="json", level="debug"),
        trace=TraceConfig(endpoint=collector.url),
    )
    with Cluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def answer(observed: Cluster) -> dict[str, Any]:
    """One request that was handed over."""
    made: list[dict[str, Any]] = []

    def handed_over() -> bool:
        # On a busy machine the router may lose sight of the prefill worker for a moment; then it is asked again.
        made.append(complete(observed, PROMPT))
        return str(made[-1]["trace"]["route"]).startswith("handover ")

    wait_until(handed_over, 120, "a request is handed over")
    return made[-1]


def scrape(url: str) -> dict[str, Row]:
    """This project's metrics, as a scrape shows them; labels of series that exist."""
    with urlopen(url, timeout=60) as reply:
        text = reply.read().decode()
    found: dict[str, Row] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith("deltaserve_") and not family.name.endswith("_created"):
            name = family.name + ("_total" if family.type == "counter" else "")
            labels = {label for sample in family.samples for label in sample.labels if label != "le"}
            found[name] = Row(family.type, tuple(sorted(labels)))
    return found


def compare(found: dict[str, Row], documented: dict[str, Row]) -> list[str]:
    """Names that one side lacks, types that differ, labels that are not documented."""
    wrong = [f"undocumented: {name}" for name in found.keys() - documented.keys()]
    wrong += [f"not exposed: {name}" for name in documented.keys() - found.keys()]
    for name in found.keys() & documented.keys():
        row, expected = found[name], documented[name]
        # A labelled metric without an event yet has no series to show its labels.
        if row.kind != expected.kind or (row.labels and set(row.labels) != set(expected.labels)):
            wrong.append(f"differs: {name}: {row}, {expected}")
    return wrong


def test_the_roles_expose_what_is_documented(observed: Cluster, answer: dict[str, Any]) -> None:
    router = scrape(observed.endpoint + "/metrics")
    assert compare(router, {**read_table("Router")}) == []
    workers = {**read_table("Workers"), **read_table("The handoff, on workers")}
    first = observed.config.metrics_port
    for port in (first, first + 1):
        assert compare(scrape(f"http://127.0.0.1:{port}/metrics"), workers) == []
    assert compare(router, workers) != [], "the control"


def traced(cluster: Cluster, collector: Collector, number: int) -> list[Seen]:
    """The spans of a request of its own, once every name of TREE is among them; [] when its state was not handed over
    in one go: then other spans are right."""
    body = {
        "model": cluster.served_model_name,
        "prompt": [9 + number, *PROMPT],
        "max_tokens": 4,
        "temperature": 0,
        "kv_transfer_params": {"placement": "handover"},
    }
    trace = f"{number + 1:x}{TRACE[1:]}"
    headers = {"Content-Type": "application/json", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    request = Request(cluster.endpoint + "/v1/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=120) as reply:
        assert reply.headers["x-request-id"]
        if not reply.headers["x-deltaserve-route"].startswith("handover "):
            return []
        seen = call(f"{cluster.endpoint}/deltaserve/requests/{json.load(reply)['id']}")[1]
    if seen["failure"] or seen["from_store"] != len(PROMPT):
        return []
    return collector.wait_for(*TREE, trace=trace)


def test_one_trace_across_the_processes(
    observed: Cluster, answer: dict[str, Any], collector: Collector
) -> None:
    # Where a machine is so busy that an attempt is repeated, the trace rightly shows both; another request is asked.
    for number in range(8):
        spans = traced(observed, collector, number)
        if spans and len(spans) == len(TREE):
            break
    assert parents(spans) == TREE
    services = {s.name: s.service for s in spans}
    assert services["prefill"] == "deltaserve.prefill"
    assert services["load"] == "deltaserve.decode"
    assert services["request"] == "deltaserve.router"


def test_logs_are_json_with_the_requests_id_on_every_role(observed: Cluster, answer: dict[str, Any]) -> None:
    for name in ("router", "prefill-0", "decode-0"):
        lines = json_lines(observed.logs[name])
        assert lines, name
        about = [line for line in lines if line.get("request_id") == answer["id"]]
        assert about, f"{name} says nothing about {answer['id']}"
        assert {line["process"] for line in about} == {name.split("-")[0]}


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a log; what looks like a line of a Python logger must be one."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
        assert " WARNING " not in line.partition("{")[0], f"a text line of a Python logger: {line}"
    return found


def test_the_page_knows_the_request_and_its_ranks(observed: Cluster, answer: dict[str, Any]) -> None:
    status, state = call(observed.endpoint + "/ui/state")
    assert status == 200
    (mine,) = [one for one in state["recent"] if one["id"] == answer["id"]]
    assert mine["choice"] == "handover"
    assert mine["from_store"] == len(PROMPT) - 1
    assert [len(state["pools"][role]) for role in ("prefill", "decode")] == [1, 1]
    assert state["latency"]["ttft"]["count"] >= 1
