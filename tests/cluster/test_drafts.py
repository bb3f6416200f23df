# SPDX-License-Identifier: Apache-2.0
"""Drafts on a real cluster: with handovers, prefix caches and other requests beside, greedy answers are those without.

One cluster a method, one of them with two ranks a worker. They fold accepted drafts at start (docs/replay_ssm.md); what
drafts change is how many steps an answer takes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deltaserve.up import Cluster, ports
from deltaserve.verify.compare import Answer
from deltaserve.verify.prompts import Case, Group, Prompt, PromptMaker
from deltaserve.verify.reference import answers, engine_config
from tests.cluster.calls import call, complete, sample_of
from tests.support.cluster import DEMO, MakeCluster, cluster_config
from tests.support.processes import wait_until

pytestmark = pytest.mark.cluster

LENGTHS = (129, 1000)
LONG, HISTORY = 400, 232
"""Prompt tokens: of a prompt that continues a history, and of that history, which ends inside a block."""
ANSWER = 32
PATIENCE = 240.0
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "mtp": {"method": "mtp", "model": str(DEMO / "mtp"), "num_speculative_tokens": 2},
}
RANKS = {"ngram": 2, "mtp": 1}
"""Ranks of each role: every rank keeps records of its own heads, and all must fold the same counts."""
CONTINUES = {"ngram": ("local", "local"), "mtp": ("handover", "prefill_cached")}
"""Where a history is continued, and the field of the trace that says that a prefix cache took part."""

ALONE = [PromptMaker(DEMO).make(length).tokens for length in LENGTHS]
CONTINUED = PromptMaker(DEMO).make(LONG).tokens
REPEATED = (CONTINUED[0], *CONTINUED[10:18] * 12)
"""Eight tokens again and again: the model goes on repeating, so that drafts of either kind are accepted."""


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], Answer]:
    """What one engine without drafts answers to each prompt."""
    prompts = [*ALONE, CONTINUED, CONTINUED[:HISTORY], REPEATED]
    groups = [Group((Case(str(len(p)), Prompt(p, None), max_tokens=ANSWER),)) for p in prompts]
    found = answers(engine_config(cluster_config(Path("unused"))), groups)
    return dict(zip(prompts, (group[0] for group in found), strict=True))


class Asked:
    """A cluster with drafts, and the answers that it must give."""

    def __init__(self, cluster: Cluster, metrics: int, expected: dict[tuple[int, ...], Answer]) -> None:
        self.cluster, self.metrics, self.expected = cluster, metrics, expected

    def say(self, prompt: tuple[int, ...], tokens: int = ANSWER, **fields: Any) -> dict[str, Any]:
        """A greedy answer, which must be the expected one; its trace."""
        answer = complete(self.cluster, list(prompt), max_tokens=tokens, **fields)
        wanted = self.expected[prompt]
        assert answer["tokens"] == list(wanted.tokens[:tokens])
        assert answer["logprobs"] == pytest.approx(list(wanted.logprobs[:tokens]), abs=1e-3)
        trace: dict[str, Any] = answer["trace"]
        return trace

    def handed_over(self, prompt: tuple[int, ...], salt: str) -> None:
        """Until the state of all tokens but the last came from the store; a worker may be out of sight for a moment."""
        tries: list[dict[str, Any]] = []

        def whole() -> bool:
            tries.append(self.say(prompt, cache_salt=f"{salt} {len(tries)}"))
            return bool(tries[-1]["from_store"] == len(prompt) - 1)

        wait_until(whole, PATIENCE, "handed over")

    def history(self, same: dict[str, str]) -> None:
        """Ask for what the next prompts continue, until the worker that shall know it does."""

        def known() -> bool:
            trace = self.say(CONTINUED[:HISTORY], **same)
            return same["placement"] == "local" or bool(trace["boundary_length"])

        wait_until(known, PATIENCE, "the history is known")

    def accepted(self, prompt: tuple[int, ...], tokens: int) -> int:
        """Drafted tokens that are part of a lone answer of ``tokens`` tokens: those beyond one a step."""
        before = self._counts()
        self.say(prompt, tokens, cache_salt="counted")
        made, steps = (now - then for now, then in zip(self._counts(), before, strict=True))
        assert made == tokens
        return int(made - steps)

    def _counts(self) -> tuple[float, float]:
        text = call(f"http://127.0.0.1:{self.metrics}/metrics")[1]["text"]
        return (
            sample_of(text, "deltaserve_worker_tokens_total"),
            sample_of(text, "deltaserve_worker_steps_total"),
        )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", list(DRAFTS))
def test_answers_with_drafts_are_those_without(
    method: str, make_real_cluster: MakeCluster, expected: dict[tuple[int, ...], Answer]
) -> None:
    assert len({answer.tokens for answer in expected.values()}) == len(expected), (
        "the control: prompts matter"
    )
    first = next(port for port in ports.choose(8) if ports.is_free("127.0.0.1", port + 1))
    cluster = make_real_cluster(
        metrics_port=first,
        prefill_tp=RANKS[method],
        decode_tp=RANKS[method],
        decode_options={"extra_args": {"speculative_config": DRAFTS[method]}},
    )
    asked = Asked(cluster, first + 1, expected)
    for prompt in ALONE:
        asked.handed_over(prompt, "alone")

    # Greedy requests beside sampled ones: each has its own temperature in the batch.
    def beside(number: int) -> None:
        prompt, salt = ALONE[number % len(ALONE)], f"beside {number}"
        if number % 2:
            complete(cluster, list(prompt), max_tokens=ANSWER, temperature=0.8, seed=number, cache_salt=salt)
        else:
            asked.say(prompt, cache_salt=salt)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(beside, range(4))) == [None] * 4

        # A history, then twice at once what continues it: on the decode worker alone, or handed over.
        placement, known = CONTINUES[method]
        same = {"placement": placement, "cache_salt": placement}
        asked.history(same)
        for each in [pool.submit(asked.say, CONTINUED, **same) for _ in range(2)]:
            trace = each.result()
            if placement == "local" or trace["boundary_length"]:
                assert trace[known] > 0, "a prefix cache took part"

    assert asked.accepted(REPEATED, ANSWER) > 0
    assert asked.accepted(REPEATED, 1) <= 0, "the control: one token has no drafts"
