# SPDX-License-Identifier: Apache-2.0
"""One router process with all its faces, over worker doubles: the short way, gRPC, and vLLM's Rust front end.

The Rust front end is taken from `.peers/` (the benchmark of the router fetches it) or from vLLM's own wheel; without
one, its tests are skipped and the rest runs as it is.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from benchmarks.router.peers import found_front
from deltaserve.config import RouterConfig
from deltaserve.wire import api_pb2 as api
from deltaserve.wire.api_pb2_grpc import InferenceStub
from router.faces.rust_front import RustMissing, find
from tests.support.started_router import Router, Workers, wait_until

pytestmark = pytest.mark.cluster  # a router process of its own
PROGRAM = found_front()
rust = pytest.mark.skipif(PROGRAM is None, reason="python -m benchmarks.router has not fetched vllm-rs")
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "hi"}]
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    made = Workers()
    made.start()
    made.decode.knobs.step_seconds = 0.005
    yield made
    for double in (made.prefill, made.decode):
        made.call(double.stop())


@pytest.fixture(scope="module")
def router(workers: Workers) -> Iterator[Router]:
    options = {} if PROGRAM is None else {"front": "rust", "rust_binary": str(PROGRAM)}
    made = Router([workers.prefill, workers.decode], grpc_port=0, worker_wait=5.0, **options)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.fixture(scope="module")
def http(router: Router) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=60) as made:
        wait_until(lambda: made.get("/health").status_code == 200)
        yield made


@pytest.fixture(scope="module")
def channel(router: Router, http: httpx.Client) -> Iterator[grpc.Channel]:
    address = next(line.split()[1] for line in router.lines if line.startswith("GRPC "))
    with grpc.insecure_channel(address) as made:
        yield made


def child(router: Router) -> psutil.Process | None:
    """The Rust front end's process."""
    children = psutil.Process(router.process.pid).children()
    return next((each for each in children if "vllm-rs" in " ".join(each.cmdline()[:1])), None)


def wait_rust(router: Router) -> None:
    wait_until(lambda: any("vllm-rs serves" in line for line in router.errors), 120)


# ---- the short way


def events(answer: httpx.Response) -> list[Any]:
    """The events of a stream (or the one answer) without what differs from call to call."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        parts = [answer.text]
    else:
        parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    found: list[Any] = []
    for part in parts:
        if part == "[DONE]":
            found.append(part)
            continue
        event = json.loads(part)
        event.pop("created", None)
        event["id"] = event.get("id", "").split("-")[0]
        found.append(event)
    return found


def merged(found: list[Any]) -> list[Any]:
    """Text events joined into the first of them: how many tokens share an event is a matter of time."""
    result: list[Any] = []
    for event in found:
        previous = result[-1] if result else None
        if event != "[DONE]" and event.get("choices") and isinstance(previous, dict) and previous["choices"]:
            mine, theirs = event["choices"][0], previous["choices"][0]
            if (
                mine["finish_reason"] is None
                and theirs["finish_reason"] is None
                and "role" not in theirs.get("delta", {})
            ):
                if "text" in mine:
                    theirs["text"] += mine["text"]
                else:
                    theirs["delta"]["content"] += mine["delta"]["content"]
                continue
        result.append(event)
    return result


BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": TALK, "max_tokens": 6, "stream": True, "seed": 1}),
    (CHAT, {"messages": TALK, "max_tokens": 6, "stream": True, **USAGE}),
    (CHAT, {"messages": TALK, "max_tokens": 6}),
    (COMPLETION, {"prompt": "hello world", "max_tokens": 6, "stream": True}),
    (COMPLETION, {"prompt": "hello world", "max_tokens": 6, "stream": True, **USAGE}),
    (CHAT, {"messages": TALK, "max_tokens": 6, "stop": ["never"], "temperature": 0.5, "seed": 2}),
    (COMPLETION, {"prompt": "hello world", "max_tokens": 6}),
    (COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 6}),
    (COMPLETION, {"prompt": [5, 6, 7_000_000], "max_tokens": 6}),
    (COMPLETION, {"prompt": [5, 6, 7], "max_tokens": 6, "model": "nobody"}),
    (COMPLETION, {"prompt": "x" * 100_000, "max_tokens": 6, "stream": True}),
    (COMPLETION, {"prompt": "x", "max_tokens": -6}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_short_way_answers_as_the_whole_application(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    body = {"model": "demo", "kv_transfer_params": {"placement": "local"}, **body}  # which keeps vllm-rs out
    short = http.post(path, json=body)
    whole = http.post(path, json=body, headers={"origin": "http://a"})
    assert whole.headers.get("vary") == "Origin"
    if short.status_code == 200:
        assert "vary" not in short.headers  # so it was the short way
    assert short.status_code == whole.status_code
    assert short.headers["content-type"] == whole.headers["content-type"]
    assert merged(events(short)) == merged(events(whole))
    del body["kv_transfer_params"]
    shaped = {
        **body,
        "priority": 0,
    }  # keeps vllm-rs out as well, and may be of a shape: the second one is of a known one
    for _ in range(3):
        answer = http.post(path, json=shaped)
        assert answer.status_code == whole.status_code
        assert answer.headers["content-type"] == whole.headers["content-type"]
        assert merged(events(answer)) == merged(events(whole))


def test_the_next_request_of_a_shape_needs_no_handler(http: httpx.Client, workers: Workers) -> None:
    """vLLM's own counter of requests does not see it; a request of another shape is the control."""

    def ask(content: str, seed: int) -> float:
        body = {"model": "demo", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = http.post(CHAT, json={**body, "seed": seed, "priority": 0}).json()
        assert answer["usage"]["completion_tokens"] == 4
        lines = http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))

    first = ask("one", 91)
    assert ask("two words", 91) == first
    assert ask("two words", 92) == first + 1
    prompts = [list(add.prompt) for add in workers.decode.adds[-2:]]
    assert prompts[0] == prompts[1], "rendered without the handler, and with it"


def test_a_known_shape_fails_as_the_whole_application_does(http: httpx.Client, workers: Workers) -> None:
    body = {"model": "demo", "messages": TALK, "max_tokens": 5, "priority": 0}
    assert http.post(CHAT, json=body).status_code == 200
    workers.decode.knobs.refuse = True
    try:
        short, whole = http.post(CHAT, json=body), http.post(CHAT, json=body, headers={"origin": "http://a"})
    finally:
        workers.decode.knobs.refuse = False
    assert (short.status_code, short.json()) == (whole.status_code, whole.json())
    assert short.status_code == 500


def test_a_client_that_leaves_ends_its_request(http: httpx.Client, workers: Workers) -> None:
    before = len(workers.decode.aborted)
    body = {"model": "demo", "prompt": "x", "max_tokens": 8000, "stream": True, "cache_salt": "a"}
    with http.stream("POST", COMPLETION, json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: len(workers.decode.aborted) == before + 1)


# ---- gRPC


def test_grpc_answers_as_http_does(channel: grpc.Channel, http: httpx.Client) -> None:
    stub = InferenceStub(channel)
    sampling = api.Sampling(max_tokens=7, temperature=0)
    request = api.GenerateRequest(tokens=api.Tokens(ids=[5, 6, 7, 8]), sampling=sampling)
    whole = stub.Generate(request, timeout=60)
    parts = list(stub.GenerateStream(request, timeout=60))
    body = {"model": "demo", "prompt": [5, 6, 7, 8], "max_tokens": 7, "temperature": 0}
    wanted = http.post(COMPLETION, json={**body, "return_token_ids": True}).json()
    assert whole.text == "".join(part.text for part in parts) == wanted["choices"][0]["text"] != ""
    assert list(whole.token_ids) == wanted["choices"][0]["token_ids"]
    assert [token for part in parts for token in part.token_ids] == list(whole.token_ids)
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.finish_reason] == ["length"]
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 7)
    assert parts[-1].usage == whole.usage


def test_grpc_chats_and_stops(channel: grpc.Channel, http: httpx.Client) -> None:
    stub = InferenceStub(channel)
    chat = api.Chat(messages=[api.Message(role="user", content="hi")])
    request = api.GenerateRequest(chat=chat, sampling=api.Sampling(max_tokens=6, temperature=0))
    whole = stub.Generate(request, timeout=60)
    body = {"model": "demo", "messages": TALK, "max_tokens": 6, "temperature": 0}
    assert whole.text == http.post(CHAT, json=body).json()["choices"][0]["message"]["content"]
    request.sampling.stop.append(whole.text[3:5])
    stopped = stub.Generate(request, timeout=60)
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", whole.text[3:5])
    assert stopped.text == whole.text[: whole.text.index(whole.text[3:5])]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (api.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT),
        (api.GenerateRequest(prompt="x", model="nobody"), grpc.StatusCode.INVALID_ARGUMENT),
        (api.GenerateRequest(tokens=api.Tokens(ids=[10_000_000])), grpc.StatusCode.INVALID_ARGUMENT),
        (
            api.GenerateRequest(prompt="x", sampling=api.Sampling(temperature=-1)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
def test_what_grpc_refuses(
    channel: grpc.Channel, request_: api.GenerateRequest, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        InferenceStub(channel).Generate(request_, timeout=60)
    assert caught.value.code() == code
    assert caught.value.details()


def test_a_cancelled_call_ends_its_request(channel: grpc.Channel, workers: Workers) -> None:
    before = len(workers.decode.aborted)
    call = InferenceStub(channel).GenerateStream(
        api.GenerateRequest(prompt="x", sampling=api.Sampling(max_tokens=8000)), timeout=60
    )
    next(call)
    call.cancel()
    wait_until(lambda: len(workers.decode.aborted) == before + 1)


def test_grpc_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1
    with pytest.raises(grpc.RpcError):
        health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
    ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answer = next(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask, timeout=60))
    names = {service.name for service in answer.list_services_response.service}
    assert {"deltaserve.api.v1.Inference", "grpc.health.v1.Health"} <= names


# ---- vLLM's Rust front end


@rust
def test_rust_answers_what_is_plain(router: Router, http: httpx.Client, workers: Workers) -> None:
    wait_rust(router)
    body = {"model": "demo", "messages": TALK, "max_tokens": 6, "temperature": 0}
    by_rust = http.post(CHAT, json=body).json()
    by_vllm = http.post(CHAT, json={**body, "logprobs": False}).json()
    assert "weight_versions" in by_rust["choices"][0]  # only its answers have that field
    assert "weight_versions" not in by_vllm["choices"][0]
    assert by_rust["choices"][0]["message"]["content"] == by_vllm["choices"][0]["message"]["content"] != ""
    assert by_rust["usage"]["completion_tokens"] == by_vllm["usage"]["completion_tokens"] == 6
    stream = http.post(COMPLETION, json={"model": "demo", "prompt": "hello", "max_tokens": 6, "stream": True})
    whole = http.post(
        COMPLETION, json={"model": "demo", "prompt": "hello", "max_tokens": 6, "logprobs": 1}
    ).json()
    text = "".join(
        event["choices"][0]["text"] for event in events(stream) if event != "[DONE]" and event["choices"]
    )
    assert text == whole["choices"][0]["text"]
    assert events(stream)[-1] == "[DONE]"


@rust
def test_what_rust_lacks_goes_to_face_one(router: Router, http: httpx.Client) -> None:
    wait_rust(router)
    chat = {"model": "demo", "messages": TALK, "max_tokens": 3}
    assert len(http.post(CHAT, json={**chat, "n": 2, "temperature": 1}).json()["choices"]) == 2
    prompts = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 3}
    assert len(http.post(COMPLETION, json=prompts).json()["choices"]) == 2
    response = http.post("/v1/responses", json={"model": "demo", "input": "hi", "max_output_tokens": 3})
    assert response.status_code == 200
    message = http.post("/v1/messages", json=chat)
    assert message.status_code == 200


@rust
def test_rust_hears_that_a_client_has_gone(router: Router, http: httpx.Client, workers: Workers) -> None:
    wait_rust(router)
    before = len(workers.decode.aborted)
    body = {"model": "demo", "prompt": "x", "max_tokens": 8000, "stream": True}
    with http.stream("POST", COMPLETION, json=body) as answer:
        next(answer.iter_lines())
    wait_until(lambda: len(workers.decode.aborted) == before + 1)


@rust
def test_face_one_answers_while_rust_is_away(router: Router, http: httpx.Client) -> None:
    wait_rust(router)
    process = child(router)
    assert process is not None
    body = {"model": "demo", "prompt": "x", "max_tokens": 3000, "stream": True}
    with http.stream("POST", COMPLETION, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert "error" in json.loads(rest[-1].removeprefix("data: "))  # and no [DONE]
    plain = http.post(COMPLETION, json={"model": "demo", "prompt": "x", "max_tokens": 3})
    assert plain.status_code == 200
    wait_until(lambda: sum("vllm-rs serves" in line for line in router.errors) == 2, 120)
    again = http.post(CHAT, json={"model": "demo", "messages": TALK, "max_tokens": 3}).json()
    assert "weight_versions" in again["choices"][0]


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(RustMissing, match="rust_binary /nowhere/vllm-rs: is no program"):
        find(Path("/nowhere/vllm-rs"))


def test_a_rust_port_passes_no_keys_by(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without API keys"):
        RouterConfig(front="rust", rust_port=9000, api_keys=tmp_path / "keys.json")
    with pytest.raises(ValueError, match="only for front rust"):
        RouterConfig(rust_port=9000)


def test_everything_ends_with_the_router(router: Router, http: httpx.Client) -> None:
    process = child(router)
    router.process.send_signal(signal.SIGTERM)
    wait_until(lambda: router.process.poll() is not None, 60)
    assert router.process.returncode == 0
    if process is not None:
        end = time.monotonic() + 60
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.05)
