# SPDX-License-Identifier: Apache-2.0
"""State handed over between workers of different tensor and context parallel sizes, in real engines.

The two of the six layouts that differ most run here: heads gathered from two writers by one reader, and spread from one
writer over two readers that divide the tokens as well. `deltaserve verify --layouts all` runs all six. The maps
themselves are checked for all sizes in tests/property.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaserve.config import VerifyConfig
from deltaserve.verify.main import verify
from tests.support.cluster import DEMO

pytestmark = pytest.mark.cluster
LENGTHS = [2, 16, 129, 500]


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "decode_dcp"), [(2, 1, 1), (1, 2, 2)])
@pytest.mark.timeout(420)
def test_answers_are_those_of_one_engine(
    prefill_tp: int, decode_tp: int, decode_dcp: int, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    lines: list[str] = []
    config = VerifyConfig(
        model=DEMO,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        decode_dcp=decode_dcp,
        lengths=LENGTHS,
        quick=True,
        placements=["handover"],
        run_dir=tmp_path / "run",
        json_file=out,
    )
    judgement = verify(config, lines.append)
    assert judgement.passed, "\n".join(lines)
    results = json.loads(out.read_text())["results"]
    assert len(results) == len(LENGTHS) + 8
    assert all(result["from_store"] == result["prompt_tokens"] - 1 for result in results)
