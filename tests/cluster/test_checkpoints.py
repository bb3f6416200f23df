# SPDX-License-Identifier: Apache-2.0
"""Conversations and shared prefixes on a real cluster: little is computed twice, and answers are those of one engine.

The workers' own prefix caches help in a conversation as well; a worker that was restarted has only the store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deltaserve.up import Cluster
from deltaserve.verify.compare import Answer
from deltaserve.verify.prompts import Case, Group, Prompt, PromptMaker
from deltaserve.verify.reference import answers, engine_config
from statestore.boundary import BoundaryRecord
from tests.cluster.calls import checkpoints, complete, metric, records, stored_objects
from tests.support.cluster import DEMO, MakeCluster, cluster_config
from tests.support.processes import wait_until

pytestmark = pytest.mark.cluster

FIRST = 1500
TURN = 24
ANSWER = 16
PATIENT = 180.0
"""Seconds after which what has not come will not come: a worker's start among them."""


def reference(prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers of the aggregated engine; each prompt computed from nothing."""
    groups = [
        Group((Case(f"{len(p)}/{i}", Prompt(tuple(p), None), max_tokens=ANSWER),))
        for i, p in enumerate(prompts)
    ]
    found = answers(engine_config(cluster_config(Path("unused"))), groups)
    return [group[0] for group in found]


def say(cluster: Cluster, prompt: list[int], **fields: Any) -> dict[str, Any]:
    return complete(cluster, prompt, max_tokens=ANSWER, **fields)


def computed(answer: dict[str, Any]) -> int:
    """Prompt tokens that any worker computed for it."""
    trace = answer["trace"]
    if not trace["boundary_length"]:
        return int(trace["recomputed"])
    on_prefill = trace["boundary_length"] - trace["prefill_cached"] - trace["prefill_restored"]
    return int(on_prefill + trace["recomputed"])


def check(answer: dict[str, Any], expected: Answer) -> None:
    assert answer["tokens"] == list(expected.tokens)
    assert answer["logprobs"] == pytest.approx(list(expected.logprobs), abs=1e-3)


def conversation() -> tuple[list[list[int]], list[Answer]]:
    """The prompts of four turns, and the aggregated engine's answers, which are part of the next prompt."""
    prompts = [list(PromptMaker(DEMO).make(FIRST).tokens)]
    expected = reference(prompts)
    for number in range(1, 4):
        turn = PromptMaker(DEMO).make(TURN, number).tokens
        prompts.append([*prompts[-1], *expected[-1].tokens, *turn])
        expected += reference([prompts[-1]])
    return prompts, expected


def wait_kept(cluster: Cluster, prompt: list[int]) -> None:
    """Until the end of the answer to a prompt is a checkpoint; its last token was sampled and not computed."""
    length = len(prompt) + ANSWER - 1
    wait_until(
        lambda: any(r.length == length for r in checkpoints(cluster)), PATIENT, "the answer's end is kept"
    )


@pytest.mark.timeout(600)
def test_a_conversation_computes_what_is_new_only(cluster: Cluster) -> None:
    prompts, expected = conversation()
    seen = []
    for number, prompt in enumerate(prompts):
        answer = say(cluster, prompt, cache_salt="conversation")
        check(answer, expected[number])
        assert answer["trace"]["from_store"] + answer["trace"]["local"] == len(prompt) - 1
        seen.append(
            {
                "turn": number + 1,
                "prompt": len(prompt),
                "computed": computed(answer),
                "prefill_cached": answer["trace"]["prefill_cached"],
                "prefill_restored": answer["trace"]["prefill_restored"],
                "cached_tokens": answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            }
        )
        wait_kept(cluster, prompt)
    print(json.dumps(seen, indent=1))
    assert seen[0]["computed"] == FIRST, "the control: nothing was known"
    later = seen[1:]
    share = sum(turn["computed"] for turn in later) / sum(turn["prompt"] for turn in later)
    print(f"computed after turn 1: {share:.2%} of the prompt tokens")
    assert share < 0.05
    for turn in later:
        assert turn["computed"] == TURN + 1
        assert turn["cached_tokens"] == turn["prompt"] - turn["computed"]
        assert turn["prefill_restored"] > 0


@pytest.mark.timeout(600)
def test_a_conversation_outlives_its_prefill_worker(make_real_cluster: MakeCluster) -> None:
    """Where prefills leave no checkpoints, the answer's end holds everything; a new worker has it from the store."""
    prompts, expected = conversation()
    cluster = make_real_cluster(prefill_options={"checkpoint_tokens": 0})
    check(say(cluster, prompts[0]), expected[0])
    wait_kept(cluster, prompts[0])
    starts = cluster.statuses["prefill-0"].starts
    cluster.kill("prefill-0")
    cluster.wait_ready("prefill-0", PATIENT, after_start=starts)
    wait_until(
        lambda: say(cluster, prompts[0][:40])["trace"]["boundary_length"] == 39, PATIENT, "handed over"
    )
    answer = say(cluster, prompts[1])
    check(answer, expected[1])
    assert answer["trace"]["prefill_cached"] == 0
    assert answer["trace"]["prefill_restored"] == FIRST + ANSWER - 1
    assert computed(answer) == TURN + 1


@pytest.mark.timeout(600)
def test_a_shared_prefix_is_computed_once_and_another_salt_shares_nothing(cluster: Cluster) -> None:
    shared = list(PromptMaker(DEMO).make(1100, 2).tokens)
    one, two = ([*shared, *PromptMaker(DEMO).make(40, number).tokens] for number in (3, 4))
    expected = reference([one, two])
    first = say(cluster, one, cache_salt="tenant a")
    assert computed(first) == len(one)
    check(first, expected[0])
    second = say(cluster, two, cache_salt="tenant a")
    check(second, expected[1])
    # Checkpoints lie where a step ended on a block boundary: the last one inside the shared part is at 1024.
    assert computed(second) <= len(two) - 1024
    stranger = say(cluster, two, cache_salt="tenant b")
    check(stranger, expected[1])
    assert computed(stranger) == len(two), "another salt shares nothing"
    assert stranger["trace"]["prefill_cached"] == stranger["trace"]["prefill_restored"] == 0


@pytest.mark.timeout(600)
def test_a_decode_worker_without_a_boundary_starts_from_a_checkpoint(cluster: Cluster) -> None:
    prompt = list(PromptMaker(DEMO).make(700, 6).tokens)
    expected = reference([prompt, [*prompt[:600], 5, 6, 7]])
    check(say(cluster, prompt, cache_salt="local"), expected[0])
    answer = say(cluster, [*prompt[:600], 5, 6, 7], placement="local", cache_salt="local")
    check(answer, expected[1])
    trace = answer["trace"]
    assert trace["route"].startswith("local")
    assert trace["from_store"] + trace["local"] >= 512
    assert trace["recomputed"] <= 603 - 512
    nothing = say(cluster, [*prompt[:600], 5, 6, 7], placement="local", cache_salt="a stranger's")
    assert (nothing["trace"]["from_store"], nothing["trace"]["recomputed"]) == (0, 603)


@pytest.mark.timeout(600)
def test_a_store_that_lost_everything_is_computed_around_and_written_anew(
    make_real_cluster: MakeCluster,
) -> None:
    """The master restarts without HA: every checkpoint's record is there, and none of its objects."""
    prompt = list(PromptMaker(DEMO).make(1100, 5).tokens)
    expected = reference([prompt])[0]
    cluster = make_real_cluster()
    check(say(cluster, prompt), expected)
    lost = [record for record in checkpoints(cluster) if record.base == 0]
    assert len(lost) == 1
    # The decode worker too, because its own cache needs nothing from the store.
    for name in ("master", "decode-0"):
        starts = cluster.statuses[name].starts
        cluster.kill(name)
        cluster.wait_ready(name, PATIENT, after_start=starts)

    def whole() -> bool:
        answer = say(cluster, prompt)
        check(answer, expected)
        trace = answer["trace"]
        return bool(trace["failure"] == "" and trace["from_store"] + trace["local"] == len(prompt) - 1)

    wait_until(whole, PATIENT, "handed over again, from what was written anew")
    assert lost[0].id not in {record.id for record in checkpoints(cluster)}, "what is lost leaves the ledger"
    wait_until(lambda: not records(cluster), PATIENT, "nothing of a request stays")


@pytest.mark.timeout(600)
def test_a_small_budget_is_kept_and_nothing_stays_beyond_it(
    make_real_cluster: MakeCluster, tmp_path: Path
) -> None:
    """On every chain of the prefill worker rests the end of an answer, which the decode worker would keep for long."""
    limit = 12 << 20
    cluster = make_real_cluster(prefill_options={"checkpoint_bytes": limit})

    def kept() -> list[BoundaryRecord]:
        return [record for record in checkpoints(cluster) if record.owner.startswith("prefill")]

    def left_by(number: int) -> bool:
        """Whether a new prompt leaves checkpoints."""
        prompt, before = list(PromptMaker(DEMO).make(1100, number).tokens), {r.id for r in kept()}
        say(cluster, prompt, cache_salt=f"budget {number}")
        wait_until(
            lambda: not records(cluster), PATIENT, "its boundary is gone, and its answer's end is kept"
        )
        return not before >= {record.id for record in kept()}

    number = iter(range(1000))
    for _ in range(5):
        # Where the last answer's end was not seen in time, its chain counted as in use: then the next one is asked.
        wait_until(
            lambda: left_by(next(number)), PATIENT, "a prompt leaves checkpoints where the budget is full"
        )
    wait_until(lambda: sum(r.nbytes for r in kept()) <= limit, PATIENT, "within the budget")
    assert kept(), "and not empty"
    wait_until(lambda: not records(cluster) and stored_objects(cluster) == 0, PATIENT, "nothing else stays")
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "deltaserve",
            "boundaries",
            "--json",
            "--etcd-endpoints",
            cluster.etcd_endpoint,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
        check=True,
    )
    assert {item["id"] for item in json.loads(listed.stdout)} == {r.id for r in checkpoints(cluster)}
    assert metric(cluster, "deltaserve_router_handovers_total") >= 5
