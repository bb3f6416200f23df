# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md as data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

METRICS = Path(__file__).parents[2] / "docs" / "metrics.md"
_ROW = re.compile(r"^\| `(deltaserve_\w+)` \| (\w+) \| ([\w, ]*) ?\| (.+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """One metric."""

    kind: str
    labels: tuple[str, ...]


def read_table(section: str = "") -> dict[str, Row]:
    """The metrics of the page, or of one of its sections."""
    text = METRICS.read_text()
    if section:
        text = text[text.index(f"\n## {section}\n") + 1 :].partition("\n## ")[0]
    found = {
        name: Row(kind, tuple(part.strip() for part in labels.split(",") if part.strip()))
        for name, kind, labels, _ in _ROW.findall(text)
    }
    assert found, f"no table in {METRICS}, section {section or 'any'}"
    return found
