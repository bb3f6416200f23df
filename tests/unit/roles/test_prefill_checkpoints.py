# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a prefill worker: written on the way, found again, pinned, adopted, evicted; nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deltaserve.engine.role import Job, Refused
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryRecord
from statestore.checkpoints.budget import publish_bytes
from statestore.connector.messages import RankReport
from statestore.prefix import prefix_hash
from tests.unit.roles.harness import PrefillHarness, Stream, geometry, job

PROMPT = list(range(100, 170))
LENGTH = len(PROMPT) - 1


async def publish(
    h: PrefillHarness, prompt: list[int] = PROMPT, steps: tuple[int, ...] = (32, 64), **changes: Any
) -> tuple[Job, Any, pb.Published]:
    """One whole publish: prepared, written in these steps, committed."""
    stream = Stream()
    j = job(stream, prompt, publish=pb.Publish(), **changes)
    request = await h.role.prepare(j)
    base = h.intent(request).base
    if (loaded := h.intents(request).load) is not None:
        h.role.on_restored(j, loaded.length, [RankReport(0)])
    outcome = h.outcome_of(request, [step for step in steps if base < step < len(prompt)] + [len(prompt) - 1])
    h.role.on_written(j, outcome)
    message = (await stream.next()).published
    await h.settle()
    h.see()
    return j, request, message


async def joined(**config: Any) -> PrefillHarness:
    h = PrefillHarness(**config)
    await h.join()
    return h


async def test_checkpoints_are_committed_with_the_boundary_in_two_writes() -> None:
    h = await joined()
    _, _, message = await publish(h)
    assert h.ledger.writes == 2
    chain = await h.ledger.get_chain(message.boundary)
    assert [(r.base, r.length, r.reusable) for r in chain] == [
        (0, 32, True),
        (32, 64, True),
        (64, LENGTH, False),
    ]
    assert [r.prefix_hash for r in chain] == [prefix_hash(PROMPT[: r.length]) for r in chain]
    assert (message.cached_tokens, message.store_tokens) == (0, 0)


async def test_what_is_released_is_the_boundary_alone() -> None:
    h = await joined()
    _, _, message = await publish(h)
    held = len(h.store.objects)
    await h.role.release([message.boundary])
    assert len(h.checkpoints()) == 2
    assert h.own() == []
    assert len(h.store.objects) == held - 2
    assert h.role.publisher.budget.held_bytes == 0


async def test_a_shared_prefix_is_restored_and_only_the_rest_published() -> None:
    h = await joined()
    _, _, first = await publish(h)
    other = [*PROMPT[:66], 1, 2, 3, 4, 5, 6]
    j, request, message = await publish(h, other)
    load = h.intents(request).load
    assert load is not None
    assert [record.length for record in load.records] == [32, 64]
    assert h.intent(request).base == 64
    assert (message.committed, message.store_tokens) == (True, 64)
    chain = await h.ledger.get_chain(message.boundary)
    assert [r.id for r in chain[:2]] == [r.id for r in load.records]
    assert (chain[2].base, chain[2].length) == (64, len(other) - 1)
    assert len((await h.ledger.pins())[chain[1].id]) == 2
    assert first.boundary != message.boundary
    assert j.state["restored"] == 64


async def test_another_worker_finds_it_too() -> None:
    one = await joined()
    await publish(one)
    two = PrefillHarness(name="b", beside=one)
    await two.join()
    two.see()
    _, request, message = await publish(two, [*PROMPT[:40], 7, 8])
    assert [r.owner for r in h_load(two, request)] == ["prefill-a"]
    assert message.store_tokens == 32


def h_load(h: PrefillHarness, request: Any) -> tuple[BoundaryRecord, ...]:
    load = h.intents(request).load
    return () if load is None else load.records


@pytest.mark.parametrize(
    ("prompt", "salt"), [(PROMPT, "another tenant"), ([1, *PROMPT[1:]], ""), (PROMPT[:33], "")]
)
async def test_another_salt_or_prefix_shares_nothing(prompt: list[int], salt: str) -> None:
    """(A checkpoint of all N-1 tokens would leave none to compute.)"""
    h = await joined()
    await publish(h)
    j = job(Stream(), prompt, publish=pb.Publish())
    j.add.cache_salt = salt
    request = await h.role.prepare(j)
    assert h_load(h, request) == ()
    assert h.intent(request).base == 0


async def evicted_unseen(h: PrefillHarness) -> None:
    """PROMPT's checkpoints go, by somebody whose view is fresher than this worker's index."""
    for record in reversed(h.role.publisher.index.lookup(PROMPT, "", LENGTH)):
        for name in [*h.own()]:
            await h.ledger.release(await h.ledger.get(name))  # type: ignore[arg-type]
        assert await h.ledger.begin_eviction(record) is not None


async def test_a_publish_that_loses_its_parent_at_the_open_counts_all_rows() -> None:
    h = await joined()
    await publish(h)
    await evicted_unseen(h)
    request = await h.role.prepare(j := job(Stream(), [*PROMPT, 5], publish=pb.Publish()))
    assert h.intent(request).base == 0
    name = str(j.state["publication"].epoch)
    links = (LENGTH + 1) // h.intent(request).checkpoint_tokens
    assert h.role.publisher.budget.held(name) == publish_bytes(geometry(), 0, LENGTH + 1, links)


async def test_a_publish_that_loses_its_parent_and_has_no_room_for_all_rows_is_refused() -> None:
    h = await joined()
    _, _, message = await publish(h)
    await h.role.release([message.boundary])
    await evicted_unseen(h)
    budget = h.role.publisher.budget
    # Room for the rows behind the parent beside it, and 32 bytes less than for all rows alone.
    budget.capacity = publish_bytes(geometry(), 0, LENGTH + 1) - 32
    used = budget.used
    with pytest.raises(Refused, match="room"):
        await h.role.prepare(job(Stream(), [*PROMPT, 5], publish=pb.Publish()))
    assert budget.used <= used, "what was held for it is given back"
    assert h.own() == [], "no record is left pending"


async def test_a_parent_that_was_evicted_between_look_up_and_open_is_done_without() -> None:
    h = await joined()
    await publish(h)
    await evicted_unseen(h)
    _, request, message = await publish(h, [*PROMPT, 5])
    assert h_load(h, request) == ()
    assert message.committed
    assert (await h.ledger.get_chain(message.boundary))[0].base == 0


async def test_a_checkpoint_that_cannot_be_loaded_is_computed_and_not_found_again() -> None:
    h = await joined()
    await publish(h)
    stream = Stream()
    other = [*PROMPT[:66], 1, 2]
    j = job(stream, other, publish=pb.Publish())
    request = await h.role.prepare(j)
    bad = h_load(h, request)[-1]
    h.role.on_restored(j, 0, [RankReport(0, failure="digest", detail="rotten")])
    h.role.on_written(j, h.outcome_of(request, [32, 64, len(other) - 1], load_failed=True))
    message = (await stream.next()).published
    assert (message.committed, message.store_tokens) == (True, 0)
    chain = await h.ledger.get_chain(message.boundary)
    # The healthy checkpoint of 32 tokens is built upon; the rotten one of 64 is not, and has a healthy twin now.
    assert [r.length for r in chain] == [32, 64, len(other) - 1]
    assert bad.id not in {r.id for r in chain}
    await h.settle()
    h.see()
    await h.settle()
    assert bad.id not in h.ledger.records, "its owner has given it back"
    assert not [key for key in h.store.objects if key in {entry.key for entry in bad.objects()}]
    assert h.role.publisher.index.lookup(PROMPT, "", LENGTH)[-1].id == chain[1].id


async def test_the_record_that_the_report_names_is_the_bad_one_and_its_owner_gives_it_back() -> None:
    """The reader is another worker, and what it was to restore is healthy: the record below it is not."""
    owner = await joined()
    await publish(owner)
    reader = PrefillHarness(name="b", beside=owner)
    await reader.join()
    reader.see()
    j = job(Stream(), [*PROMPT[:66], 1, 2], publish=pb.Publish())
    request = await reader.role.prepare(j)
    root, leaf = h_load(reader, request)
    key = root.objects()[1].key
    reader.role.on_restored(j, 0, [RankReport(0, failure="missing", detail=f"PoolMissing: get {key}: gone")])
    await asyncio.sleep(0.05)
    owner.see()
    await owner.settle()
    assert root.id not in owner.ledger.records
    assert leaf.id in owner.checkpoints()
    for h in (owner, reader):
        h.see()
        assert h.role.publisher.index.lookup(PROMPT, "", LENGTH) == (), "what rests on it is of no use"


async def test_a_store_that_is_away_puts_nothing_into_quarantine() -> None:
    h = await joined()
    await publish(h)
    j = job(Stream(), [*PROMPT[:66], 1, 2], publish=pb.Publish())
    request = await h.role.prepare(j)
    chain = h_load(h, request)
    h.role.on_restored(j, 0, [RankReport(0, failure="store_unavailable", detail="away")])
    assert h.role.publisher.index.lookup(PROMPT, "", LENGTH) == chain


async def test_two_that_write_the_same_checkpoints_end_with_one_of_each() -> None:
    h = await joined()
    jobs = []
    for tail in (1, 2):
        stream = Stream()
        j = job(stream, [*PROMPT[:66], tail, tail], publish=pb.Publish())
        jobs.append((stream, j, await h.role.prepare(j)))
    outcomes = [h.outcome_of(request, [32, 64, 67]) for _, _, request in jobs]
    before = len(h.store.objects)
    for (_, j, _), outcome in zip(jobs, outcomes, strict=True):
        h.role.on_written(j, outcome)
    messages = [(await stream.next()).published for stream, _, _ in jobs]
    await h.settle()
    assert all(message.committed for message in messages)
    chains = [await h.ledger.get_chain(message.boundary) for message in messages]
    assert chains[0][:2] == chains[1][:2]
    assert len(h.checkpoints()) == 2
    assert before == 12
    assert len(h.store.objects) == 8, "the copies are gone"


async def test_an_aborted_request_leaves_no_checkpoint() -> None:
    h, stream = await joined(), Stream()
    j = job(stream, PROMPT, publish=pb.Publish())
    request = await h.role.prepare(j)
    h.role.on_end(j, "aborted")
    h.role.on_written(j, h.outcome_of(request, [32, 64]))
    await h.settle()
    assert not h.ledger.records
    assert not h.store.objects
    assert h.role.publisher.budget.used == 0


async def test_a_request_that_is_aborted_while_it_is_prepared_leaves_nothing() -> None:
    h = await joined()
    await publish(h)
    used, records = h.role.publisher.budget.used, dict(h.ledger.records)
    j = job(Stream(), [*PROMPT[:66], 1, 2], publish=pb.Publish())
    j.ended = True
    h.role.on_end(j, "aborted")
    await h.role.prepare(j)
    await h.settle()
    assert h.ledger.records == records
    assert h.role.publisher.budget.used == used


async def test_a_commit_whose_answer_was_lost_is_undone() -> None:
    h, stream = await joined(), Stream()
    j = job(stream, PROMPT, publish=pb.Publish())
    request = await h.role.prepare(j)
    original = h.ledger.commit

    async def lost(*arguments: Any) -> None:
        await original(*arguments)
        raise ConnectionError("the answer was lost")

    h.ledger.commit = lost  # type: ignore[method-assign]
    h.role.on_written(j, h.outcome_of(request, [32, 64, LENGTH]))
    assert not (await stream.next()).published.committed
    await h.settle()
    assert not h.ledger.records
    assert not h.store.objects


# ---- room


async def test_a_full_budget_evicts_the_least_recently_used_leaves_first() -> None:
    sizes = [publish_bytes(geometry(), 0, LENGTH, LENGTH // 16), 2 * 64 * 5 // 2]
    h = await joined(store={"segment_bytes": sum(sizes)}, checkpoint_bytes=1 << 20)
    prompts = [[number, *PROMPT[1:]] for number in range(3)]
    for prompt in prompts[:2]:
        _, _, message = await publish(h, prompt)
        await h.role.release([message.boundary])
    kept = {r.prefix_hash for r in h.checkpoints().values()}
    assert prefix_hash(prompts[0][:32]) in kept, "the control: there was room so far"
    assert h.role.publisher.index.lookup(prompts[0][:33], "", 32), "it has been used last"
    _, _, message = await publish(h, prompts[2])
    await h.role.release([message.boundary])
    kept = {r.prefix_hash for r in h.checkpoints().values()}
    assert prefix_hash(prompts[2][:64]) in kept
    assert prefix_hash(prompts[1][:64]) not in kept, "least recently used, and nothing rests on it"
    assert h.role.publisher.budget.used <= h.role.publisher.budget.capacity
    assert h.role.publisher.budget.used == h.store.used


PROMISED = publish_bytes(geometry(), 0, LENGTH, LENGTH // 16 - 1)
"""Bytes of checkpoints that one publish of PROMPT is reckoned to leave; here it writes 128 bytes a record."""


async def test_checkpoints_stay_within_their_limit() -> None:
    limit = PROMISED + 64 * 2 * 3
    h = await joined(checkpoint_bytes=limit)
    for number in range(6):
        _, _, message = await publish(h, [number, *PROMPT[1:]])
        await h.role.release([message.boundary])
        assert h.role.publisher.budget.checkpoint_bytes <= limit
        assert len(h.store.objects) == 2 * len(h.checkpoints())
    assert 2 <= len(h.checkpoints()) <= 5, "old ones went for new ones"
    assert any(r.prefix_hash == prefix_hash([5, *PROMPT[1:64]]) for r in h.checkpoints().values())


@pytest.mark.parametrize(("share", "spacing"), [(1.0, 16), (0.7, 32), (0.5, 64), (0.2, 0), (0.0, 0)])
async def test_a_small_limit_makes_checkpoints_fewer(share: float, spacing: int) -> None:
    h = await joined(checkpoint_bytes=max(1, int(PROMISED * share)))
    request = await h.role.prepare(job(Stream(), PROMPT, publish=pb.Publish()))
    assert h.intent(request).checkpoint_tokens == spacing


async def test_what_is_in_use_is_not_evicted_and_nothing_more_is_promised() -> None:
    h = await joined()
    _, _, message = await publish(h)
    h.role.publisher.budget.checkpoint_limit = PROMISED + 64
    await h.role.publisher.keeper.make_room(0, PROMISED)
    assert len(h.checkpoints()) == 2, "over what is wanted, but a boundary rests on them"
    assert len(await h.ledger.get_chain(message.boundary)) == 3
    request = await h.role.prepare(job(Stream(), [9, *PROMPT], publish=pb.Publish()))
    assert h.intent(request).checkpoint_tokens == 32, "fewer than there would be room for without them"
    await h.role.release([message.boundary])
    h.role.publisher.budget.checkpoint_limit = 0
    await h.role.publisher.keeper.make_room()
    assert not h.checkpoints()
    assert not h.store.objects


async def test_without_room_it_is_said_before_anything_is_computed() -> None:
    room = publish_bytes(geometry(), 0, LENGTH, LENGTH // 16)
    h = await joined(store={"segment_bytes": room}, checkpoint_bytes=room)
    streams = [Stream(), Stream()]
    first = job(streams[0], PROMPT, publish=pb.Publish())
    request = await h.role.prepare(first)
    second = job(streams[1], PROMPT, publish=pb.Publish())
    with pytest.raises(Refused, match="room"):
        await h.role.prepare(second)
    h.role.on_end(second, "the store has no room")
    message = (await streams[1].next()).published
    assert (message.committed, message.kind) == (False, "store_full")
    assert second.silent
    h.role.on_written(first, h.outcome_of(request, [LENGTH]))
    message = (await streams[0].next()).published
    await h.role.release([message.boundary])
    await h.role.prepare(second := job(streams[1], PROMPT, publish=pb.Publish()))
    assert second.state["publication"], "room again"


async def test_a_store_that_is_full_makes_checkpoints_go() -> None:
    h = await joined()
    _, _, message = await publish(h)
    await h.role.release([message.boundary])
    assert len(h.checkpoints()) == 2
    stream = Stream()
    j = job(stream, [9, *PROMPT], publish=pb.Publish())
    request = await h.role.prepare(j)
    h.role.on_written(j, h.outcome_of(request, [len(PROMPT)], failed="store_full"))
    message = (await stream.next()).published
    assert (message.committed, message.kind) == (False, "store_full")
    await h.settle()
    assert not h.checkpoints()
    assert not h.store.objects


async def test_an_eviction_that_the_store_cannot_finish_is_finished_later() -> None:
    h = await joined()
    _, _, message = await publish(h)
    await h.role.release([message.boundary])
    h.store.away = True
    await h.role.publisher.keeper.evict_some(1 << 30)
    states = [record.state for record in await h.ledger.list()]
    assert sorted(states) == ["committed", "evicting"], "one at a time, and none is lost"
    assert h.role.publisher.budget.used == h.store.used, "bytes count until they are gone"
    h.store.away = False
    await h.settle()
    assert len(h.ledger.records) == 1
    assert len(h.store.objects) == 2


async def test_none_are_left_where_the_configuration_wants_none() -> None:
    for config in ({"checkpoint_tokens": 0}, {"checkpoint_bytes": 0}):
        h = await joined(**config)
        await publish(h)
        assert not h.checkpoints()


async def test_released_counts_what_is_gone() -> None:
    from deltaserve.telemetry import HANDOFF

    h = await joined()
    _, _, message = await publish(h)
    before = HANDOFF._released._value.get()
    h.store.away = True
    await h.role.release([message.boundary])
    await asyncio.sleep(0)
    assert HANDOFF._released._value.get() == before, "it is still there"
    h.store.away = False
    await h.settle()
    assert HANDOFF._released._value.get() == before + 1
