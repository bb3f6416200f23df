# SPDX-License-Identifier: Apache-2.0
"""State handed over between workers of different tensor and context parallel sizes, in real engines.

The two of the six layouts that differ most run here: heads gathered from two writers by one reader, and spread from one
writer over two readers that divide the tokens as well. `deltaserve verify --layouts all` runs all six. The maps
themselves are checked for all sizes in tests/property.

A conversation follows on each cluster: what several ranks have kept is restored by one rank, and the other way round.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaserve.config import VerifyConfig
from deltaserve.up import Cluster
from deltaserve.verify.main import verify
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import checkpoints
from tests.cluster.test_checkpoints import TURN, computed, say, wait_kept
from tests.support.cluster import DEMO, MakeCluster

pytestmark = pytest.mark.cluster
LENGTHS = [2, 16, 129, 500]
FIRST = 1100
TURNS = 4


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "decode_dcp"), [(2, 1, 1), (1, 2, 2)])
@pytest.mark.timeout(600)
def test_answers_are_those_of_one_engine(
    prefill_tp: int, decode_tp: int, decode_dcp: int, tmp_path: Path, make_real_cluster: MakeCluster
) -> None:
    cluster = make_real_cluster(prefill_tp=prefill_tp, decode_tp=decode_tp, decode_dcp=decode_dcp)
    out = tmp_path / "result.json"
    lines: list[str] = []
    config = VerifyConfig(
        model=DEMO,
        endpoint=cluster.endpoint,
        lengths=LENGTHS,
        quick=True,
        placements=["handover"],
        json_file=out,
    )
    judgement = verify(config, lines.append)
    assert judgement.passed, "\n".join(lines)
    results = json.loads(out.read_text())["results"]
    assert len(results) == len(LENGTHS) + 8
    assert all(result["from_store"] == result["prompt_tokens"] - 1 for result in results)
    converse(cluster, {"prefill": prefill_tp, "decode": decode_tp})


def converse(cluster: Cluster, ranks: dict[str, int]) -> None:
    """Four turns; after the first nothing is computed but what is new. `ranks`: of each role's worker."""
    prompt, seen = list(PromptMaker(DEMO).make(FIRST).tokens), []
    for turn in range(TURNS):
        answer = say(cluster, prompt, cache_salt="kept")
        seen.append((len(prompt), computed(answer), answer["trace"]["prefill_restored"]))
        if turn < TURNS - 1:
            wait_kept(cluster, prompt)
            prompt = [*prompt, *answer["tokens"], *PromptMaker(DEMO).make(TURN, turn + 1).tokens]
    print(f"(prompt, computed, restored from the store by the prefill worker): {seen}")
    assert seen[0] == (FIRST, FIRST, 0), "the control: nothing was known"
    total, new = sum(turn[0] for turn in seen[1:]), sum(turn[1] for turn in seen[1:])
    print(f"computed after turn 1: {new / total:.2%} of the prompt tokens")
    assert new < 0.05 * total
    assert all(restored > 0 for _, _, restored in seen[1:])
    kept = {record.owner.partition("-")[0]: len(record.ranks) for record in checkpoints(cluster)}
    assert kept == ranks, "the ends of steps, and of answers"
    # Right is what the decode worker computes alone, and from nothing.
    alone = say(cluster, prompt, placement="local", cache_salt="alone")
    assert computed(alone) == len(prompt)
    assert answer["tokens"] == alone["tokens"]
    assert answer["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-3)
