# SPDX-License-Identifier: Apache-2.0
"""Reading before the commit (docs/early_reads.md), with 8 ranks a worker: exact when all goes well, and whatever goes
wrong nothing is answered from a state whose committed record was not read and compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.early import EarlyLoads
from deltaserve.wire import worker_pb2 as pb
from prefill_worker.role import PrefillRole
from router.worker_link import WorkerLink
from statestore.boundary import BoundaryRecord
from statestore.connector.gate import Gate
from tests.scenario.stack import CHECKPOINTS, Ask, Barrier, Stack, failures, running, until

LENGTH = 70

Commit = Sequence[BoundaryRecord]


@pytest.fixture
async def early() -> AsyncIterator[Stack]:
    """One prefill and one decode worker of 8 ranks each, with early reads."""
    async with running(early_reads=True) as made:
        await made.add("prefill")
        await made.add("decode")
        yield made


def count(stack: Stack, outcome: str) -> int:
    return int(stack.dispatcher.metrics.early_reads.labels(outcome)._value.get())


class Held:
    """Commits of the prefill worker wait here; `change` makes what is committed in place of what was told."""

    def __init__(
        self, stack: Stack, change: Callable[[BoundaryRecord], BoundaryRecord] = lambda r: r
    ) -> None:
        self.come, self._go, self._change = 0, asyncio.Event(), change
        stack.prefill.ledger.before_commit = self

    async def __call__(self, records: Commit) -> Commit:
        self.come += 1
        await self._go.wait()
        return [self._change(record) for record in records]

    def go(self) -> None:
        self._go.set()


def gate(stack: Stack) -> Gate:
    connector: Any = stack.decode.engine.scheduler.get_kv_connector()
    found: Gate = connector.gate
    return found


async def read_by_all_ranks(stack: Stack, requests: int = 1) -> None:
    await until(lambda: len(gate(stack)._held) == requests)


def hashed(stack: Stack) -> int:
    """Blocks of the decode worker that the prefix cache could give to anybody."""
    return len(stack.decode.engine.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)


def told(monkeypatch: pytest.MonkeyPatch, change: Callable[[BoundaryRecord], BoundaryRecord]) -> None:
    """What the reader is told is not what is committed."""
    send = WorkerLink.send

    def changed(self: WorkerLink, message: pb.ToWorker) -> None:
        if message.WhichOneof("body") == "add" and message.add.load.early:
            records = [change(BoundaryRecord.from_json(text)) for text in message.add.load.early]
            del message.add.load.early[:]
            message.add.load.early.extend(record.to_json().encode() for record in records)
        send(self, message)

    monkeypatch.setattr(WorkerLink, "send", changed)


def other_digest(record: BoundaryRecord) -> BoundaryRecord:
    """One digit of one digest of the last rank's last object."""
    entry = record.ranks[-1].objects[-1]
    digest = entry.digests[-1]
    changed = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    wrong = replace(entry, digests=(*entry.digests[:-1], changed))
    rank = replace(record.ranks[-1], objects=(*record.ranks[-1].objects[:-1], wrong))
    return replace(record, ranks=(*record.ranks[:-1], rank))


# ---- all goes well


async def test_answers_are_exact_and_nothing_is_left(early: Stack) -> None:
    baseline = early.gauges()
    writes = early.prefill.ledger.writes
    lengths = (2, 15, 16, 17, 32, 33, 64, LENGTH, 300)
    for length in lengths:
        ask = await early.run(early.prompt(length))
        assert early.is_right(ask)
        assert early.trace(ask)["from_store"] == length - 1
        assert early.trace(ask)["attempts"] == 1
    assert count(early, "used") == len(lengths)
    await early.back_to(baseline)
    # An open, a commit and a release each: a reader that is told early writes nothing.
    assert early.prefill.ledger.writes - writes == 3 * len(lengths)


async def test_control_without_the_switch_nothing_is_told() -> None:
    async with running(early_reads=False) as stack:
        await stack.add("prefill")
        await stack.add("decode")
        held = Held(stack)
        ask = stack.ask(stack.prompt(LENGTH))
        await until(lambda: held.come == 1)
        await asyncio.sleep(0.1)
        assert stack.store.calls["get"] == 0
        held.go()
        assert stack.is_right(await stack.end(ask))
        assert count(stack, "used") == 0


async def test_everything_but_the_use_happens_beside_the_commit(early: Stack) -> None:
    held = Held(early)
    ask = early.ask(early.prompt(LENGTH))
    await read_by_all_ranks(early)
    await asyncio.sleep(0.1)
    # Read by every rank, and neither scheduled nor a prefix that anybody could hit.
    assert held.come == 1
    assert not ask.outputs
    assert hashed(early) == 0
    read = early.store.calls["get"]
    held.go()
    assert early.is_right(await early.end(ask))
    assert early.store.calls["get"] == read, "it was read once"
    assert hashed(early) > 0


@pytest.mark.parametrize("silent", [False, True])
async def test_either_word_of_the_commit_is_enough(
    early: Stack, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger's push alone, while the router has not spoken; or the router's word alone."""
    if silent:
        early.decode.ledger.silent = True
    else:
        monkeypatch.setattr("decode_worker.role.DecodeRole.on_confirmed", lambda self, job: None)
    ask = await early.run(early.prompt(LENGTH))
    assert early.is_right(ask)
    assert count(early, "used") == 1


async def test_the_answer_begins_before_the_router_has_heard_of_the_commit(early: Stack) -> None:
    published: list[Any] = []
    go = asyncio.Event()
    dispatcher = early.dispatcher
    heard = dispatcher.published

    def late(link: WorkerLink, message: pb.Published) -> None:
        published.append(message)
        asyncio.get_running_loop().create_task(then(link, message))

    async def then(link: WorkerLink, message: pb.Published) -> None:
        await go.wait()
        heard(link, message)

    dispatcher.published = late  # type: ignore[method-assign]
    ask = early.ask(early.prompt(LENGTH))
    await until(lambda: bool(published) and not early.decode.engine.scheduler.requests)
    assert not ask.outputs, "nobody sees a token of a boundary that the router does not hold"
    go.set()
    assert early.is_right(await early.end(ask))
    assert early.trace(ask)["from_store"] == LENGTH - 1


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"tp": 2}, {"tp": 8}),
        ({"tp": 8}, {"tp": 4, "dcp": 2}),
        ({"tp": 1}, {"tp": 1}),
        ({"tp": 4}, {"tp": 8, "dcp": 8}),
    ],
)
async def test_between_layouts(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    async with running(early_reads=True) as stack:
        await stack.add("prefill", **prefill)
        await stack.add("decode", **decode)
        baseline = stack.gauges()
        for length in (2, 33, LENGTH, 200):
            assert stack.is_right(await stack.run(stack.prompt(length)))
        assert count(stack, "used") == 4
        await stack.back_to(baseline)


async def test_with_checkpoints_on_the_way_and_answers_that_rest_on_them() -> None:
    """Parents that are committed by the same transaction, parents that stood before, and a conversation's next turn."""
    async with running(early_reads=True) as stack:
        for role in ("prefill", "decode"):
            await stack.add(role, **CHECKPOINTS)
        prompt = stack.prompt(150)
        for turn in range(3):
            ask = await stack.run(prompt, 40)
            assert stack.is_right(ask)
            assert stack.trace(ask)["from_store"] + stack.trace(ask)["local"] == len(prompt) - 1, turn
            prompt = [*prompt, *ask.tokens, *stack.prompt(60)]
        assert count(stack, "used") == 3


async def test_an_old_decode_worker_is_left_alone() -> None:
    async with running(early_reads=True) as stack:
        await stack.add("prefill")
        worker = await stack.add("decode")
        for link in stack.dispatcher.roster.links("decode"):
            link.description.early = False
        assert stack.is_right(await stack.run(stack.prompt(LENGTH)))
        assert (count(stack, "used"), count(stack, "aside")) == (0, 1)
        assert worker.alive


# ---- what must be refused


async def test_a_record_that_differs_in_one_digest(early: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told wrong, committed right: the early read fails, the boundary itself is good."""
    before = failures("early", "differs")
    baseline = early.gauges()
    told(monkeypatch, other_digest)
    ask = await early.run(early.prompt(LENGTH))
    assert early.is_right(ask)
    assert early.trace(ask)["from_store"] == LENGTH - 1, "by today's path"
    assert not early.trace(ask)["load_failure"]
    assert count(early, "withdrawn") == 1
    assert failures("early", "differs") == before + 1
    await early.back_to(baseline)


async def test_a_commit_that_differs_in_one_digest(early: Stack) -> None:
    """Told right, committed wrong: what was read must not be used, and nothing else can be."""
    baseline = early.gauges()
    held = Held(early, other_digest)
    ask = early.ask(early.prompt(LENGTH))
    await read_by_all_ranks(early)
    held.go()
    await early.end(ask)
    assert early.is_right(ask)
    assert early.trace(ask)["from_store"] == 0
    assert "digest" in early.trace(ask)["load_failure"]
    assert count(early, "withdrawn") == 1
    await early.back_to(baseline)


async def foreign(early: Stack, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """The reader is told of another request's objects of the same length: keys that exist, digests that match."""
    first = early.ask(early.prompt(LENGTH), 400)
    await until(lambda: bool(first.tokens))
    (other,) = [record for record in map(BoundaryRecord.from_json, early.records.values()) if record.owner]
    told(monkeypatch, lambda record: replace(record, ranks=other.ranks))
    # Its keys are of another epoch, which the ranks see by themselves; here they do not.
    monkeypatch.setattr("statestore.connector.loading.check_epoch", lambda record: None)
    ask = await early.run(early.prompt(LENGTH))
    early.abort([first])
    return ask


async def test_another_requests_state_that_passes_every_check_of_the_ranks(
    early: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = await foreign(early, monkeypatch)
    assert early.is_right(ask)
    assert count(early, "withdrawn") == 1


async def test_control_it_would_answer_wrong_without_the_comparison(
    early: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: EarlyLoads, job: Any, known: Any) -> tuple[str, str]:
        return "", ""

    monkeypatch.setattr(EarlyLoads, "_compare", nothing)
    ask = await foreign(early, monkeypatch)
    assert count(early, "withdrawn") == 0
    assert not early.is_right(ask)


async def test_control_it_would_begin_before_the_commit_without_the_gate(
    early: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "hold", lambda self, output: None)
    held = Held(early)
    early.ask(early.prompt(LENGTH))
    await until(lambda: hashed(early) > 0)
    assert held.come == 1
    held.go()


async def test_a_stale_epoch(early: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right bytes of an earlier publish of the same prompt: another epoch is another boundary."""
    prompt = early.prompt(LENGTH)
    first = early.ask(prompt, 400)
    await until(lambda: bool(first.tokens))
    (stale,) = [record for record in map(BoundaryRecord.from_json, early.records.values()) if record.owner]
    told(monkeypatch, lambda record: replace(stale, id=record.id))
    ask = await early.run([*prompt[:-1], prompt[-1] ^ 1])
    assert early.is_right(ask)
    assert count(early, "withdrawn") == 1
    early.abort([first])


async def test_damage_before_the_early_read(early: Stack) -> None:
    """A bit that flips between the seal and the read, whatever the record says."""
    held = Held(early)
    early.decode.engine.hold()
    ask = early.ask(early.prompt(LENGTH))
    await until(lambda: held.come == 1)
    key = next(key for key in early.store.objects if "/kda/" in key)
    early.store.objects[key].data[5] ^= 0x10
    early.decode.engine.go()
    await read_by_all_ranks(early)
    held.go()
    await early.end(ask)
    assert early.is_right(ask)
    assert early.trace(ask)["from_store"] == 0
    assert "digest" in early.trace(ask)["load_failure"]


async def test_damage_between_the_early_read_and_the_commit(early: Stack) -> None:
    """What was checked is the reader's own copy: the store's may change, the answer does not."""
    held = Held(early)
    ask = early.ask(early.prompt(LENGTH))
    await read_by_all_ranks(early)
    for stored in early.store.objects.values():
        stored.data[:] = 0
    held.go()
    await early.end(ask)
    assert early.is_right(ask)


# ---- commits that do not come


async def test_a_commit_that_fails(early: Stack) -> None:
    baseline = early.gauges()
    early.prefill.ledger.commit_fails = 1
    ask = await early.run(early.prompt(LENGTH))
    assert early.is_right(ask)
    assert early.trace(ask)["from_store"] == 0
    assert early.trace(ask)["failure"] == "prefill_failed"
    assert count(early, "dropped") == 1
    await early.back_to(baseline)


async def test_a_commit_that_comes_too_late_for_the_reader() -> None:
    """The reader gives up, and the boundary is loaded when it is there, by today's path."""
    before = failures("early", "uncommitted")
    async with running(early_reads=True) as stack:
        await stack.add("prefill")
        await stack.add("decode", load_timeout=0.3)
        baseline = stack.gauges()
        held = Held(stack)
        ask = stack.ask(stack.prompt(LENGTH))
        await until(lambda: count(stack, "withdrawn") == 1)
        await until(lambda: not stack.decode.engine.scheduler.requests)
        held.go()
        await stack.end(ask)
        assert stack.is_right(ask)
        assert stack.trace(ask)["from_store"] == LENGTH - 1
        assert failures("early", "uncommitted") == before + 1
        await stack.back_to(baseline)


async def test_a_commit_that_never_comes() -> None:
    async with running(early_reads=True, prefill_timeout=0.5) as stack:
        await stack.add("prefill")
        await stack.add("decode")
        baseline = stack.gauges()
        held = Held(stack)
        ask = await stack.run(stack.prompt(LENGTH))
        assert stack.is_right(ask)
        assert stack.trace(ask)["failure"] == "prefill_timeout"
        assert count(stack, "dropped") == 1
        held.go()
        await stack.back_to(baseline)


@pytest.mark.parametrize("read", [False, True])
async def test_a_publisher_that_dies_before_its_commit(read: bool) -> None:
    """Before the reader has read, and after."""
    async with running(early_reads=True) as stack:
        prefill = await stack.add("prefill")
        await stack.add("decode")
        Held(stack)
        barrier = Barrier()
        if not read:
            stack.store.before = lambda operation, key: barrier() if operation == "get" else None
        ask = stack.ask(stack.prompt(LENGTH))
        if read:
            await read_by_all_ranks(stack)
        else:
            await until(lambda: barrier.waiting > 0)
        await prefill.kill()
        stack.store.before = lambda operation, key: None
        barrier.open()
        await stack.end(ask)
        assert stack.is_right(ask)
        assert count(stack, "dropped") == 1
        await until(lambda: not stack.records and not stack.store.objects)
        await until(lambda: len(gate(stack)) == 0 and not stack.decode.engine.scheduler.requests)


@pytest.mark.parametrize("error", [ConnectionError("no answer"), RuntimeError("a bug")])
async def test_a_ledger_that_cannot_be_read(
    early: Stack, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a push nor a read: withdrawn, and the request takes today's path, which needs a read of its own."""
    baseline = early.gauges()
    ledger = early.decode.ledger
    chain = ledger.get_chain
    calls = 0

    async def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise error
        return await chain(*arguments)

    async def silent(boundary: str) -> None:
        raise ConnectionError("the watch has ended")

    monkeypatch.setattr(ledger, "get_chain", broken)
    monkeypatch.setattr(ledger, "wait_committed", silent)
    ask = await early.run(early.prompt(LENGTH))
    assert early.is_right(ask)
    assert early.trace(ask)["from_store"] == LENGTH - 1
    assert count(early, "withdrawn") == 1
    await early.back_to(baseline)


@pytest.mark.parametrize("lost", ["written", "add", "confirm", "withdrawn"])
async def test_a_lost_message(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is needed for an answer; the push is silent, so that the router's word counts."""
    async with running(early_reads=True) as stack:
        await stack.add("prefill")
        await stack.add("decode", load_timeout=0.3)
        baseline = stack.gauges()
        stack.decode.ledger.silent = True
        losses = []
        held: Held | None = None
        if lost == "written":
            monkeypatch.setattr(
                type(stack.dispatcher), "written", lambda self, link, message: losses.append(message)
            )
        elif lost == "withdrawn":
            # The reader has given up before the commit: Confirm finds no request.
            held = Held(stack)
            heard = type(stack.dispatcher).loaded

            def loaded(self: Any, link: WorkerLink, message: pb.Loaded) -> None:
                if message.withdrawn and not losses:
                    losses.append(message)
                else:
                    heard(self, link, message)

            monkeypatch.setattr(type(stack.dispatcher), "loaded", loaded)
        else:
            send = WorkerLink.send

            def losing(self: WorkerLink, message: pb.ToWorker) -> None:
                kind = message.WhichOneof("body")
                if kind == lost and (kind == "confirm" or message.add.load.early) and not losses:
                    losses.append(message)
                else:
                    send(self, message)

            monkeypatch.setattr(WorkerLink, "send", losing)
        if lost == "add":
            await stack.add(
                "decode", load_timeout=0.3
            )  # the request goes to another one when this one is silent
            baseline = stack.gauges()
        ask = stack.ask(stack.prompt(LENGTH))
        await until(lambda: bool(losses))
        if held is not None:
            held.go()
        assert stack.is_right(await stack.end(ask))
        assert stack.trace(ask)["from_store"] == LENGTH - 1
        await stack.back_to(baseline)


# ---- cancelled at each point


async def told_not_scheduled(stack: Stack, held: Held) -> Ask:
    stack.decode.engine.hold()
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: stack.decode.service.job_count == 1)
    stack.abort([ask])
    await asyncio.sleep(0.02)
    stack.decode.engine.go()
    held.go()
    return ask


async def told_and_reading(stack: Stack, held: Held) -> Ask:
    barrier = Barrier()
    stack.store.before = lambda operation, key: barrier() if operation == "get" else None
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: barrier.waiting > 0)
    stack.abort([ask])
    await asyncio.sleep(0.02)
    stack.store.before = lambda operation, key: None
    barrier.open()
    held.go()
    return ask


async def read_not_committed(stack: Stack, held: Held) -> Ask:
    ask = stack.ask(stack.prompt(LENGTH))
    await read_by_all_ranks(stack)
    stack.abort([ask])
    await asyncio.sleep(0.02)
    held.go()
    return ask


async def committed_not_read(stack: Stack, held: Held) -> Ask:
    barrier = Barrier()
    stack.store.before = lambda operation, key: barrier() if operation == "get" else None
    held.go()
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: barrier.waiting > 0 and count(stack, "used") > 0)
    stack.abort([ask])
    stack.store.before = lambda operation, key: None
    barrier.open()
    return ask


@pytest.mark.parametrize(
    "point", [told_not_scheduled, told_and_reading, read_not_committed, committed_not_read]
)
async def test_cancelled(early: Stack, point: Any) -> None:
    baseline = early.gauges()
    await point(early, Held(early))
    await early.back_to(baseline)
    early.prefill.ledger.before_commit = None
    assert early.is_right(await early.run(early.prompt(LENGTH)))


@pytest.mark.parametrize("point", [told_and_reading, read_not_committed])
async def test_control_a_gate_that_nobody_leaves(
    early: Stack, point: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EarlyLoads, "ended", lambda self, job: None)
    baseline = early.gauges()
    await point(early, Held(early))
    with pytest.raises(AssertionError, match="not back at the baseline"):
        await early.back_to(baseline, 0.5)


async def test_streams_that_break_while_the_commit_is_under_way(early: Stack) -> None:
    baseline = early.gauges()
    held = Held(early)
    asks = [early.ask(early.prompt(LENGTH)) for _ in range(3)]
    await read_by_all_ranks(early, 3)
    await early.reset_links()
    held.go()
    for ask in asks:
        assert early.is_right(await early.end(ask))
    await early.back_to(baseline)


async def test_the_decode_worker_is_lost_while_the_commit_is_under_way() -> None:
    async with running(early_reads=True) as stack:
        await stack.add("prefill")
        decode = await stack.add("decode")
        held = Held(stack)
        ask = stack.ask(stack.prompt(LENGTH))
        await read_by_all_ranks(stack)
        await stack.add("decode")
        await decode.kill()
        held.go()
        await stack.end(ask)
        assert stack.is_right(ask)
        assert count(stack, "used") == 0


async def test_many_at_once_with_a_mix_of_ends(early: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right ones, refused ones and cancelled ones beside each other, and everything back at the end."""
    baseline = early.gauges()
    turn = iter(range(10_000))
    told(monkeypatch, lambda record: other_digest(record) if next(turn) % 3 == 0 else record)
    for _ in range(6):
        asks = [early.ask(early.prompt(LENGTH)) for _ in range(8)]
        await until(lambda asks=asks: any(ask.outputs for ask in asks))  # type: ignore[misc]
        early.abort(asks[::4])
        for number, ask in enumerate(asks):
            if number % 4:
                assert early.is_right(await early.end(ask))
    assert count(early, "withdrawn") > 0
    assert count(early, "used") > 0
    await early.back_to(baseline)


async def test_control_a_boundary_that_is_not_given_back(
    early: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(self: PrefillRole, boundaries: list[str]) -> None:
        return None

    monkeypatch.setattr(PrefillRole, "release", nothing)
    baseline = early.gauges()
    await early.run(early.prompt(LENGTH))
    with pytest.raises(AssertionError, match="not back at the baseline"):
        await early.back_to(baseline, 0.5)
