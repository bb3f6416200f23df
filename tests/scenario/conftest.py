# SPDX-License-Identifier: Apache-2.0
"""A cluster in one process for every scenario, with sweepers that are as quick as its leases."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from statestore import sweeping
from tests.scenario.stack import Stack, running
from tests.support.reported import reported


@pytest.fixture(scope="session", autouse=True)
def _quick_switches() -> Iterator[None]:
    """Forty threads share an interpreter here: with 5 ms a turn every message between two of them waits for a turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 0.2)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """One prefill and one decode worker of 8 ranks each."""
    async with running() as made:
        await made.add("prefill")
        await made.add("decode")
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What passed in which time, a line a file; and the gauges around the 400 cancels."""
    _print_files(terminalreporter)
    _print_gauges(terminalreporter)


def _print_files(reporter: pytest.TerminalReporter) -> None:
    outcomes: dict[str, Counter[str]] = {}
    seconds: Counter[str] = Counter()
    for reports in list(reporter.stats.values()):
        for report in reports:
            if isinstance(report, pytest.TestReport) and "tests/scenario/" in report.nodeid:
                file = report.nodeid.partition("::")[0].rpartition("/")[2]
                seconds[file] += report.duration
                if report.when == "call" or report.outcome != "passed":
                    outcomes.setdefault(file, Counter())[report.outcome] += 1
    for file, counts in sorted(outcomes.items()):
        words = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
        reporter.write_line(f"{file:42} {words:>12}  {seconds[file]:6.1f} s")


def _print_gauges(reporter: pytest.TerminalReporter) -> None:
    moments: dict[str, dict[str, int]] = dict(reported(reporter, "gauges"))
    if not moments:
        return
    widths = [max(len(moment), 12) for moment in moments]
    head = "  ".join(f"{moment:>{width}}" for moment, width in zip(moments, widths, strict=True))
    reporter.write_line(f"{'gauge':24}  {head}")
    for name in next(iter(moments.values())):
        cells = [f"{gauges.get(name, '-'):>{w}}" for gauges, w in zip(moments.values(), widths, strict=True)]
        reporter.write_line(f"{name:24}  {'  '.join(cells)}")
