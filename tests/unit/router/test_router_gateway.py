# SPDX-License-Identifier: Apache-2.0
"""The gateway over an application of the test's own: what it does with the application's answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from deltaserve.config import RouterConfig
from router.dispatcher import Dispatcher
from router.gateway import Gateway, Receive, Scope, Send, answer
from router.metrics import Metrics
from tests.doubles.static_membership import StaticMembership

PATH = "/v1/completions"


async def ask(
    monkeypatch: pytest.MonkeyPatch, ready: list[list[str]], status: int, path: str = PATH
) -> list[Any]:
    """Messages of one POST; `ready` are the decode workers at each look, the last one for ever."""
    looks = iter(ready)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send, status, {"error": "the application's own"})

    dispatcher = Dispatcher(RouterConfig(worker_wait=0.0), StaticMembership([]), Metrics(CollectorRegistry()))
    monkeypatch.setattr(dispatcher.roster, "ready", lambda _role: next(looks, ready[-1]))

    async def found(_timeout: float) -> bool:
        return bool(dispatcher.roster.ready("decode"))

    monkeypatch.setattr(dispatcher.roster, "wait_decode", found)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "POST", "headers": []}
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
