# SPDX-License-Identifier: Apache-2.0
"""Processes of a real cluster die or hang while it serves: answers stay right, it is counted, and it heals.

One cluster serves all tests here; each ends with a handover that works. What was lost shows in the answers' traces:
a test that only looked at answers would pass with a cluster that never hands anything over.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from deltaserve.up import Cluster
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import call, complete, metric, records, stored_objects
from tests.support.cluster import DEMO, cluster_config
from tests.support.patience import HUNG
from tests.support.processes import wait_until

pytestmark = pytest.mark.cluster
PROMPT = list(PromptMaker(DEMO).make(300).tokens)
LONG = list(PromptMaker(DEMO).make(3000).tokens)
HEAL_SECONDS = 60.0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster that these tests break. It keeps no checkpoints, so that whatever stays is seen."""
    config = cluster_config(
        tmp_path_factory.mktemp("faults"),
        router_options={"prefill_timeout": 8.0, "resume_wait": 150.0},
        prefill_options={"checkpoint_bytes": 0},
        decode_options={"checkpoint_bytes": 0},
    )
    with Cluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def right(faulty: Cluster) -> dict[int, list[int]]:
    """The right answers, by length of the prompt."""
    return {len(prompt): complete(faulty, prompt, cache_salt="right")["tokens"] for prompt in (PROMPT, LONG)}


_salts = iter(range(1_000_000))


def ask(cluster: Cluster, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """A forced handover of a prompt that no cache knows."""
    return complete(cluster, prompt, cache_salt=f"faults-{next(_salts)}", **fields)


def wait_healed(cluster: Cluster) -> None:
    """Until a whole handover works, and the health is as at the start."""

    def works() -> bool:
        if call(cluster.endpoint + "/health")[1].get("status") != "ok":
            return False
        return bool(ask(cluster)["trace"]["from_store"] == len(PROMPT) - 1)

    wait_until(works, HEAL_SECONDS, "healed")
    wait_until(lambda: not records(cluster), HEAL_SECONDS, "the ledger is empty")


def locals_counted(cluster: Cluster) -> float:
    """Prompts that a decode worker computed, whatever the reason."""
    return metric(cluster, "deltaserve_router_local_prefill_total")


class Stream:
    """A request that runs in a thread while something breaks."""

    def __init__(self, cluster: Cluster, tokens: int, **fields: Any) -> None:
        self.pieces = 0
        self.text = ""
        self.reason: str | None = None
        self.error: Exception | None = None
        self._client = openai.OpenAI(base_url=cluster.endpoint + "/v1", api_key="none", max_retries=0)
        self._arguments: dict[str, Any] = {
            "model": cluster.served_model_name,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "extra_body": {"ignore_eos": True, "kv_transfer_params": {"placement": "handover"}},
        }
        self._arguments["extra_body"].update(fields)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        wait_until(lambda: self.pieces > 0 or not self._thread.is_alive(), 60, "the first token")

    def _run(self) -> None:
        try:
            for chunk in self._client.completions.create(**self._arguments):
                self.pieces += 1
                if chunk.choices:
                    self.text += chunk.choices[0].text
                    self.reason = chunk.choices[0].finish_reason
        except Exception as error:
            self.error = error

    def end(self, timeout: float = 180) -> None:
        """Wait for its end."""
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the stream hangs"


def test_prefill_worker_killed_in_service(faulty: Cluster, right: dict[int, list[int]]) -> None:
    before = locals_counted(faulty)
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(ask, faulty, LONG) for _ in range(4)]
        time.sleep(0.5)
        faulty.kill("prefill-0", hold=True)
        answers = [each.result() for each in work]
    assert all(answer["tokens"] == right[len(LONG)] for answer in answers)
    assert any(answer["trace"]["route"].startswith("local") for answer in answers)
    wait_until(
        lambda: call(faulty.endpoint + "/health")[1]["missing"] != [], 15, "health says what is missing"
    )
    status, health = call(faulty.endpoint + "/health")
    assert (status, health["status"]) == (200, "degraded")
    later = ask(faulty)
    assert later["tokens"] == right[len(PROMPT)]
    assert later["trace"]["route"].startswith("local no_prefill_worker")
    assert later["trace"]["recomputed"] == len(PROMPT)
    assert locals_counted(faulty) > before
    faulty.restart("prefill-0")
    faulty.wait_ready("prefill-0", 120)
    wait_healed(faulty)


def test_prefill_worker_hangs(faulty: Cluster, right: dict[int, list[int]]) -> None:
    faulty.kill("prefill-0", signal.SIGSTOP)
    try:
        began = time.monotonic()
        answer = ask(faulty)
        assert time.monotonic() - began < HUNG
        assert answer["tokens"] == right[len(PROMPT)]
        assert answer["trace"]["route"].startswith("local")
    finally:
        faulty.kill("prefill-0", signal.SIGCONT)
    wait_healed(faulty)


def test_etcd_killed_in_service(faulty: Cluster, right: dict[int, list[int]]) -> None:
    stream = Stream(faulty, 200)
    faulty.kill("etcd", hold=True)
    try:
        for _ in range(3):
            assert ask(faulty)["tokens"] == right[len(PROMPT)]
        time.sleep(7)  # longer than the lease: members must not be forgotten because nobody can be asked
        answer = ask(faulty)
        assert answer["tokens"] == right[len(PROMPT)]
        assert answer["trace"]["from_store"] == 0, "nothing can be committed without the ledger"
        stream.end()
        assert (stream.error, stream.reason) == (None, "length")
    finally:
        faulty.restart("etcd")
    faulty.wait_ready("etcd", 30)
    wait_healed(faulty)


def test_mooncake_master_killed_in_service(faulty: Cluster, right: dict[int, list[int]]) -> None:
    stream = Stream(faulty, 200)
    before = locals_counted(faulty) + metric(faulty, "deltaserve_router_load_failures_total")
    faulty.kill("master", hold=True)
    try:
        began = time.monotonic()
        answer = ask(faulty)
        assert answer["tokens"] == right[len(PROMPT)]
        assert answer["trace"]["from_store"] == 0
        assert time.monotonic() - began < HUNG, "every wait has a deadline"
        assert locals_counted(faulty) + metric(faulty, "deltaserve_router_load_failures_total") > before
        stream.end()
        assert (stream.error, stream.reason) == (None, "length")
    finally:
        faulty.restart("master")
    faulty.wait_ready("master", 30)
    wait_healed(faulty)
    wait_until(lambda: stored_objects(faulty) == 0, 30, "the store is empty")


SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 40}}, "required": ["a"]}
STREAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5},
    {"ignore_eos": False, "structured_outputs": {"json": SCHEMA}},
]
"""What must go on exactly: greedy, seeded with penalties, and under a grammar."""


def test_without_a_decode_worker_503_and_streams_go_on_when_it_is_back(faulty: Cluster) -> None:
    wholes = [Stream(faulty, 120, **fields) for fields in STREAMS]
    for whole in wholes:
        whole.end()
    streams = [Stream(faulty, 120, **fields) for fields in STREAMS]
    faulty.kill("decode-0", hold=True)
    try:
        before = [stream.pieces for stream in streams]
        assert any(seen < whole.pieces for seen, whole in zip(before, wholes, strict=True)), "killed too late"
        wait_until(lambda: call(faulty.endpoint + "/health")[0] == 503, 30, "health says 503")
        body = {"model": faulty.served_model_name, "prompt": PROMPT, "max_tokens": 2}
        status, document = call(faulty.endpoint + "/v1/completions", body)
        assert (status, "decode" in document["error"]["message"]) == (503, True)
    finally:
        faulty.restart("decode-0")
    faulty.wait_ready("decode-0", 120)
    for stream, whole in zip(streams, wholes, strict=True):
        stream.end()
        assert (stream.error, stream.reason) == (None, whole.reason)
        assert stream.text == whole.text, "no token lost, none repeated"
    assert metric(faulty, "deltaserve_router_resume_seconds_count") > 0
    wait_healed(faulty)


def test_router_killed_gives_back_its_boundaries(faulty: Cluster) -> None:
    stream = Stream(faulty, 2000)
    assert len(records(faulty)) == 1, "the control: there is something to give back"
    starts = faulty.statuses["router"].starts
    faulty.kill("router")
    stream.end(30)
    assert stream.error is not None
    wait_until(lambda: not records(faulty), 30, "its boundary is released without it")
    faulty.wait_ready("router", 120, after_start=starts)
    wait_healed(faulty)
    wait_until(lambda: stored_objects(faulty) == 0, 30, "the store is empty")
