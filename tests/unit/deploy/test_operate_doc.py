# SPDX-License-Identifier: Apache-2.0
"""docs/operate.md and docs/helm.md speak of what exists: alerts, commands, values, metrics, files."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import yaml

from deltaserve.cli.main import COMMANDS
from deltaserve.config import RouterConfig
from tests.unit.deploy.rendering import CHART, ROOT

PAGES = ("operate.md", "helm.md")
RULES = ROOT / "deploy" / "prometheus" / "alerts.yml"


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def alerts() -> list[str]:
    """Names of the alerts that are defined, in their order."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]


def runbook(text: str) -> dict[str, str]:
    """Alert → what its section says."""
    _, _, section = text.partition("\n## Runbook\n")
    parts = re.split(r"^### (\w+)$", section.split("\n## ")[0], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def gaps(text: str) -> Iterator[str]:
    """Alerts without a runbook, and runbooks without an alert or without anything to do."""
    defined, described = alerts(), runbook(text)
    yield from (f"{name}: has no runbook" for name in defined if name not in described)
    yield from (f"{name}: there is no such alert" for name in described if name not in defined)
    yield from (f"{name}: says nothing" for name, words in described.items() if len(words.split()) < 20)


def test_every_alert_has_a_runbook() -> None:
    assert alerts()
    assert list(gaps(page("operate.md"))) == []


def test_a_gap_in_the_runbook_is_found() -> None:
    text, name = page("operate.md"), alerts()[0]
    assert list(gaps(text.replace(f"### {name}\n", "### Somethingelse\n"))) == [
        f"{name}: has no runbook",
        "Somethingelse: there is no such alert",
    ]
    assert list(gaps(re.sub(rf"(### {name}\n)(?:(?!###).|\n)*", r"\1\nSee.\n\n", text))) == [
        f"{name}: says nothing"
    ]


def unknown(text: str) -> Iterator[str]:
    """Commands, values and links of a page that do not exist."""
    commands = {command.name for command in COMMANDS}
    for name in re.findall(r"`deltaserve ([a-z]+)[^`]*`|-- deltaserve ([a-z]+)", text):
        word = name[0] or name[1]
        if word not in commands:
            yield f"deltaserve {word}"
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for dotted in re.findall(
        r"`((?:model|drain|router|tls|worker|etcd|master|networkPolicy|monitoring)\.[\w.]+)`", text
    ):
        if dotted.endswith((".crt", ".key")):
            continue  # a file in a Secret
        holder = values
        for key in dotted.split("."):
            holder = holder.get(key, ...) if isinstance(holder, dict) else ...
        option = dotted.removeprefix("router.options.")
        if holder is ... and option not in RouterConfig.model_fields:
            yield dotted
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not (ROOT / "docs" / link).exists():
            yield link
    for path in re.findall(r"`?((?<![\w/])(?:deploy|docs|tests)/[\w./-]+\w)", text):
        if not path.startswith("deploy/k3-") and not (ROOT / path).exists():  # kubectl's name of a Deployment
            yield path


@pytest.mark.parametrize("name", PAGES)
def test_a_page_speaks_of_what_exists(name: str) -> None:
    assert list(unknown(page(name))) == []


def test_what_does_not_exist_is_found() -> None:
    text = "`deltaserve drian x` `router.server` [a](nowhere.md) `deploy/helm/none.yaml` `router.serve`"
    assert list(unknown(text)) == ["deltaserve drian", "router.server", "nowhere.md", "deploy/helm/none.yaml"]
