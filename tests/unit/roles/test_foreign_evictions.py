# SPDX-License-Identifier: Apache-2.0
"""Room in chains that end in other workers' checkpoints: who makes what invisible, who gives what back, what stays."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from deltaserve.telemetry import HANDOFF
from deltaserve.wire import worker_pb2 as pb
from statestore import sweeping
from statestore.boundary import BoundaryRecord
from statestore.checkpoints.budget import publish_bytes
from statestore.ledger import ChainBroken
from tests.unit.roles.harness import DecodeHarness, PrefillHarness, Stream, job, until
from tests.unit.roles.test_decode_checkpoints import ANSWER, answer, decode_beside
from tests.unit.roles.test_prefill_checkpoints import PROMISED, PROMPT, joined, publish


@dataclass
class Pair:
    """A prefill worker, and a decode worker that keeps the ends of answers."""

    prefill: PrefillHarness
    decode: DecodeHarness

    async def turn(self, first: int) -> list[int]:
        """A whole request whose prompt begins with `first`; returns the tokens that its answer's end holds."""
        prompt = [first, *PROMPT[1:]]
        _, _, message = await publish(self.prefill, prompt)
        self.decode.see()
        await answer(self.decode, message.boundary, prompt)
        await self.prefill.role.release([message.boundary])
        await self.prefill.settle()
        self.prefill.see()
        return [*prompt, *ANSWER[:-1]]

    async def make_room(self, limit: int = 0) -> None:
        """The prefill worker may keep so many bytes of checkpoints from now on."""
        self.prefill.role.publisher.budget.checkpoint_limit = limit
        await self.prefill.role.publisher.keeper.make_room()

    def of(self, h: PrefillHarness | DecodeHarness) -> list[BoundaryRecord]:
        """Visible checkpoints of one of the two."""
        return [record for record in h.checkpoints().values() if record.owner == h.worker_id]

    async def noticed(self, h: PrefillHarness | DecodeHarness) -> None:
        h.see()
        await h.settle()

    async def accounted(self) -> None:
        """What lies in the store is what visible checkpoints name, and every budget says so."""
        for h in (self.prefill, self.decode):
            await self.noticed(h)
            budget, own = h.role.publisher.budget, self.of(h)
            assert set(budget.checkpoints) == {record.id for record in own}
            assert budget.used == sum(record.nbytes for record in own)
        named = {entry.key for record in self.prefill.checkpoints().values() for entry in record.objects()}
        assert set(self.prefill.store.objects) == named
        assert self.prefill.own() == []


@pytest.fixture
async def pair() -> Pair:
    prefill = await joined()
    return Pair(prefill, await decode_beside(prefill))


def evictions() -> float:
    return float(HANDOFF._checkpoints.labels("evicted")._value.get())


async def test_the_end_of_an_answer_goes_so_that_what_it_rests_on_can(pair: Pair) -> None:
    await pair.turn(0)
    (end,) = pair.of(pair.decode)
    assert [name in pair.prefill.role.publisher.budget.checkpoints for name in end.parents] == [True, True]
    before = evictions()
    await pair.make_room()
    assert pair.of(pair.prefill) == [] == pair.of(pair.decode), "nobody was waited for"
    assert pair.prefill.role.publisher.budget.used == 0
    assert evictions() - before == 2
    gone = await pair.prefill.ledger.get(end.id)
    assert gone is not None
    assert gone.state == "evicting"
    assert {entry.key for entry in end.objects()} == set(pair.prefill.store.objects), "its owner's to remove"
    assert pair.decode.role.publisher.budget.used == end.nbytes, "and free when they have gone"
    await pair.accounted()
    assert evictions() - before == 3, "each once"
    assert not pair.prefill.ledger.records


async def test_new_checkpoints_are_left_where_old_chains_end_at_others(pair: Pair) -> None:
    """Conversations that share nothing: each leaves as many checkpoints as the first, in place of the oldest."""
    budget = pair.prefill.role.publisher.budget
    budget.checkpoint_limit = PROMISED + 3 * 256
    first = await pair.turn(0)
    for number in range(1, 6):
        newest = await pair.turn(number)
        assert budget.checkpoint_bytes <= budget.checkpoint_limit
    index = pair.prefill.role.publisher.index
    assert index.lookup(first, "", len(first)) == ()
    assert [record.length for record in index.lookup(newest, "", len(newest))] == [32, 64, len(newest)]
    await pair.accounted()


async def test_the_least_recently_used_chain_goes_and_no_more_than_is_needed(pair: Pair) -> None:
    turns = [await pair.turn(number) for number in range(3)]
    index = pair.prefill.role.publisher.index
    kept = pair.prefill.role.publisher.budget.checkpoint_bytes
    assert index.lookup(turns[0], "", 1000), "used last"
    await pair.make_room(kept - 1)
    await pair.noticed(pair.decode)
    assert [bool(index.lookup(turn, "", 1000)) for turn in turns] == [True, True, True]
    assert [len(index.lookup(turn, "", 1000)) for turn in turns] == [3, 1, 3], (
        "its end, and the leaf under it"
    )
    await pair.accounted()


async def test_where_a_request_rests_on_a_chain_nothing_of_it_goes(pair: Pair) -> None:
    """Two answers end on the same checkpoints; somebody continues one of them, so the other one stays as well."""
    held = await pair.turn(0)
    await answer(
        pair.decode, tokens=[9, 9, 9, 9], prompt=[0, *PROMPT[1:]]
    )  # a second end, without a boundary
    assert len(pair.of(pair.decode)) == 2
    pair.prefill.see()
    _, _, message = await publish(pair.prefill, [*held, 1, 2, 3], ())
    assert (await pair.prefill.ledger.get_chain(message.boundary))[-2].length == len(held)
    await pair.make_room()
    assert len(pair.of(pair.decode)) == 2
    assert len(await pair.prefill.ledger.get_chain(message.boundary)) == 4
    await pair.prefill.role.release([message.boundary])
    await pair.make_room()
    assert not pair.prefill.checkpoints()
    await pair.accounted()


async def test_control_without_comparing_pins_a_request_loses_its_chain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await pair.turn(0)
    _, _, message = await publish(pair.prefill, [*held, 1, 2, 3], ())
    ledger = pair.prefill.ledger
    blind = ledger.begin_eviction

    async def nothing_pins() -> dict[str, list[str]]:
        return {}

    monkeypatch.setattr(ledger, "pins", nothing_pins)
    monkeypatch.setattr(ledger, "begin_eviction", lambda record: blind(record, bad=True))
    await pair.make_room()
    with pytest.raises(ChainBroken):
        await pair.prefill.ledger.get_chain(message.boundary)


async def test_a_request_that_opens_at_the_same_moment_keeps_the_chain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the read of the pins and the transaction: the comparison decides."""
    held = await pair.turn(0)
    other = PrefillHarness(name="b", beside=pair.prefill)
    await other.join()
    other.see()
    opened: list[pb.Published] = []
    ledger = pair.prefill.ledger
    pins = ledger.pins

    async def and_somebody_opens() -> dict[str, list[str]]:
        found = await pins()
        if not opened:
            opened.append((await publish(other, [*held, 1, 2, 3], ()))[2])
        return found

    monkeypatch.setattr(ledger, "pins", and_somebody_opens)
    await pair.make_room()
    assert opened[0].store_tokens == len(held)
    assert len(await ledger.get_chain(opened[0].boundary)) == 4


async def test_both_want_the_same_one(pair: Pair) -> None:
    await pair.turn(0)
    before = evictions()
    await asyncio.gather(pair.make_room(), pair.decode.role.publisher.keeper.evict_some(1 << 20))
    await pair.accounted()
    assert not pair.prefill.ledger.records
    assert evictions() - before == 3


async def test_an_owner_that_is_dead_is_waited_for_by_nobody_and_swept(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.turn(0)
    (end,) = pair.of(pair.decode)
    await pair.prefill.register.expire(pair.decode.worker_id)
    await pair.make_room()
    assert not pair.prefill.checkpoints()
    assert list(pair.prefill.ledger.records) == [end.id]
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 0.01)
    sweep = asyncio.ensure_future(sweeping.sweep_forever(pair.prefill.ledger, pair.prefill.pool, 0.01))
    await until(lambda: not pair.prefill.ledger.records)
    sweep.cancel()
    assert not pair.prefill.store.objects


async def test_an_owner_that_hears_of_it_by_a_refused_open_gives_it_back(pair: Pair) -> None:
    """Its index still shows the record; the ledger refuses to let anything rest on it."""
    first = await pair.turn(0)
    other = PrefillHarness(name="b", beside=pair.prefill)
    await other.join()
    other.see()
    chain = other.role.publisher.index.lookup(first, "", 1000)
    for record in reversed(chain):
        assert await other.ledger.begin_eviction(record) is not None
    assert pair.prefill.role.publisher.index.lookup([0, *PROMPT[1:]], "", 68) == chain[:2]
    j = job(Stream(), [0, *PROMPT[1:]], publish=pb.Publish())
    request = await pair.prefill.role.prepare(j)
    assert pair.prefill.intents(request).load is None
    await until(lambda: chain[1].id not in pair.prefill.role.publisher.budget.checkpoints)
    assert chain[1].id not in pair.prefill.ledger.records


async def test_a_view_from_before_the_commit_takes_nothing_away(pair: Pair) -> None:
    h = pair.prefill
    index = h.role.publisher.index
    old = dict(index.records)
    _, _, message = await publish(h)
    index.apply(old)
    assert len(index.records) == 0, "the control: it looked as if all had gone"
    await h.settle()
    assert len(await h.ledger.get_chain(message.boundary)) == 3
    assert len(index.lookup(PROMPT, "", 68)) == 2
    await h.role.release([message.boundary])
    await pair.accounted()


async def test_a_request_does_not_evict_what_it_starts_from(pair: Pair) -> None:
    pair.prefill.object_bytes = 1200
    held = await pair.turn(0)
    publisher = pair.prefill.role.publisher
    publisher.budget.checkpoint_limit = publisher.budget.checkpoint_bytes
    request = await pair.prefill.role.prepare(job(Stream(), [*held, *range(64)], publish=pb.Publish()))
    load = pair.prefill.intents(request).load
    assert load is not None
    assert load.length == len(held)
    assert pair.prefill.intent(request).checkpoint_tokens == 0, "it leaves none instead"


async def test_unless_there_is_no_room_for_its_boundary(pair: Pair) -> None:
    pair.prefill.object_bytes = 1200
    held = await pair.turn(0)
    publisher = pair.prefill.role.publisher
    longer = [*held, *range(64)]
    publisher.budget.capacity = publish_bytes(publisher.geometry, 0, len(longer) - 1)
    publisher.budget.checkpoint_limit = publisher.budget.checkpoint_bytes
    assert not publisher.budget.fits(publish_bytes(publisher.geometry, len(held), len(longer) - 1))
    request = await pair.prefill.role.prepare(job(Stream(), longer, publish=pb.Publish()))
    assert pair.prefill.intents(request).load is None
    assert pair.prefill.intent(request).base == 0
    assert publisher.budget.used <= publisher.budget.capacity
