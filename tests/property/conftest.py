# SPDX-License-Identifier: Apache-2.0
"""Prints how much the property tests have covered."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a family of cases: geometries pairs, decode ranks, and bytes moved for bytes needed."""
    from tests.property.reshard_worker import TALLIES

    for name, tally in sorted(TALLIES.items()):
        ratio = tally.moved / tally.needed if tally.needed else 1.0
        terminalreporter.write_line(
            f"{name}: {tally.cases} cases, {tally.ranks} decode ranks, "
            f"{tally.moved} bytes moved for {tally.needed} needed ({ratio:.4f})"
        )
