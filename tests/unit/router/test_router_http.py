# SPDX-License-Identifier: Apache-2.0
"""The router as a process, over worker doubles: the openai client, raw HTTP, the statuses of what goes wrong."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.patience import HUNG
from tests.support.started_router import MODEL, ROOT, Router, Workers, wait_until

pytestmark = pytest.mark.cluster  # a router process of its own
LONG = "the quick brown fox jumps over the lazy dog " * 5


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    for double in (made.prefill, made.decode):
        made.call(double.stop())


@pytest.fixture(scope="module")
def router(workers: Workers) -> Iterator[Router]:
    made = Router([workers.prefill, workers.decode])
    made.before_workers = httpx.get(f"{made.url}/health")
    workers.start()
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(autouse=True)
def _as_new(workers: Workers) -> None:
    workers.reset()


@pytest.fixture
def client(router: Router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture
def http(router: Router) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=30) as made:
        wait_until(lambda: made.get("/health").status_code == 200)
        yield made


def test_it_says_where_it_is_and_what_it_can_reach(router: Router, http: httpx.Client) -> None:
    stages = [line for line in router.lines if line.startswith("STAGE ")]
    assert stages
    assert router.lines[-1] == f"READY {router.url}\n"
    wait_until(lambda: http.get("/health").json()["status"] == "ok")
    report = http.get("/health").json()
    assert report["missing"] == []
    assert [report["roles"][role]["ready"] for role in ("prefill", "decode")] == [1, 1]


def test_it_is_ready_without_workers_and_says_what_is_missing(router: Router) -> None:
    response = router.before_workers
    assert response.status_code == 503
    assert response.json()["status"] == "unavailable"
    assert [text.partition(":")[0] for text in response.json()["missing"]] == ["decode", "prefill"]


def test_the_clients_calls(client: openai.OpenAI, workers: Workers) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    plain = client.completions.create(model="demo", prompt=LONG, max_tokens=12)
    parts = list(client.completions.create(model="demo", prompt=LONG, max_tokens=12, stream=True))
    assert plain.choices[0].finish_reason == "length"
    assert "".join(part.choices[0].text for part in parts) == plain.choices[0].text != ""
    assert plain.usage.completion_tokens == 12
    assert [add.WhichOneof("handoff") for add in workers.decode.adds] == ["load", "load"]
    wait_until(lambda: len(workers.prefill.released) == 2)
    messages = [{"role": "user", "content": "hi"}]
    chat = client.chat.completions.create(model="demo", messages=messages, max_tokens=6)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=messages, max_tokens=6, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat.choices[0].message.content != ""
    assert chunks[-1].usage.completion_tokens == 6


def test_stops_children_and_log_probs(client: openai.OpenAI, workers: Workers) -> None:
    workers.decode.knobs.stop_after = 4
    answer = client.completions.create(
        model="demo", prompt=LONG, max_tokens=12, n=3, temperature=1, logprobs=2
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    for choice in answer.choices:
        assert len(choice.logprobs.tokens) == 4
        assert len(choice.logprobs.top_logprobs[0]) == 3
    assert len(workers.prefill.adds) == len(workers.decode.adds) == 3
    wait_until(lambda: len(workers.prefill.released) == 3 and not workers.prefill.boundaries)


def test_a_stop_string_ends_the_request_on_the_worker(
    client: openai.OpenAI, router: Router, workers: Workers
) -> None:
    workers.decode.knobs.step_seconds = 0.01
    whole = client.completions.create(model="demo", prompt=LONG, max_tokens=8).choices[0].text
    answer = client.completions.create(model="demo", prompt=LONG, max_tokens=300, stop=[whole[5:9]])
    trace = httpx.get(f"{router.url}/deltaserve/requests/{answer.id}").json()
    assert (trace["status"], trace["finish_reason"]) == ("finished", "stop")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(whole[5:9])]
    wait_until(lambda: len(workers.decode.aborted) == 1 and len(workers.prefill.released) == 2)


def test_cached_tokens_and_the_trace(http: httpx.Client, workers: Workers) -> None:
    workers.prefill.knobs.cached_tokens = 32
    body = {"model": "demo", "prompt": LONG, "max_tokens": 4}
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-7"}).json()
    assert answer["id"] == "cmpl-my-7"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    tokens = answer["usage"]["prompt_tokens"]
    for name in ("cmpl-my-7", "my-7"):
        trace = http.get(f"/deltaserve/requests/{name}").json()
        assert (trace["route"], trace["status"]) == ("handover p0 d0", "finished")
        assert (trace["prompt_tokens"], trace["from_store"], trace["recomputed"]) == (tokens, tokens - 1, 1)
    body["prompt"] = [LONG, "short"]
    answer = http.post("/v1/completions", json=body).json()
    trace = http.get(f"/deltaserve/requests/{answer['id']}").json()
    assert [part["route"] for part in trace["parts"]] == ["handover p0 d0", "local short_prompt d0"]
    assert http.get("/deltaserve/requests/unknown").status_code == 404


def test_a_placement_of_ones_own(client: openai.OpenAI, workers: Workers) -> None:
    for placement in ("local", "handover"):
        client.completions.create(
            model="demo",
            prompt=LONG,
            max_tokens=2,
            extra_body={"kv_transfer_params": {"placement": placement}},
        )
    assert [add.WhichOneof("handoff") for add in workers.decode.adds] == [None, "load"]


COMPLETION = {"model": "demo", "prompt": "hello", "max_tokens": 2}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/completions", b"{not json", 400),
        ("POST", "/v1/completions", b'{"model": "demo", "prompt": "\xff"}', 400),
        ("POST", "/v1/completions", b"[" * 100_000, 400),
        ("POST", "/v1/completions", {**COMPLETION, "model": "other"}, 404),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "other", "messages": [{"role": "user", "content": "x"}]},
            404,
        ),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": [5] * 17_000}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "max_tokens": -1}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "temperature": -1}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "prompt": [10_000_000]}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "kv_transfer_params": {"placement": "nowhere"}}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "kv_transfer_params": {"boundary": "b"}}, 400),
        ("POST", "/v1/completions", {**COMPLETION, "vllm_xargs": {"kv_transfer_params": "x"}}, 400),
        ("POST", "/v1/completions", b"x" * (9 << 20), 413),
        ("GET", "/nothing/here", None, 404),
        ("POST", "/scale_elastic_ep", {}, 404),
        ("POST", "/inference/v1/generate", {}, 404),
        ("GET", "/v1/completions", None, 405),
        ("POST", "/v1/models", {}, 405),
    ],
)
def test_what_is_refused(http: httpx.Client, method: str, path: str, body: Any, status: int) -> None:
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    response = http.request(method, path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == status
    assert error["message"]


def test_a_chunked_body_over_the_limit(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=(b"x" * 65536 for _ in range(200)))
    assert response.status_code == 413


def test_metrics(http: httpx.Client, client: openai.OpenAI) -> None:
    client.completions.create(model="demo", prompt=LONG, max_tokens=2)
    text = http.get("/metrics").text
    assert "vllm:time_to_first_token_seconds_count" in text
    assert 'deltaserve_router_local_prefill_total{reason="no_prefill_worker"}' in text
    assert 'deltaserve_router_workers{role="decode",state="ready"} 1.0' in text


def test_tokenize(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"model": "demo", "prompt": "hello"}).json()["tokens"]
    assert (
        http.post("/detokenize", json={"model": "demo", "tokens": tokens}).json()["prompt"].endswith("hello")
    )


def test_many_streams_at_once(client: openai.OpenAI, workers: Workers) -> None:
    def one(i: int) -> str:
        stream = client.completions.create(model="demo", prompt=f"{LONG} {i}", max_tokens=20, stream=True)
        return "".join(part.choices[0].text for part in stream)

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(one, range(48)))
    assert all(texts)
    again = client.completions.create(model="demo", prompt=f"{LONG} 7", max_tokens=20)
    assert texts[7] == again.choices[0].text
    wait_until(lambda: len(workers.prefill.released) == 49)


def test_a_client_that_leaves_is_noticed(http: httpx.Client, workers: Workers) -> None:
    workers.decode.knobs.step_seconds = 0.02
    body = {"model": "demo", "prompt": LONG, "max_tokens": 500, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: len(workers.decode.aborted) == 1 and len(workers.prefill.released) == 1)
    assert workers.decode.held == 0


def test_a_client_that_gives_up_waiting_is_noticed(http: httpx.Client, workers: Workers) -> None:
    body = {"model": "demo", "prompt": "the fox", "max_tokens": 300}
    for _ in range(2):  # the second one is of a known shape
        assert http.post("/v1/completions", json=body).status_code == 200
    assert workers.decode.aborted == [], "the control"
    workers.decode.knobs.step_seconds = 0.05
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=body, timeout=1.0)
    wait_until(lambda: len(workers.decode.aborted) == 1)
    assert workers.decode.held == 0


def test_decode_dies_mid_stream_and_comes_back(router: Router, http: httpx.Client, workers: Workers) -> None:
    workers.decode.knobs.step_seconds = 0.02
    port = workers.decode.port
    body = {"model": "demo", "prompt": LONG, "max_tokens": 500, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        workers.call(workers.decode.die())
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert not any("[DONE]" in line for line in rest)
    wait_until(lambda: http.get("/health").status_code == 503)
    report = http.get("/health").json()
    assert report["status"] == "unavailable"
    assert any(text.startswith("decode:") for text in report["missing"])
    began = time.monotonic()
    for stream in (False, True):
        response = http.post("/v1/completions", json={**COMPLETION, "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert "decode worker" in response.json()["error"]["message"]
    assert time.monotonic() - began < HUNG
    workers.call(workers.decode.start(port))
    wait_until(lambda: http.get("/health").status_code == 200)
    assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_a_stream_goes_on_when_decode_comes_back(http: httpx.Client, workers: Workers) -> None:
    port = workers.decode.port
    whole = http.post("/v1/completions", json={"model": "demo", "prompt": LONG, "max_tokens": 60}).json()
    workers.decode.knobs.step_seconds = 0.02
    body = {"model": "demo", "prompt": LONG, "max_tokens": 60, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        begun = [next(lines), next(lines), next(lines)]
        workers.call(workers.decode.die())
        workers.call(workers.decode.start(port))
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    parts = [json.loads(line.removeprefix("data: ")) for line in [*filter(None, begun), *rest[:-1]]]
    assert "".join(part["choices"][0]["text"] for part in parts) == whole["choices"][0]["text"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert workers.decode.adds[-1].history


def test_prefill_dies_and_comes_back(http: httpx.Client, workers: Workers) -> None:
    port = workers.prefill.port
    workers.call(workers.prefill.die())
    wait_until(lambda: http.get("/health").json()["status"] == "degraded")
    assert http.post("/v1/completions", json={**COMPLETION, "prompt": LONG}).status_code == 200
    assert [add.WhichOneof("handoff") for add in workers.decode.adds] == [None]
    workers.call(workers.prefill.start(port))
    wait_until(lambda: http.get("/health").json()["status"] == "ok")
    assert http.post("/v1/completions", json={**COMPLETION, "prompt": LONG}).status_code == 200
    assert [add.WhichOneof("handoff") for add in workers.decode.adds] == [None, "load"]


def test_memory(router: Router) -> None:
    assert psutil.Process(router.process.pid).memory_info().rss < 800 << 20


def test_a_signal_ends_it_with_a_stream_open(router: Router, http: httpx.Client, workers: Workers) -> None:
    workers.decode.knobs.step_seconds = 0.05
    body = {"model": "demo", "prompt": LONG, "max_tokens": 2000, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        router.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        rest = [line for line in lines if line]
    router.process.wait(30)
    assert time.monotonic() - began < HUNG
    assert router.process.returncode == 0
    assert "error" in json.loads(rest[-1].removeprefix("data: "))
    assert "Traceback" not in "".join(router.errors)
    wait_until(lambda: workers.decode.held == 0 and not workers.prefill.boundaries)


# ---- starts that fail


def run_to_the_end(**config: Any) -> subprocess.CompletedProcess[str]:
    settings = {"model": str(MODEL), "port": 0, **config}
    command = [sys.executable, "-m", "tests.doubles.router_process", json.dumps(settings), "[]"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_that_is_taken() -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        done = run_to_the_end(port=port)
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_context_that_the_model_was_not_made_for() -> None:
    done = run_to_the_end(max_model_len=1_000_000)
    assert done.returncode == 1
    assert "--max-model-len" in done.stderr
    assert "32768" in done.stderr


@pytest.mark.parametrize("case", ["missing", "no tokenizer", "not hybrid", "no config"])
def test_a_model_that_cannot_be_served(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "model"
    if case != "missing":
        folder.mkdir()
    config = json.loads((MODEL / "config.json").read_text())
    if case == "not hybrid":
        del config["linear_attn_config"]
        (folder / "tokenizer.json").write_text("{}")
    if case in ("no tokenizer", "not hybrid"):
        (folder / "config.json").write_text(json.dumps(config))
    done = run_to_the_end(model=str(folder))
    assert done.returncode == 1
    assert done.stderr.count("error: ") == 1
    assert str(folder) in done.stderr
    assert "Traceback" not in done.stderr
