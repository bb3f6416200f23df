# SPDX-License-Identifier: Apache-2.0
"""Boundaries read beside their commit (docs/early_reads.md) by real engines: answers are those of no handover, came by
the early leg, and nothing is left. TP 1 to TP 1, and to TP 2 with DCP 2, where every rank is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import complete, metric, records
from tests.support.cluster import DEMO, cluster_config
from tests.support.cluster_gauges import all_came_back
from tests.support.processes import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LENGTHS = (2, 17, 129, 600, 1300)
USED = 'deltaserve_router_early_reads_total{outcome="used"}'


@pytest.fixture(scope="module", params=[(1, 1), (2, 2)], ids=["1-1", "2-2"])
def early(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tp, dcp = request.param
    config = cluster_config(
        tmp_path_factory.mktemp("early"), decode_tp=tp, decode_dcp=dcp, router_options={"early_reads": True}
    )
    with Cluster(config) as running:
        yield running


def used(cluster: Cluster) -> float:
    return metric(cluster, USED)


def test_answers_are_exact_one_by_one_and_at_once(early: Cluster) -> None:
    maker = PromptMaker(DEMO)
    # Of other material each: of two at once with the same beginning one commits with the other's checkpoint, which is
    # not what was told before.
    prompts = [list(maker.make(length, length).tokens) for length in LENGTHS]
    before = used(early)
    right = [complete(early, prompt, placement="local", cache_salt="local") for prompt in prompts]
    assert used(early) == before, "the control: a prompt that is not handed over is not read early"
    alone = [complete(early, prompt, cache_salt="alone") for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(pool.map(lambda prompt: complete(early, prompt, cache_salt="at once"), prompts))
    for answers in (alone, at_once):
        for prompt, answer, expected in zip(prompts, answers, right, strict=True):
            assert answer["trace"]["from_store"] == len(prompt) - 1
            assert answer["trace"]["attempts"] == 1
            assert answer["tokens"] == expected["tokens"]
            assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
    assert used(early) == before + 2 * len(prompts)
    for outcome in ("withdrawn", "dropped", "aside"):
        assert metric(early, f'deltaserve_router_early_reads_total{{outcome="{outcome}"}}') == 0
    wait_until(lambda: all(record.reusable for record in records(early)), 30, "boundaries are released")
    all_came_back_but_checkpoints(early)


def all_came_back_but_checkpoints(cluster: Cluster) -> None:
    """What is kept for others is no request's."""
    kept = [record for record in records(cluster) if record.reusable]
    if kept:
        wait_until(lambda: metric(cluster, "deltaserve_router_in_flight") == 0, 30, "no request is held")
    else:
        all_came_back(cluster, 60)


def test_the_next_turn_rests_on_what_an_early_read_brought(early: Cluster) -> None:
    """Its answer's end is a checkpoint that rests on checkpoints of the commit that was read beside."""
    prompt = list(PromptMaker(DEMO).make(1200, 7).tokens)
    before = used(early)
    first = complete(early, prompt, cache_salt="turns", max_tokens=40)
    longer = [*prompt, *first["tokens"], *PromptMaker(DEMO).make(30, 8).tokens]
    second = complete(early, longer, cache_salt="turns", max_tokens=8)
    expected = complete(early, longer, placement="local", cache_salt="alone again", max_tokens=8)
    assert second["tokens"] == expected["tokens"]
    assert second["trace"]["from_store"] + second["trace"]["local"] == len(longer) - 1
    assert used(early) == before + 2
