# SPDX-License-Identifier: Apache-2.0
"""What tests have recorded with `record_property`, for terminal summaries; other processes' tests included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def reported(reporter: pytest.TerminalReporter, name: str, when: str = "call") -> Iterator[Any]:
    """Every value recorded under this name by the end of the tests' phase `when`, in the order of the reports."""
    for reports in list(reporter.stats.values()):
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == when:
                yield from (value for key, value in report.user_properties if key == name)
