# SPDX-License-Identifier: Apache-2.0
"""Stretches of time that may overlap."""

from __future__ import annotations


def covered(parts: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(parts):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total
