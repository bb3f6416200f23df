# SPDX-License-Identifier: Apache-2.0
"""Every request gets the answer that one vLLM server with the same model gives, as JSON, whatever its endpoint.

The single server's answers are recorded first, and it is stopped: two cores hold one of them at a time. The cluster
then runs as it would in production: HTTPS, API keys, mutual TLS to its workers, and its logs are searched for secrets.
tests/cluster/parity.py says what may differ, tests/cluster/parity_requests.py what is sent.
"""

from __future__ import annotations

import copy
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import LogConfig
from deltaserve.up import Cluster
from tests.cluster.parity import Answer, cached_tokens_differ, differences
from tests.cluster.parity_requests import REASONING_PARSER, RECALL, TOOL_PARSER, Request, requests
from tests.support.cluster import cluster_config
from tests.support.pki import make_certificates
from tests.support.processes import wait_until
from tests.support.single_server import single_server

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

REQUESTS = requests()
SECRET, OTHER_SECRET = "a-secret-that-nobody-guesses", "another-secret-that-nobody-guesses"
WRONG_SECRET = "wrong-secret-that-somebody-tried"
IN_LOGS = "seen-in-logs-if-anything-is"
"""A request's id, which the router's log names."""


@dataclass
class Recorded:
    """What both servers said."""

    single: dict[str, Answer] = field(default_factory=dict)
    cluster: dict[tuple[str, str], Answer] = field(default_factory=dict)
    """By name and placement."""
    running: Running | None = None


class Running:
    """The cluster and how it is called."""

    def __init__(self, cluster: Cluster, authority: Path) -> None:
        self.cluster = cluster
        self._context = ssl.create_default_context(cafile=str(authority))

    def send(self, request: Request, placement: str = "", key: str = SECRET) -> Answer:
        """The answer, with the router's trace."""
        answer = send(
            self.cluster.endpoint,
            placed(request, placement),
            self._context,
            {"Authorization": f"Bearer {key}"},
        )
        found = self.get(f"/deltaserve/requests/{answer.response_id() or 'none'}")
        return replace(answer, trace=json.loads(found.body) if found.status == 200 else None)

    def get(self, path: str, key: str = SECRET) -> Answer:
        """A GET."""
        return send(
            self.cluster.endpoint, Request("", path), self._context, {"Authorization": f"Bearer {key}"}
        )

    def logs(self) -> str:
        """Everything that any process of the cluster has written."""
        return "\n".join(
            path.read_text(errors="replace")
            for path in sorted(self.cluster.run_dir.rglob("*"))
            if path.is_file()
        )


def placed(request: Request, placement: str) -> Request:
    """The request under a placement of its own, where the endpoint takes one."""
    if (
        request.body is None
        or not placement
        or request.path not in ("/v1/completions", "/v1/chat/completions")
    ):
        return request
    return replace(request, body={**request.body, "kv_transfer_params": {"placement": placement}})


def send(
    url: str, request: Request, context: ssl.SSLContext | None = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request over HTTP."""
    data = request.raw if request.raw is not None else None
    sent = {**request.headers, **(headers or {})}
    if request.body is not None:
        data = json.dumps(request.body).encode()
        sent["Content-Type"] = "application/json"
    call = urllib.request.Request(url + request.path, data, sent)
    try:
        with urllib.request.urlopen(call, timeout=240, context=context) as reply:
            return Answer(reply.status, reply.read().decode(), request.streamed)
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(), request.streamed)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("parity")
    result = Recorded()
    parsers = {"tool_parser": TOOL_PARSER, "reasoning_parser": REASONING_PARSER}
    log = LogConfig(format="json", level="debug")
    config = cluster_config(folder / "run", placement="handover", log=log, **parsers)
    flags = [
        "--served-model-name=demo",
        "--enable-prompt-tokens-details",
        "--enable-auto-tool-choice",
        f"--tool-call-parser={TOOL_PARSER}",
        f"--reasoning-parser={REASONING_PARSER}",
    ]
    with single_server(config, folder / "single.log", flags) as url:
        for request in REQUESTS:
            result.single[request.name] = send(url, request)
    with Cluster(_secured(config, folder)) as cluster:
        result.running = Running(cluster, folder / "ca.pem")
        for request in REQUESTS:
            for placement in request.placements:
                result.cluster[request.name, placement] = result.running.send(request, placement)
        yield result


def _secured(config: Any, folder: Path) -> Any:
    make_certificates(folder, "router")
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"a": {"key": SECRET}, "b": {"key": OTHER_SECRET}}))

    def end(name: str) -> dict[str, str]:
        return {
            "ca_cert": str(folder / "ca.pem"),
            **{k: str(folder / f"{name}.{e}") for k, e in (("cert", "pem"), ("key", "key"))},
        }

    return config.model_copy(
        update={
            "prefill_options": {"tls": end("server")},
            "decode_options": {"tls": end("server")},
            "router_options": {
                "worker_tls": end("router"),
                "tls_cert": str(folder / "server.pem"),
                "tls_key": str(folder / "server.key"),
                "api_keys": str(keys),
            },
        }
    )


def test_there_are_enough_of_them() -> None:
    assert len({request.name for request in REQUESTS}) == len(REQUESTS) >= 80


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.name)
def test_the_cluster_answers_as_one_server(recorded: Recorded, request_: Request) -> None:
    single = recorded.single[request_.name]
    assert single.status < 500, single.body
    assert ("error" in request_.name) == (single.status >= 400), single.body
    for placement in request_.placements:
        cluster = recorded.cluster[request_.name, placement]
        if request_.status_only:
            assert cluster.status == single.status
            assert json.loads(cluster.body)["error"]["message"]
            continue
        found = differences(single.document(), cluster.document())
        assert not found, f"{placement}: " + "\n".join(found)
        cached = cached_tokens_differ(single, cluster)
        assert not cached, f"{placement}: {cached}"


def test_most_prompts_were_handed_over(recorded: Recorded) -> None:
    routes = [
        (placement, answer.trace["route"].split()[0])
        for (_, placement), answer in recorded.cluster.items()
        if answer.trace is not None and answer.status == 200
    ]
    assert routes.count(("handover", "handover")) > 60
    assert routes.count(("local", "local")) > 15


def test_a_repeated_prompt_is_reported_as_cached(recorded: Recorded) -> None:
    name = "completions: long prompt"
    assert recorded.single[name].cached() == recorded.cluster[name, "handover"].cached() == 0
    again = f"{name} again: cached"
    assert recorded.single[again].cached() > 100
    assert recorded.cluster[again, "handover"].cached() > 100


# ---- negative controls: the comparison sees what it must see


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("completions: seed 1", {"seed": 77}),
        ("completions: logprobs 5", {"logprobs": 4}),
        ("completions: echo", {"echo": False}),
        ("completions: n 3, seeded", {"n": 2}),
        ("completions: stop string", {"stop": []}),
        ("completions: stop string kept", {"include_stop_str_in_output": False}),
        ("completions: bad_words", {"bad_words": []}),
        ("completions: min_tokens holds a stop string back", {"min_tokens": 0}),
        ("completions: logit_bias for a token", {"logit_bias": None}),
        ("completions: streamed with usage", {"stream_options": None}),
        ("completions: plain", {"max_tokens": 7}),
        ("chat: tool named", {"tool_choice": "none"}),
        ("chat: json_schema after reasoning", {"chat_template_kwargs": {"thinking": False}}),
        ("completions: error: regex", {"structured_outputs": {"regex": "a"}}),
    ],
)
def test_another_request_gets_another_answer(recorded: Recorded, name: str, change: dict[str, Any]) -> None:
    assert recorded.running is not None
    wanted = next(request for request in REQUESTS if request.name == name)
    assert wanted.body is not None
    body = {key: value for key, value in {**wanted.body, **change}.items() if value is not None}
    answer = recorded.running.send(replace(wanted, body=body), "handover")
    assert differences(recorded.single[name].document(), answer.document())


def test_every_change_of_an_answer_is_seen(recorded: Recorded) -> None:
    unseen = []
    for name, answer in recorded.single.items():
        document = answer.document()
        for path in _leaves(document):
            changed = copy.deepcopy(document)
            _change(changed, path)
            if not differences(document, changed):
                unseen.append((name, path))
    assert not unseen


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if items is None:
        if path and path[-1] != "sequence_number":
            yield path
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _change(document: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        document = document[key]
    old = document[path[-1]]
    document[path[-1]] = (
        not old if isinstance(old, bool) else old + 0.002 if isinstance(old, int | float) else f"{old}x"
    )


@pytest.mark.parametrize(
    ("cached", "trace", "single"),
    [
        (
            32,
            {"prefill_cached": 0, "prefill_restored": 0, "boundary": "b"},
            32,
        ),  # what this request computed itself
        (
            0,
            {"prefill_cached": 0, "prefill_restored": 0, "boundary": "b"},
            32,
        ),  # found by a single server only
        (32, {"prefill_cached": 32, "prefill_restored": 0, "boundary": "b"}, 0),  # found here only
        (16, {"local": 0, "boundary": ""}, 16),
        (99, {"local": 99, "boundary": ""}, 99),  # more than the prompt
    ],
)
def test_wrong_cached_tokens_are_seen(cached: int, trace: dict[str, Any], single: int) -> None:
    def answer(number: int, trace: dict[str, Any] | None = None) -> Answer:
        return Answer(200, json.dumps({"prompt_tokens": 40, "cached_tokens": number}), trace=trace)

    assert cached_tokens_differ(answer(single), answer(cached, trace))


# ---- who may speak to whom, and what is written down


def test_only_known_keys_open_the_endpoint(recorded: Recorded) -> None:
    assert recorded.running is not None
    assert recorded.running.get("/v1/models", OTHER_SECRET).status == 200
    for path in ("/v1/models", "/deltaserve/requests/x", "/openapi.json"):
        assert recorded.running.get(path, WRONG_SECRET).status == 401


def test_a_worker_serves_no_stranger(recorded: Recorded, tmp_path: Path) -> None:
    """Neither in the clear, nor without a certificate, nor with another authority's; with the right one it does."""
    import grpc

    from deltaserve.wire import worker_pb2 as pb
    from deltaserve.wire.worker_pb2_grpc import WorkerStub

    assert recorded.running is not None
    address = recorded.running.cluster.statuses["decode-0"].address
    folder = recorded.running.cluster.run_dir.parent
    strangers = make_certificates(tmp_path, "router")
    authority = (folder / "ca.pem").read_bytes()

    def describe(credentials: grpc.ChannelCredentials | None) -> str:
        channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        with channel:
            try:
                return str(WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=30).role)
            except grpc.RpcError as error:
                return str(error.code().name)

    def client(where: Path) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            authority, (where / "router.key").read_bytes(), (where / "router.pem").read_bytes()
        )

    assert describe(None) == "UNAVAILABLE"
    assert describe(grpc.ssl_channel_credentials(authority)) == "UNAVAILABLE"
    assert describe(client(strangers)) == "UNAVAILABLE"
    assert describe(client(folder)) == "decode"


def test_no_secret_is_in_any_log(recorded: Recorded) -> None:
    running = recorded.running
    assert running is not None
    running.get("/v1/models", WRONG_SECRET)
    # The control: what is written down is found by the same look.
    running.send(Request("", "/v1/models", headers={"X-Request-Id": IN_LOGS}))
    wait_until(lambda: IN_LOGS in running.logs(), 60, "the request is in the router's log")
    logs = running.logs()
    folder = running.cluster.run_dir.parent
    private = [(folder / name).read_text().splitlines()[1] for name in ("server.key", "router.key")]
    for secret in (SECRET, OTHER_SECRET, WRONG_SECRET, RECALL, *private):
        assert secret not in logs
