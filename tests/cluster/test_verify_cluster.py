# SPDX-License-Identifier: Apache-2.0
"""`deltaserve verify` on real clusters, and its negative controls: damage found, damage felt, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import VerifyConfig
from deltaserve.up import Cluster
from deltaserve.verify.main import verify
from deltaserve.verify.prompts import PromptMaker
from tests.cluster.calls import complete, records, stored_objects
from tests.support.cluster import DEMO
from tests.support.patience import HUNG
from tests.support.processes import MARK, marked, new_mark, wait_until

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(600)
def test_answers_are_those_of_one_engine_at_every_length(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    lines: list[str] = []
    judgement = verify(VerifyConfig(endpoint=cluster.endpoint, model=DEMO, json_file=out), lines.append)
    assert judgement.passed, "\n".join(lines)
    document = json.loads(out.read_text())
    assert (document["different"], document["max_logprob_difference"] < 1e-3) == (0, True)
    handed_over = [r for r in document["results"] if r["placement"] == "handover"]
    assert {r["prompt_tokens"] for r in handed_over} >= {
        1,
        2,
        3,
        4,
        15,
        16,
        17,
        127,
        128,
        129,
        500,
        1000,
        3000,
    }
    assert {r["mode"] for r in handed_over} == {"greedy", "seeded"}
    for result in handed_over:
        assert result["from_store"] == result["prompt_tokens"] - 1, result
        assert result["recomputed"] == 1, result
    wait_until(lambda: not records(cluster), 30, "the ledger is empty")
    wait_until(lambda: stored_objects(cluster) == 0, 30, "the store is empty")


def test_a_boundary_is_in_ledger_and_store_while_its_request_runs(cluster: Cluster) -> None:
    # The control of "nothing is left": with these eyes something is seen when something is there.
    import openai

    client = openai.OpenAI(base_url=cluster.endpoint + "/v1", api_key="none", max_retries=0, timeout=120)
    prompt = list(PromptMaker(DEMO).make(129).tokens)
    with client.completions.create(
        model=cluster.served_model_name,
        prompt=prompt,
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True, "kv_transfer_params": {"placement": "handover"}},
    ) as stream:
        next(iter(stream))
        held = [record for record in records(cluster) if not record.reusable]
        assert [(r.state, r.length) for r in held] == [("committed", 128)]
        assert stored_objects(cluster) == len(held[0].objects()) == 2
    wait_until(lambda: not records(cluster) and stored_objects(cluster) == 0, 30, "released")


def test_a_prefix_held_by_both_workers_is_handed_over_right(cluster: Cluster) -> None:
    """A full prefix hit on the prefill side, and a partial one on the decode side."""
    prompt = list(PromptMaker(DEMO).make(600, 3).tokens)
    first = complete(cluster, prompt)
    assert first["trace"]["from_store"] == 599
    second = complete(cluster, prompt)
    assert second["trace"]["prefill_cached"] > 0, "the prefill worker knows the prompt"
    assert second["trace"]["from_store"] + second["trace"]["local"] == 599
    assert second["trace"]["recomputed"] == 1
    assert second["tokens"] == first["tokens"]
    assert second["logprobs"] == pytest.approx(first["logprobs"], abs=1e-3)


def _run(arguments: list[str], tmp_path: Path, mark: str, timeout: float) -> tuple[int, str]:
    """The command with clusters of its own; nothing of it may live afterwards."""
    (tmp_path / "temporary").mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "deltaserve", "verify", "--model", str(DEMO), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path / "temporary")},
        timeout=timeout,
        check=False,
    )
    wait_until(lambda: not marked(mark), 30, "every process has ended")
    assert not list((tmp_path / "temporary").iterdir()), "temporary files stay"
    return done.returncode, done.stdout.decode()


def _quick(tmp_path: Path) -> list[str]:
    return ["--quick", "--run-dir", str(tmp_path / "run"), "--json", str(tmp_path / "result.json")]


@pytest.mark.timeout(450)
def test_every_damage_is_found_and_no_answer_is_made_of_it(tmp_path: Path) -> None:
    code, output = _run([*_quick(tmp_path), "--damage", "each"], tmp_path, new_mark(), 400)
    assert code == 0, output
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["found"] == document["damaged"] == 12, output
    assert document["different"] == 0
    loads = [r for r in document["results"] if r["prompt_tokens"] > 1]
    assert {r["failure"] for r in loads} == {"digest", "size", "null_state", "epoch", "geometry"}
    assert all(r["from_store"] == 0 and r["recomputed"] == r["prompt_tokens"] for r in loads)


@pytest.mark.timeout(450)
def test_exchanged_states_change_answers_where_nothing_verifies(tmp_path: Path) -> None:
    code, output = _run([*_quick(tmp_path), "--damage", "swap"], tmp_path, new_mark(), 400)
    assert code == 0, output
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["damaged"] == 11
    assert document["found"] >= 9, output
    recall = [r for r in document["results"] if r["recalled"] and r["prompt_tokens"] >= 33]
    assert sum(not r["tokens_equal"] for r in recall) > 0, "not only log-probs: answers"


def test_interrupted_while_it_starts_it_leaves_nothing(tmp_path: Path) -> None:
    mark = new_mark()
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltaserve", "verify", "--model", str(DEMO), *_quick(tmp_path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark},
        )
    try:
        wait_until(
            lambda: "decode-0: starting" in log.read_text() or process.poll() is not None, 200, "starting"
        )
        assert process.poll() is None, log.read_text()
        wait_until(lambda: len(marked(mark)) > 3, 30, "processes run")
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(30) == 130, log.read_text()
        assert time.monotonic() - began < HUNG
    finally:
        process.kill()
    wait_until(lambda: not marked(mark), 30, "every process has ended")


def test_what_a_run_needs_is_checked_before_anything_starts(tmp_path: Path) -> None:
    mark = new_mark()
    for arguments, words in (
        (["--model", str(tmp_path / "none")], "no such folder"),
        (["--endpoint", "http://127.0.0.1:9", "--damage", "flip"], "damage"),
        (["--lengths", "20000"], "max_model_len"),
    ):
        done: Any = subprocess.run(
            [sys.executable, "-m", "deltaserve", "verify", "--model", str(DEMO), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, MARK: mark},
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not marked(mark)
