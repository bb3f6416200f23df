# SPDX-License-Identifier: Apache-2.0
"""What a request leaves to look at: one trace, log lines with its name, its handoff rank by rank, its counts."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from deltaserve.config import TraceConfig
from deltaserve.telemetry import tracing
from deltaserve.telemetry.logs import JsonFormatter
from deltaserve.wire import codec
from router.observe import Observed
from router.ui.state import Snapshots
from statestore.connector.events import watch
from tests.scenario.stack import Barrier, Stack, Worker, running, until
from tests.support.otlp import TREE, Collector, Seen, collecting, parents

RANKS = 2
CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"


@pytest.fixture
async def small() -> AsyncIterator[Stack]:
    """One prefill and one decode worker of two ranks each, whose handoffs are watched."""
    async with running() as made:
        for role in ("prefill", "decode"):
            worker = Worker(made, role, {}, tp=RANKS)
            watch(worker.worker_id, worker.service.on_event)
            await made.start(worker)
        yield made
        for worker in made.workers:
            watch(worker.worker_id, None)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """A collector, and this process's spans going there."""
    with collecting() as made:
        tracing.configure(TraceConfig(endpoint=made.url), "deltaserve.test")
        yield made
        tracing.shut_down()


async def over_http(stack: Stack, length: int = 50, **headers: str) -> str:
    """One request through the outermost application; returns its X-Request-Id."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        ask = await stack.run(stack.prompt(length))
        assert stack.is_right(ask)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await Observed(app, stack.dispatcher)(scope, None, send)  # type: ignore[arg-type]
    return dict(sent[0]["headers"])[b"x-request-id"].decode()  # type: ignore[no-any-return]


async def test_one_trace_from_http_to_the_last_token(small: Stack, collector: Collector) -> None:
    await over_http(small, traceparent=TRACEPARENT)
    tracing.flush()
    spans = collector.wait_for(*TREE, trace=CLIENT_TRACE)
    assert parents(spans) == TREE
    assert {span.trace for span in collector.spans} == {CLIENT_TRACE}
    found: dict[str, Seen] = {span.name: span for span in spans}
    assert found["POST /v1/completions"].parent == CLIENT_SPAN
    for name, parent in TREE.items():
        assert not found[name].failed
        if parent in found:
            assert found[parent].start <= found[name].start + 5_000_000, f"{name} begins before {parent}"
    publish, load = found["publish"].attributes, found["load"].attributes
    assert load["deltaserve.bytes"] >= publish["deltaserve.bytes"] > 0, (
        "without DCP every rank reads all rows"
    )
    assert publish["deltaserve.boundary"] == load["deltaserve.boundary"]
    assert (publish["deltaserve.ranks"], load["deltaserve.ranks"], load["deltaserve.tokens"]) == (2, 2, 49)


async def test_a_worker_that_hears_no_context_begins_another_trace(
    small: Stack, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: were the context not in the message, the test above would see it."""
    encode = codec.encode_add
    monkeypatch.setattr(codec, "encode_add", lambda *a, **k: encode(*a, **{**k, "traceparent": ""}))
    await over_http(small, traceparent=TRACEPARENT)
    tracing.flush()
    collector.wait_for(*TREE)
    assert len({span.trace for span in collector.spans}) == 3
    assert parents([s for s in collector.spans if s.trace == CLIENT_TRACE]).keys() == {
        "POST /v1/completions",
        "request",
        "handover.prefill",
        "decode",
    }


async def test_a_load_that_fails_is_an_error_in_the_trace(small: Stack, collector: Collector) -> None:
    small.store.before = _losing(small)
    await over_http(small)
    tracing.flush()
    collector.wait_for("load", "request")
    (load,) = [span for span in collector.spans if span.name == "load"]
    (request,) = [span for span in collector.spans if span.name == "request"]
    assert load.failed
    assert request.attributes["deltaserve.failure"] == "missing"
    assert not request.failed, "it was answered all the same"


async def test_without_a_collector_nothing_is_traced(small: Stack) -> None:
    legs: list[str] = []
    begin = small.prefill.service._observe
    small.prefill.service._observe = lambda job: (legs.append(job.add.traceparent), begin(job))  # type: ignore[method-assign]
    await over_http(small, traceparent=TRACEPARENT)
    assert legs == [""]
    assert not tracing.enabled()


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What this process logs as JSON, from debug on."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("test"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)
    root.setLevel(before)


async def test_every_line_about_a_request_has_its_id(
    small: Stack, lines: Callable[[], list[dict[str, Any]]]
) -> None:
    small.store.before = _losing(small)
    small.dispatcher.config.log.format = "json"
    name = await over_http(small, **{"x-request-id": "mine-1"})
    assert name == "mine-1"
    request = small.dispatcher.traces.recent(1)[0].request_id
    by_logger: dict[str, set[str]] = {}
    for line in lines():
        by_logger.setdefault(line["logger"], set()).add(line.get("request_id", ""))
    assert by_logger["router.observe"] == {"cmpl-mine-1"}
    assert request in by_logger["prefill_worker.role"]
    assert request in by_logger["decode_worker.role"]
    about_it = [line for line in lines() if "request cmpl-" in line["message"]]
    assert about_it
    assert all(line.get("request_id") == request for line in about_it)


async def test_the_page_shows_a_publish_rank_by_rank_while_it_is_under_way(small: Stack) -> None:
    barrier = Barrier()

    def slow_second_rank(operation: str, key: str) -> None:
        if key.endswith("/kda/1") and operation in ("reserve", "put"):
            barrier()

    small.store.before = slow_second_rank
    snapshots = Snapshots(small.dispatcher)
    ask = small.ask(small.prompt(50))

    def seen() -> list[dict[str, Any]]:
        snapshots._made = 0.0
        return [one for one in snapshots.now()["boundaries"] if one["request"] == ask.name.removesuffix("-0")]

    await until(lambda: any([r["state"] for r in one["ranks"]] == ["done", "busy"] for one in seen()))
    assert [(one["stage"], one["state"], one["outcome"]) for one in seen()] == [("publish", "writing", "")]
    barrier.open()
    await small.end(ask)
    await until(lambda: {one["outcome"] for one in seen()} == {"committed", "loaded"})
    for one in seen():
        assert [rank["state"] for rank in one["ranks"]] == ["done", "done"]
        assert all(rank["bytes"] > 0 for rank in one["ranks"])


async def test_the_counts_of_a_handoff(small: Stack) -> None:
    before, pinned = counts(), sample("deltaserve_pinned_blocks")
    await small.run(small.prompt(50))
    after = counts()
    moved = {name: after[name] - before[name] for name in after}
    assert moved["deltaserve_boundaries_opened_total"] >= 1
    for name in ("published", "committed", "loaded", "verified"):
        assert moved[f"deltaserve_boundaries_{name}_total"] == 1, moved
    assert sample("deltaserve_pinned_blocks") == pinned


async def test_what_is_not_verified_is_not_counted_as_such(small: Stack) -> None:
    """The control of the count above."""
    small.decode.role._verify = False  # type: ignore[union-attr]
    before = counts()
    await small.run(small.prompt(50))
    after = counts()
    name = "deltaserve_boundaries_{}_total".format
    assert after[name("loaded")] == before[name("loaded")] + 1
    assert after[name("verified")] == before[name("verified")]


def counts() -> dict[str, float]:
    """The boundary counters of this process."""
    return {
        f"deltaserve_boundaries_{name}_total": sample(f"deltaserve_boundaries_{name}_total")
        for name in ("opened", "published", "committed", "loaded", "verified")
    }


def sample(name: str) -> float:
    """A sample without labels."""
    return REGISTRY.get_sample_value(name) or 0.0


def _losing(stack: Stack) -> Callable[[str, str], None]:
    """Objects vanish when the first reader asks for one."""

    def before(operation: str, key: str) -> None:
        if operation.startswith("get"):
            stack.store.objects.pop(key, None)

    return before
