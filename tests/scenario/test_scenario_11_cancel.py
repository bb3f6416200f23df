# SPDX-License-Identifier: Apache-2.0
"""Scenario 11, CANCEL AT SIX POINTS: 400 cancelled requests, and every gauge of what a request owns is where it was.

Queued / mid-prefill / published but not scheduled / mid-load / decoding / after the last token, 8 requests at a time,
and one beside them that is not cancelled and must be answered right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from prefill_worker.role import PrefillRole
from router.worker_link import WorkerLink
from statestore.boundary import BoundaryRecord
from statestore.connector.pins import Pins
from tests.scenario.stack import CHECKPOINTS, Ask, Barrier, Stack, running, until

AT_ONCE = 8
CANCELS = 400
LENGTH = 40


def asks(stack: Stack, count: int = 3) -> list[Ask]:
    return [stack.ask(stack.prompt(LENGTH), count) for _ in range(AT_ONCE)]


async def queued(stack: Stack) -> Ask:
    engine, service = stack.prefill.engine, stack.prefill.service
    engine.hold()
    made = asks(stack)
    beside = stack.ask(stack.prompt(LENGTH))
    await until(lambda: service.job_count > AT_ONCE)
    stack.abort(made)
    engine.go()
    return beside


async def mid_prefill(stack: Stack) -> Ask:
    engine, service = stack.prefill.engine, stack.prefill.service
    engine.hold()
    made = asks(stack)
    beside = stack.ask(stack.prompt(LENGTH))
    await until(lambda: service.job_count > AT_ONCE)
    steps = engine.steps
    engine.hold(after=2)
    await until(lambda: engine.steps >= steps + 2)
    stack.abort(made)
    engine.go()
    return beside


async def published(stack: Stack) -> Ask:
    engine = stack.decode.engine
    engine.hold()
    made = asks(stack)
    beside = stack.ask(stack.prompt(LENGTH))
    await until(lambda: all(stack.trace(ask)["attempts"] == 1 for ask in (*made, beside)))
    stack.abort(made)
    engine.go()
    return beside


async def mid_load(stack: Stack) -> Ask:
    barrier = Barrier()
    stack.store.before = lambda operation, key: barrier() if operation == "get" else None
    made = asks(stack)
    await until(lambda: barrier.waiting >= AT_ONCE)
    beside = stack.ask(stack.prompt(LENGTH))
    stack.abort(made)
    stack.store.before = lambda operation, key: None
    barrier.open()
    return beside


async def decoding(stack: Stack) -> Ask:
    made = asks(stack, 200)
    await until(lambda: all(len(ask.tokens) >= 2 for ask in made))
    beside = stack.ask(stack.prompt(LENGTH))
    stack.abort(made)
    return beside


async def after_the_last_token(stack: Stack) -> Ask:
    made = asks(stack)
    await until(lambda: any(ask.ended.is_set() for ask in made))
    stack.abort(made)
    return stack.ask(stack.prompt(LENGTH))


POINTS = [queued, mid_prefill, published, mid_load, decoding, after_the_last_token]


@pytest.mark.timeout(120)
async def test_400_cancels(stack: Stack, record_property: Callable[[str, object], None]) -> None:
    baseline = stack.gauges()
    record_property("gauges", ["before", baseline])
    cancelled = 0
    while cancelled < CANCELS:
        point = POINTS[cancelled // AT_ONCE % len(POINTS)]
        beside = await point(stack)
        await stack.end(beside)
        assert stack.is_right(beside), f"the request beside those cancelled {point.__name__}"
        cancelled += AT_ONCE
    await stack.back_to(baseline)
    record_property("gauges", [f"after {cancelled} cancels", stack.gauges()])
    # The control of the gauges: a request that lives moves most of them.
    stack.decode.engine.hold()
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: bool(stack.decode.engine.scheduler.requests))
    record_property("gauges", ["one request alive", stack.gauges()])
    moved = {
        name.partition(" ")[2] or name for name, value in stack.gauges().items() if value != baseline[name]
    }
    assert {"flights", "records", "objects", "bytes", "legs", "outstanding", "jobs", "requests"} <= moved
    stack.decode.engine.go()
    await stack.end(ask)
    await stack.back_to(baseline)


@pytest.mark.parametrize("point", POINTS)
async def test_each_point_alone(stack: Stack, point: Any) -> None:
    """By itself, so that a leak has a name."""
    baseline = stack.gauges()
    beside = await point(stack)
    await stack.end(beside)
    assert stack.is_right(beside)
    await stack.back_to(baseline)


async def test_what_is_kept_for_others_is_all_that_is_kept() -> None:
    """With checkpoints: every object in the store is named by a committed record, and every record is a checkpoint."""
    async with running() as stack:
        for role in ("prefill", "decode"):
            await stack.add(role, **CHECKPOINTS)
        for point in POINTS:
            beside = await point(stack)
            await stack.end(beside)
            assert stack.is_right(beside)

        def nothing_else() -> bool:
            records = [BoundaryRecord.from_json(text) for text in stack.records.values()]
            named = {entry.key for record in records for entry in record.objects()}
            kept = all(record.reusable and record.state == "committed" for record in records)
            return kept and named == set(stack.store.objects) and stack.dispatcher.in_flight == 0

        await until(nothing_else)
        assert stack.records, "the control: something is kept"


async def _release_nothing(self: PrefillRole, boundaries: list[str]) -> None:
    return None


@pytest.mark.parametrize(
    ("owner", "method", "mistake", "point"),
    [
        (PrefillRole, "release", _release_nothing, decoding),
        (PrefillRole, "release", _release_nothing, published),
        (WorkerLink, "release", lambda self, boundary, session: True, mid_load),
    ],
)
async def test_control_something_is_not_given_back(
    stack: Stack, owner: Any, method: str, mistake: Any, point: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    baseline = stack.gauges()
    beside = await point(stack)
    await stack.end(beside)
    with pytest.raises(AssertionError, match="not back at the baseline"):
        await stack.back_to(baseline, 0.5)


async def test_control_an_abort_that_is_not_sent(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerLink, "abort", lambda self, leg: None)
    baseline = stack.gauges()
    ask = stack.ask(stack.prompt(LENGTH), 2000)
    await until(lambda: len(ask.tokens) >= 2)
    stack.abort([ask])
    with pytest.raises(AssertionError, match=r"decode-\d+ requests"):
        await stack.back_to(baseline, 0.5)


async def test_control_pins_that_are_never_freed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pins, "unpin", lambda self, name: self._blocks.pop(name) and None)
    baseline = stack.gauges()
    await stack.end(await published(stack))
    with pytest.raises(AssertionError, match=r"prefill-\d+ blocks"):
        await stack.back_to(baseline, 0.5)
