# SPDX-License-Identifier: Apache-2.0
"""The gateway over an application of the test's own: what it does with the application's answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from deltaserve.config import RouterConfig
from router.dispatcher import Dispatcher
from router.gateway import Gateway, answer
from router.metrics import Metrics
from tests.doubles.static_membership import StaticMembership

PATH = "/v1/completions"


async def ask(
    monkeypatch: pytest.MonkeyPatch,
    ready: list[list[str]],
    status: int,
    path: str = PATH,
    headers: dict[str, str] | None = None,
    **config: Any,
) -> list[Any]:
    """Messages of one POST; `ready` are the decode workers at each look, the last one for ever."""
    looks = iter(ready)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send, status, {"error": "the application's own"})

    settings = RouterConfig(worker_wait=0.0, **config)
    dispatcher = Dispatcher(settings, StaticMembership([]), Metrics(CollectorRegistry()))
    monkeypatch.setattr(Dispatcher, "decode_slots", 8)
    monkeypatch.setattr(dispatcher.roster, "ready", lambda _role: next(looks, ready[-1]))

    async def found(_timeout: float) -> bool:
        return bool(dispatcher.roster.ready("decode"))

    monkeypatch.setattr(dispatcher.roster, "wait_decode", found)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST"}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    await Gateway(app, dispatcher)(scope, receive, send)
    return sent


@pytest.mark.parametrize(
    ("ready", "status", "expected"),
    [
        ([["d"], []], 500, 503),  # the last worker went while the request ran
        ([["d"]], 500, 500),  # another failure stays what it is
        ([["d"], []], 200, 200),  # an answer that was complete before stays
        ([[]], 200, 503),  # nobody there from the start
    ],
)
def test_a_request_that_outlives_the_last_decode_worker(
    monkeypatch: pytest.MonkeyPatch, ready: list[list[str]], status: int, expected: int
) -> None:
    sent = asyncio.run(ask(monkeypatch, ready, status))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == expected
    body = json.loads(sent[1]["body"])
    if expected == 503:
        assert (b"retry-after", b"1") in sent[0]["headers"]
        assert body["error"]["code"] == 503
        assert "no decode worker" in body["error"]["message"]
    else:
        assert body == {"error": "the application's own"}


def test_a_path_that_needs_no_worker_keeps_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = asyncio.run(ask(monkeypatch, [[]], 500, "/tokenize"))
    assert sent[0]["status"] == 500


# ---- keys, limits and deadlines


def keys(folder: Path, **fields: Any) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"alice": {"key": "alice-secret", **fields}, "bob": {"key": "bob-secret"}}))
    return path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong-secret"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer alice-secret"}, 200),
        ({"x-api-key": "bob-secret"}, 200),
    ],
)
def test_a_key_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    sent = asyncio.run(ask(monkeypatch, [["d"]], 200, headers=headers, api_keys=keys(tmp_path)))
    assert sent[0]["status"] == status
    if status == 401:
        text = sent[1]["body"].decode()
        assert "Authorization: Bearer" in text
        assert "secret" not in text.replace("Bearer KEY", "")


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x-priority": "high"}, "x-priority"),
        ({"x-ttft-deadline-ms": "soon"}, "x-ttft-deadline-ms"),
        ({"x-ttft-deadline-ms": "-5"}, "x-ttft-deadline-ms"),
        ({"x-ttft-deadline-ms": "nan"}, "x-ttft-deadline-ms"),
    ],
)
def test_headers_that_mean_nothing(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], words: str
) -> None:
    sent = asyncio.run(ask(monkeypatch, [["d"]], 200, headers=headers))
    assert sent[0]["status"] == 400
    assert words in sent[1]["body"].decode()
