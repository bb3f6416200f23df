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


# ---- what a router holds


class Held:
    """A gateway with one slot, over an application that answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        settings = RouterConfig(worker_wait=60.0, slots_per_seq=1.0, **config)
        self.dispatcher = Dispatcher(settings, StaticMembership([]), Metrics(CollectorRegistry()))
        self.go = asyncio.Event()
        self.inside = 0
        self.slots = 1
        monkeypatch.setattr(Dispatcher, "decode_slots", property(lambda _: self.slots))

        async def found(_timeout: float) -> bool:
            return True

        monkeypatch.setattr(self.dispatcher.roster, "wait_decode", found)
        self.gateway = Gateway(self._app, self.dispatcher)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.inside += 1
        await self.go.wait()
        await answer(send, 200, {})

    def post(self, path: str = PATH, body: asyncio.Event | None = None) -> asyncio.Task[None]:
        """One request; its body comes once `body` is set."""

        async def receive() -> Any:
            if body is not None:
                await body.wait()
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            pass

        scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        return asyncio.create_task(self.gateway(scope, receive, send))

    async def health(self) -> tuple[int, int]:
        """`in_flight` and `queued` as GET /health has them."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("a GET has no body")

        await self.gateway({"type": "http", "path": "/health", "method": "GET", "headers": []}, receive, send)
        document = json.loads(sent[1]["body"])
        return document["in_flight"], document["queued"]

    async def until(self, expected: tuple[int, int]) -> None:
        """Return once `health` is as expected. Raises TimeoutError."""
        async with asyncio.timeout(60):
            while await self.health() != expected:  # noqa: ASYNC110 - what is waited for happens in many places
                await asyncio.sleep(0.001)


async def test_in_flight_counts_requests_that_wait_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    assert await held.health() == (0, 0)
    tasks = [held.post() for _ in range(3)]
    await held.until((3, 2))
    assert held.inside == 1
    assert held.dispatcher.in_flight == 0, "the control: the engine requests alone would say that it may stop"
    tasks[-1].cancel()  # a client that leaves the queue
    await held.until((2, 1))
    held.go.set()
    await asyncio.gather(*tasks[:-1])
    assert await held.health() == (0, 0)


async def test_in_flight_counts_requests_that_are_still_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    held, body = Held(monkeypatch), asyncio.Event()
    task = held.post(body=body)
    await held.until((1, 0))
    assert held.inside == 0
    held.go.set()
    body.set()
    await task
    assert await held.health() == (0, 0)


async def test_in_flight_counts_engine_requests_where_these_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    monkeypatch.setattr(Dispatcher, "in_flight", property(lambda _: 5))
    task = held.post()
    await held.until((5, 0))
    held.go.set()
    await task
    assert await held.health() == (5, 0), "answers in the background have no HTTP request any more"


async def test_what_is_refused_or_fails_is_not_held(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held = Held(monkeypatch, api_keys=keys(tmp_path))
    await held.post()  # without a key
    await held.post("/nothing/here")
    assert await held.health() == (0, 0)
    broken = Held(monkeypatch)

    async def raising(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the application's own mistake")

    broken.gateway = Gateway(raising, broken.dispatcher)
    with pytest.raises(RuntimeError, match="mistake"):
        await broken.post()
    assert await broken.health() == (0, 0)
