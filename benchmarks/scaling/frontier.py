# SPDX-License-Identifier: Apache-2.0
"""What a family of policies can buy: the best attainment for the GPU-hours, over all its settings.

A family's frontier is the upper concave hull of its settings' points (GPU-hours, attainment). Between two settings it
is a straight line, so that any mixture of two counts as reachable, which is more than whole workers allow. A policy
lies above a frontier when it is cheaper than the frontier at its own attainment, and attains more than the frontier at
its own GPU-hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, order=True)
class Point:
    """What a policy made of some traces; means over the seeds."""

    gpu_hours: float
    attained: float
    """Share of requests that met both limits."""


def hull(points: Iterable[Point]) -> list[Point]:
    """The frontier: more GPU-hours from point to point, more attainment, and ever less of it for the hour."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.gpu_hours, -p.attained)):
        if kept and point.attained <= kept[-1].attained:
            continue
        while len(kept) >= 2 and _slope(kept[-2], kept[-1]) <= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _slope(a: Point, b: Point) -> float:
    return (b.attained - a.attained) / (b.gpu_hours - a.gpu_hours)


def hours_at(frontier: Sequence[Point], attained: float) -> float | None:
    """GPU-hours that the frontier needs for so much; None: no setting attains it, at any price."""
    if attained <= frontier[0].attained:
        return frontier[0].gpu_hours
    for a, b in pairwise(frontier):
        if attained <= b.attained:
            return a.gpu_hours + (attained - a.attained) / _slope(a, b)
    return None


def attained_at(frontier: Sequence[Point], hours: float) -> float | None:
    """What the frontier attains for so many GPU-hours; None: no setting is that cheap."""
    if hours < frontier[0].gpu_hours:
        return None
    for a, b in pairwise(frontier):
        if hours <= b.gpu_hours:
            return a.attained + (hours - a.gpu_hours) * _slope(a, b)
    return frontier[-1].attained


def wins(point: Point, frontier: Sequence[Point]) -> bool:
    """Cheaper at equal attainment, and more attained at equal GPU-hours.

    Where the frontier does not reach the attainment at any price, or not that cheaply, that half is won.
    """
    hours, attained = hours_at(frontier, point.attained), attained_at(frontier, point.gpu_hours)
    cheaper = hours is None or point.gpu_hours < hours
    better = attained is None or point.attained > attained
    return cheaper and better
