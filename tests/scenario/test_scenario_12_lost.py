# SPDX-License-Identifier: Apache-2.0
"""Scenario 12, LOST MESSAGE: one of each kind is dropped; the wait is bounded, the answer right or a typed error.

Streams do not lose messages one at a time, but bugs do. What the loss leaves behind goes with the stream at the latest.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deltaserve.engine.service import RouterStream
from router.worker_link import WorkerLink
from statestore.connector import DeltaserveConnector
from tests.doubles.ledger import LedgerDouble
from tests.scenario.stack import Ask, Barrier, Stack, running, until

LENGTH = 70
PREFILL_TIMEOUT = 1.0
REQUEST_TIMEOUT = 3.0
STORE_TIMEOUT = 0.3


@pytest.fixture
async def impatient() -> AsyncIterator[Stack]:
    """Short deadlines everywhere."""
    async with running(prefill_timeout=PREFILL_TIMEOUT, request_timeout=REQUEST_TIMEOUT) as made:
        for role in ("prefill", "decode"):
            await made.add(role, load_timeout=STORE_TIMEOUT, store={"timeout": STORE_TIMEOUT})
        yield made


class Drop:
    """Drops the first message that `matches`."""

    def __init__(self, matches: Callable[[Any], bool]) -> None:
        self.matches, self.dropped = matches, 0

    def __call__(self, message: Any) -> bool:
        if self.dropped or not self.matches(message):
            return False
        self.dropped += 1
        return True


def drop_to_worker(monkeypatch: pytest.MonkeyPatch, matches: Callable[[Any], bool]) -> Drop:
    drop, send = Drop(matches), WorkerLink.send
    monkeypatch.setattr(WorkerLink, "send", lambda self, message: drop(message) or send(self, message))
    return drop


def drop_from_worker(monkeypatch: pytest.MonkeyPatch, matches: Callable[[Any], bool]) -> Drop:
    drop, send = Drop(matches), RouterStream.send
    monkeypatch.setattr(RouterStream, "send", lambda self, message: drop(message) or send(self, message))
    return drop


def is_add(handoff: str) -> Callable[[Any], bool]:
    return lambda message: (
        message.WhichOneof("body") == "add" and message.add.WhichOneof("handoff") == handoff
    )


def is_kind(kind: str) -> Callable[[Any], bool]:
    return lambda message: message.WhichOneof("body") == kind


def is_last_step(message: Any) -> bool:
    return message.WhichOneof("body") == "step" and any(message.step.finish)


async def ends(stack: Stack, seconds: float = 10 * REQUEST_TIMEOUT) -> Ask:
    """A request that ends in time; its answer is right, or it ends with a typed error."""
    ask = await stack.end(stack.ask(stack.prompt(LENGTH)), seconds)
    assert stack.is_right(ask) or ask.finish is FinishReason.ERROR
    return ask


async def nothing_is_left(stack: Stack, baseline: dict[str, int]) -> None:
    await stack.reset_links()
    await stack.back_to(baseline)


@pytest.mark.parametrize(
    ("matches", "from_worker", "answered"),
    [
        pytest.param(is_add("publish"), False, True, id="add to prefill"),
        pytest.param(is_add("load"), False, False, id="add to decode"),
        pytest.param(is_kind("release"), False, True, id="release"),
        pytest.param(is_kind("published"), True, True, id="published"),
        pytest.param(is_kind("loaded"), True, True, id="loaded"),
        pytest.param(is_last_step, True, False, id="last step"),
    ],
)
async def test_a_message_between_router_and_worker(
    impatient: Stack,
    matches: Callable[[Any], bool],
    from_worker: bool,
    answered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    baseline = impatient.gauges()
    drop = (drop_from_worker if from_worker else drop_to_worker)(monkeypatch, matches)
    ask = await ends(impatient)
    assert (ask.finish is not FinishReason.ERROR) == answered
    await until(lambda: bool(drop.dropped), 30)  # a release comes after the answer
    assert (await ends(impatient)).finish is FinishReason.LENGTH, "the next request is served"
    await nothing_is_left(impatient, baseline)


async def test_a_stream_that_the_router_resets_is_opened_again(impatient: Stack) -> None:
    """What the router does with a worker that does not read: nothing is lost but the requests on the stream."""
    baseline = impatient.gauges()
    impatient.decode.engine.hold()
    ask = impatient.ask(impatient.prompt(LENGTH))
    await until(lambda: impatient.decode.service.job_count == 1)
    await impatient.reset_links()
    impatient.decode.engine.go()
    await impatient.end(ask)
    assert impatient.is_right(ask) or ask.finish is FinishReason.ERROR
    assert (await ends(impatient)).finish is FinishReason.LENGTH
    await impatient.back_to(baseline)


async def test_an_abort(impatient: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = impatient.gauges()
    drop = drop_to_worker(monkeypatch, is_kind("abort"))
    ask = impatient.ask(impatient.prompt(LENGTH), 30)
    await until(lambda: bool(ask.tokens))
    impatient.abort([ask])
    assert drop.dropped
    await impatient.back_to(baseline)


@pytest.mark.parametrize("method", ["open", "commit"])
@pytest.mark.parametrize("what", ["request", "answer"])
async def test_a_write_to_the_ledger(
    impatient: Stack, method: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost on the way there, or on the way back after it has happened."""
    baseline = impatient.gauges()
    honest = getattr(LedgerDouble, method)
    lost = []

    async def losing(self: LedgerDouble, *arguments: Any, **options: Any) -> Any:
        if lost:
            return await honest(self, *arguments, **options)
        lost.append(method)
        if what == "answer":
            await honest(self, *arguments, **options)
        raise ConnectionError("register: no answer")

    monkeypatch.setattr(LedgerDouble, method, losing)
    ask = await ends(impatient)
    assert lost
    assert impatient.is_right(ask)
    await impatient.back_to(baseline)


@pytest.mark.parametrize("operation", ["reserve", "write", "seal", "get"])
async def test_a_call_to_the_store_that_hangs(impatient: Stack, operation: str) -> None:
    baseline = impatient.gauges()
    barrier = Barrier()

    def before(called: str, key: str) -> None:
        if called == operation and barrier.waiting == 0:
            barrier()

    impatient.store.before = before
    ask = await ends(impatient)
    assert barrier.waiting == 1
    assert impatient.is_right(ask)
    barrier.open()
    await nothing_is_left(impatient, baseline)


async def test_a_ranks_report(impatient: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's report of a publish never comes: the router does not wait for ever, and neither does the role."""
    honest = DeltaserveConnector.build_connector_worker_meta
    lost = []

    def losing(self: Any) -> Any:
        found = honest(self)
        if found is not None and found.publish and not lost:
            lost.append(found)
            return None
        return found

    monkeypatch.setattr(DeltaserveConnector, "build_connector_worker_meta", losing)
    ask = await ends(impatient)
    assert lost
    assert impatient.is_right(ask)
    assert impatient.trace(ask)["route"].startswith("local")
    assert (await ends(impatient)).finish is FinishReason.LENGTH


async def test_control_without_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    drop_to_worker(monkeypatch, is_add("load"))
    async with running(request_timeout=600.0) as patient:
        await patient.add("prefill")
        await patient.add("decode")
        with pytest.raises(TimeoutError):
            await ends(patient, 4.0)
