# SPDX-License-Identifier: Apache-2.0
"""Rendering of the chart with Helm's own engine, and the rendered objects as tests want them."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "deltaserve"
EXAMPLES = tuple(sorted(path.stem for path in (CHART / "examples").glob("*.yaml")))
RELEASE, NAMESPACE = "ds", "serving"

Object = dict[str, Any]
WORKLOADS = ("Deployment", "StatefulSet")


@functools.cache
def _example(name: str) -> Object:
    return yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))


def example(name: str) -> Object:
    """A copy of an example's values."""
    return copy.deepcopy(_example(name))


def changed(values: Object, path: str, value: Any) -> Object:
    """A copy of `values` with one entry replaced; `path` is dotted, numbers index lists."""
    result = copy.deepcopy(values)
    holder: Any = result
    *outer, last = path.split(".")
    for key in outer:
        holder = holder[int(key)] if isinstance(holder, list) else holder.setdefault(key, {})
    holder[int(last) if isinstance(holder, list) else last] = value
    return result


def render(values: Object, chart: Path = CHART, name: str = RELEASE) -> list[Object]:
    """Every object of a release. Raises HelmValuesError or HelmRenderError with Helm's words."""
    with Chart.load(chart) as loaded:
        rendered = loaded.render(values, name=name, namespace=NAMESPACE)
    return [item for text in rendered.values() for item in yaml.safe_load_all(text) if item]


@functools.cache
def _rendered(name: str) -> list[Object]:
    return render(example(name))


def rendered(name: str) -> list[Object]:
    """An example's objects; a copy, so that a test may damage it."""
    return copy.deepcopy(_rendered(name))


def mutated_chart(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the chart with one piece of text replaced everywhere in one file; it must be there."""
    target = folder / "deltaserve"
    shutil.copytree(CHART, target)  # links become what they point to
    path = target / file
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{file} has no {old!r}: bring the control up to date"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return target


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet of one container."""

    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def replicas(self) -> int | None:
        replicas = self.object["spec"].get("replicas")
        return None if replicas is None else int(replicas)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.object["spec"]["template"]["metadata"]["labels"])

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def version(self) -> str:
        return self.labels.get("deltaserve/version", "")

    @property
    def pod(self) -> Object:
        return self.object["spec"]["template"]["spec"]

    @property
    def container(self) -> Object:
        containers = self.pod["containers"]
        assert len(containers) == 1
        return containers[0]

    @property
    def args(self) -> list[str]:
        return [str(each) for each in self.container["args"]]

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: int(port["containerPort"]) for port in self.container["ports"]}

    @property
    def env(self) -> dict[str, Object]:
        return {each["name"]: each for each in self.container.get("env", [])}

    def flag(self, name: str) -> str | None:
        """The value of `--name=value`; None when it is not given."""
        for argument in self.args:
            if argument.startswith(f"--{name}="):
                return argument.partition("=")[2]
        return None


def workloads(objects: list[Object], *components: str) -> list[Workload]:
    """The workloads of these components, or all."""
    found = [Workload(each) for each in objects if each["kind"] in WORKLOADS]
    return [each for each in found if not components or each.component in components]


def of_kind(objects: list[Object], kind: str) -> Iterator[Object]:
    """Objects of one kind."""
    return (each for each in objects if each["kind"] == kind)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels and matchExpressions of operator In) chooses these labels."""
    for key, value in (selector.get("matchLabels") or {}).items():
        if labels.get(key) != value:
            return False
    for expression in selector.get("matchExpressions") or []:
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True
