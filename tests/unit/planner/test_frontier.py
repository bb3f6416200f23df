# SPDX-License-Identifier: Apache-2.0
"""Whom the planner beats is decided by a frontier; what lies on it or below it beats nobody."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from benchmarks.scaling.baselines import AutoscalerSettings, Static
from benchmarks.scaling.frontier import Point, attained_at, hours_at, hull, wins
from benchmarks.scaling.model import SLO
from benchmarks.scaling.traces import NAMES
from benchmarks.scaling.tuning import FILE, LEAST, grid

FRONTIER = [Point(4, 0.90), Point(6, 0.98), Point(10, 1.0)]


def test_the_hull_keeps_what_no_mixture_beats() -> None:
    beaten = [Point(5, 0.93), Point(6, 0.97), Point(8, 0.98), Point(8, 0.985), Point(11, 1.0)]
    assert hull([*beaten, *FRONTIER]) == FRONTIER
    assert hull([*FRONTIER, Point(5, 0.95)])[1] == Point(5, 0.95), "the control: above the line it is kept"


def test_between_two_settings_lies_a_straight_line() -> None:
    assert hours_at(FRONTIER, 0.94) == pytest.approx(5)
    assert attained_at(FRONTIER, 5) == pytest.approx(0.94)
    assert hours_at(FRONTIER, 0.99) == pytest.approx(8)
    assert attained_at(FRONTIER, 8) == pytest.approx(0.99)


def test_beyond_its_ends_a_frontier_promises_nothing() -> None:
    assert hours_at(FRONTIER[:2], 0.99) is None
    assert attained_at(FRONTIER, 3.9) is None
    assert hours_at(FRONTIER, 0.5) == 4, "the cheapest setting does it"
    assert attained_at(FRONTIER, 20) == 1.0


def test_who_lies_above_wins_and_who_lies_on_it_or_below_does_not() -> None:
    assert wins(Point(5, 0.95), FRONTIER)
    assert wins(Point(3, 0.90), FRONTIER), "cheaper than any setting, for what the cheapest attains"
    assert wins(Point(9, 0.99), FRONTIER[:2]), "more than any setting attains"
    for loser in (Point(5, 0.94), Point(5, 0.93), Point(4, 0.89), Point(12, 1.0), *FRONTIER):
        assert not wins(loser, FRONTIER), loser


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_baselines_are_frontiers_of_the_grid(name: str) -> None:
    families = json.loads(FILE.read_text(encoding="utf-8"))[name]
    assert set(families) == {"static", "autoscaler"}
    for family, found in families.items():
        kind = Static if family == "static" else AutoscalerSettings
        settings = [kind(**entry["setting"]) for entry in (found["tuned"], *found["frontier"])]
        assert set(settings) <= set(grid(family))
        points = [Point(**entry["training"]) for entry in found["frontier"]]
        assert points == hull(points)
        assert points[0].attained >= LEAST
        assert points[-1].attained > SLO.target
        tuned = Point(**found["tuned"]["training"])
        assert tuned.attained >= SLO.target
        hours = hours_at(points, tuned.attained)
        assert hours is not None
        assert tuned.gpu_hours >= hours - 1e-9
        assert all(a.gpu_hours < b.gpu_hours for a, b in pairwise(points))
