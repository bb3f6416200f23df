# SPDX-License-Identifier: Apache-2.0
"""Prints how much the property tests have covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest

from tests.support.reported import reported


@pytest.fixture(autouse=True)
def _covered(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Record what this test adds to the tallies."""
    from tests.property.reshard_worker import TALLIES, Tally

    before = {name: asdict(tally) for name, tally in TALLIES.items()}
    yield
    for name, tally in TALLIES.items():
        was = before.get(name, asdict(Tally()))
        added = {field: number - was[field] for field, number in asdict(tally).items()}
        added["worst"] = tally.worst
        if added["cases"]:
            record_property("covered", [name, added])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a family of cases: pairs of geometries, decode ranks, and bytes moved for bytes needed."""
    tallies: dict[str, Counter[str]] = {}
    worst: dict[str, float] = {}
    for name, added in reported(terminalreporter, "covered", "teardown"):
        worst[name] = max(worst.get(name, 0.0), added.pop("worst"))
        tallies.setdefault(name, Counter()).update(added)
    for name, tally in sorted(tallies.items()):
        ratio = tally["moved"] / tally["needed"] if tally["needed"] else 1.0
        terminalreporter.write_line(
            f"{name}: {tally['cases']} cases, {tally['ranks']} decode ranks, "
            f"{tally['moved']} bytes moved for {tally['needed']} needed ({ratio:.4f}"
            + (f"; one rank at most {worst[name]:.4f})" if worst[name] else ")")
        )
    if tallies:
        cases = sum(tally["cases"] for tally in tallies.values())
        terminalreporter.write_line(
            f"in all: {cases} cases; but for those of models, each byte is compared with the reference's map"
        )
