# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md against what the roles expose, and dashboards and alerts against docs/metrics.md.

tests/cluster/test_observed.py does the first with real processes.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from deltaserve.telemetry import HandoffMetrics, WorkerMetrics
from deltaserve.telemetry.metrics import RECORD_KINDS, STAGES, names_of
from router.metrics import Metrics
from router.placement import LOCAL_REASONS
from tests.support.metrics_table import Row, read_table

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
TESTS = ROOT / "deploy" / "prometheus" / "alerts_test.yml"
_NAME = re.compile(r"\bdeltaserve_[a-z0-9_]+")
_SELECTOR = re.compile(r"(deltaserve_[a-z0-9_]+)\{([^}]*)\}")
_FOREIGN = {"job", "instance", "le"}
"""Labels that Prometheus gives."""


def exposed() -> dict[str, Row]:
    """What the roles register."""
    registry = CollectorRegistry()
    HandoffMetrics(registry)
    WorkerMetrics(registry)
    Metrics(registry)
    return {name: Row(kind, labels) for name, (kind, labels) in names_of(registry).items()}


def differences(found: dict[str, Row], documented: dict[str, Row]) -> list[str]:
    """What one has and the other has not, or has differently."""
    wrong = [f"{name} is not in docs/metrics.md" for name in found.keys() - documented.keys()]
    wrong += [f"{name} is exposed by no role" for name in documented.keys() - found.keys()]
    wrong += [
        f"{name}: {found[name]} exposed, {documented[name]} documented"
        for name in found.keys() & documented.keys()
        if found[name] != documented[name]
    ]
    return sorted(wrong)


def samples(table: dict[str, Row]) -> dict[str, Row]:
    """The names that a query may use."""
    named = {name: row for name, row in table.items() if row.kind != "histogram"}
    for name, row in table.items():
        if row.kind == "histogram":
            named |= {f"{name}_{end}": row for end in ("bucket", "sum", "count")}
    return named


def problems(query: str, table: dict[str, Row]) -> list[str]:
    """Metrics and labels of a query that do not exist."""
    known = samples(table)
    found = [f"no metric {name}" for name in _NAME.findall(query) if name not in known]
    for name, selector in _SELECTOR.findall(query):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) - _FOREIGN
        found += [
            f"{name} has no label {label}"
            for label in labels
            if name in known and label not in known[name].labels
        ]
    return found


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Every query of a dashboard's panels."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_the_table_is_what_the_roles_expose() -> None:
    assert differences(exposed(), read_table()) == []


def test_the_comparison_sees_each_kind_of_difference() -> None:
    table = read_table()
    name = "deltaserve_boundary_failures_total"
    less = {key: row for key, row in table.items() if key != name}
    other = {**table, name: Row("counter", ("stage",))}
    more = {**table, "deltaserve_new_total": Row("counter", ())}
    assert differences(exposed(), less) == [f"{name} is not in docs/metrics.md"]
    assert differences(exposed(), more) == ["deltaserve_new_total is exposed by no role"]
    assert len(differences(exposed(), other)) == 1


def test_the_values_of_closed_labels_are_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    values = text[text.index("## Values of labels") :]
    assert [reason for reason in LOCAL_REASONS if not re.search(rf"\b{reason}\b", values)] == []
    assert [word for word in (*STAGES, *RECORD_KINDS) if word not in text] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_that_exist(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    found = queries(dashboard)
    assert len(found) > 10
    assert [(query, wrong) for query in found if (wrong := problems(query, read_table()))] == []
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert dashboard["uid"] == f"deltaserve-{path.stem}"


def test_dashboards_show_every_metric() -> None:
    asked = {
        name
        for path in DASHBOARDS
        for query in queries(json.loads(path.read_text()))
        for name in _NAME.findall(query)
    }
    shown = {name for name in read_table() if {name, f"{name}_bucket"} & asked}
    assert read_table().keys() - shown == set()


def test_a_query_for_what_does_not_exist_is_found() -> None:
    table = read_table()
    assert problems("rate(deltaserve_router_ttft_seconds[5m])", table) == [
        "no metric deltaserve_router_ttft_seconds"
    ]
    assert problems('deltaserve_router_queued{role="x"}', table) == [
        "deltaserve_router_queued has no label role"
    ]
    assert problems('deltaserve_router_workers{role="x", job=~"y"}', table) == []


def test_dashboards_are_valid_promql(tmp_path: Path) -> None:
    """Every query as a rule that promtool parses."""
    found = [query for path in DASHBOARDS for query in queries(json.loads(path.read_text()))]

    def check(asked: list[str]) -> subprocess.CompletedProcess[str]:
        rules = [
            {"record": f"dashboard:query_{number}", "expr": query.replace("$__rate_interval", "5m")}
            for number, query in enumerate(asked)
        ]
        file = tmp_path / "queries.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
        return promtool("check", "rules", str(file))

    result = check(found)
    assert result.returncode == 0, result.stderr
    assert check([*found, "sum by (rate(x[5m])"]).returncode != 0, "the control: what is no PromQL is refused"


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run promtool."""
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=120)


def alerts() -> list[dict[str, Any]]:
    """Every alert."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_alerts_ask_for_metrics_that_exist_and_have_a_test_and_a_runbook() -> None:
    found = alerts()
    names = [rule["alert"] for rule in found]
    assert len(names) == len(set(names)) > 15
    assert [(rule["alert"], wrong) for rule in found if (wrong := problems(rule["expr"], read_table()))] == []
    for rule in found:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["runbook"] == f"docs/operate.md#{rule['alert'].lower()}"
    tested = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case.get("exp_alerts")
    }
    assert set(names) == tested, "every alert is seen firing"


def test_the_alerts_pass_their_tests() -> None:
    checked, tested = promtool("check", "rules", str(ALERTS)), promtool("test", "rules", str(TESTS))
    assert checked.returncode == 0, checked.stderr
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("expression", ["vector(1) > 2", "vector(1)"], ids=["never", "always"])
def test_an_alert_that_fires_never_or_always_fails_its_tests(expression: str, tmp_path: Path) -> None:
    """The control of every alert: its own tests say so, by name."""
    (tmp_path / "alerts_test.yml").write_text(TESTS.read_text())
    document = yaml.safe_load(ALERTS.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule["expr"] = expression
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(document))
    result = promtool("test", "rules", str(tmp_path / "alerts_test.yml"))
    assert result.returncode != 0
    words = result.stdout + result.stderr
    assert [rule["alert"] for rule in alerts() if f"alertname: {rule['alert']}," not in words] == []
