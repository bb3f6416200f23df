# SPDX-License-Identifier: Apache-2.0
"""Layers that leave while the pass goes on (docs/layer_streams.md), by real engines: hooks behind vLLM's own layers
tell of them on both ranks, and answers are those of no handover."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltaserve.up import Cluster, ports
from deltaserve.verify.prompts import PromptMaker
from statestore.connector.passing import GROUPS_VARIABLE
from tests.cluster.calls import call, complete, sample_of
from tests.support.cluster import DEMO, cluster_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

LENGTHS = (40, 300, 700, 1300)
"""The first is a step too short to be streamed."""


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    first = next(port for port in ports.choose(8) if ports.is_free("127.0.0.1", port + 1))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(GROUPS_VARIABLE, "3")
        config = cluster_config(tmp_path_factory.mktemp("streaming"), metrics_port=first, prefill_tp=2)
        with Cluster(config) as running:
            yield running


def prefilled(cluster: Cluster) -> tuple[float, float]:
    """Bytes that the prefill worker has published, and how many of them while their steps went on."""
    found = [call(f"http://127.0.0.1:{cluster.config.metrics_port + n}/metrics")[1]["text"] for n in (0, 1)]
    published, streamed = (
        [sample_of(text, f"deltaserve_handoff_{name}") for text in found]
        for name in ('bytes_total{stage="publish"}', "streamed_bytes_total")
    )
    return max(published), max(streamed)


def test_answers_are_exact_and_bytes_left_early(streaming: Cluster) -> None:
    maker = PromptMaker(DEMO)
    prompts = [list(maker.make(length, length).tokens) for length in LENGTHS]
    right = [complete(streaming, prompt, placement="local", cache_salt="local") for prompt in prompts]
    assert prefilled(streaming) == (0, 0), "the control: nothing was handed over"
    complete(streaming, prompts[0], cache_salt="short")
    assert prefilled(streaming)[1] == 0, "the control: a short step is not streamed"
    alone = [complete(streaming, prompt, cache_salt="alone") for prompt in prompts]
    published, streamed = prefilled(streaming)
    assert streamed > 0.3 * published
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = list(
            pool.map(lambda prompt: complete(streaming, prompt, cache_salt="at once"), prompts, timeout=300)
        )
    for answers in (alone, at_once):
        for prompt, answer, expected in zip(prompts, answers, right, strict=True):
            assert answer["trace"]["from_store"] == len(prompt) - 1
            assert answer["tokens"] == expected["tokens"]
            assert answer["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
