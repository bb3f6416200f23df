# SPDX-License-Identifier: Apache-2.0
"""The ledger's contract for chains: pins, commits of several links, adoption, eviction; over the double and etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Compare, Etcd, EtcdMembership, Op
from statestore.boundary import BoundaryInvalid, BoundaryRecord, Epoch
from statestore.checkpoints.chain import adopt, check_chain
from statestore.etcd_ledger import EtcdLedger
from statestore.ledger import (
    MAX_LINKS,
    ChainBroken,
    CheckpointExists,
    CommitConflict,
    FencedOut,
    Ledger,
    ParentGone,
)
from tests.support.chains import as_pending, chain_of, link_record
from tests.support.ledger_world import World, member
from tests.support.records import MODEL


async def publish(world: World, links: list[BoundaryRecord]) -> list[BoundaryRecord]:
    """Open the last link, commit all of them."""
    await world.ledger.open(as_pending(replace(links[-1], parents=links[0].parents, base=links[0].base)))
    await world.ledger.commit(links)
    return links


def further(epoch: Epoch) -> Epoch:
    return Epoch(epoch.lease, epoch.counter + 1000)


# ---- commit of several links


async def test_links_become_visible_together_and_are_a_chain(world: World) -> None:
    epoch = await world.owner()
    links = chain_of(epoch, [16, 32, 40], ranks=2)
    await world.ledger.open(as_pending(replace(links[-1], parents=(), base=0)))
    assert await world.other.get_checkpoints([links[0].id]) == {}, "the control: nothing before the commit"
    assert await world.other.get_chain(links[-1].id) == ()
    await world.ledger.commit(links)
    assert await world.other.get_chain(links[-1].id) == tuple(links)
    assert await world.other.get_chain(links[1].id) == tuple(links[:2])
    assert await world.other.pins() == {links[0].id: [links[1].id], links[1].id: [links[2].id]}
    assert [record.id for record in await world.other.list()] == [record.id for record in links]
    assert await world.other.find(MODEL, links[0].prefix_hash) == [links[0]]
    await world.ledger.commit(links)  # the answer was lost and the call repeated
    assert await world.other.get_chain(links[-1].id) == tuple(links)


async def test_the_largest_commit_is_one_transaction(world: World) -> None:
    epoch = await world.owner()
    root = (await publish(world, chain_of(epoch, [4], last_reusable=True)))[0]
    new = further(epoch)
    links: list[BoundaryRecord] = []
    for number in range(MAX_LINKS):
        before = links[-1] if links else root
        parents = (*before.parents, before.id)
        reusable = number < MAX_LINKS - 1
        links.append(
            link_record(new, number, before.length, before.length + 4, parents, reusable=reusable, ranks=8)
        )
    await publish(world, links)
    assert await world.other.get_chain(links[-1].id) == (root, *links)
    too_many = chain_of(further(new), [4 * n for n in range(1, MAX_LINKS + 2)])
    with pytest.raises(BoundaryInvalid, match="links"):
        await world.ledger.commit(too_many)


async def test_links_that_do_not_join_are_refused(world: World) -> None:
    epoch = await world.owner()
    links = chain_of(epoch, [16, 32])
    await world.ledger.open(as_pending(replace(links[-1], parents=(), base=0)))
    for wrong in (replace(links[1], base=8), replace(links[1], parents=("another",))):
        with pytest.raises(BoundaryInvalid, match="must be"):
            await world.ledger.commit([links[0], wrong])
    assert await world.other.get_checkpoints([links[0].id]) == {}


async def test_a_lost_lease_makes_no_link_visible(world: World) -> None:
    epoch = await world.owner()
    links = chain_of(epoch, [16, 32])
    await world.ledger.open(as_pending(replace(links[-1], parents=(), base=0)))
    await world.expire("prefill-1")
    with pytest.raises(FencedOut):
        await world.ledger.commit(links)
    assert await world.other.get_checkpoints([links[0].id]) == {}


async def test_a_record_committed_under_another_id_than_it_was_opened(world: World) -> None:
    """The end of an answer: prefix and length are known at the end only."""
    epoch = await world.owner("decode-1")
    end = link_record(epoch, 0, 0, 50, owner="decode-1")
    opened = replace(as_pending(end), id=f"answer.{epoch}", length=40, prefix_hash="0" * 32)
    await world.ledger.open(opened)
    await world.ledger.commit([end], opened.id)
    assert await world.other.list() == [end]
    await world.ledger.commit([end], opened.id)
    with pytest.raises(CommitConflict):
        await world.ledger.commit([replace(end, id="other")], opened.id)


# ---- pins


async def test_what_something_rests_on_is_not_evicted(world: World) -> None:
    epoch = await world.owner()
    (checkpoint,) = await publish(world, chain_of(epoch, [16], last_reusable=True))
    child = link_record(further(epoch), 0, 16, 24, [checkpoint.id], reusable=False)
    await world.other.open(as_pending(child))
    assert await world.ledger.begin_eviction(checkpoint) is None
    assert await world.other.get_checkpoints([checkpoint.id]) == {checkpoint.id: checkpoint}
    await world.other.commit([child])
    assert await world.ledger.begin_eviction(checkpoint) is None
    assert await world.other.release(child)
    assert await world.other.pins() == {}
    evicting = await world.ledger.begin_eviction(checkpoint)
    assert evicting == replace(checkpoint, state="evicting")
    assert await world.ledger.begin_eviction(checkpoint) == evicting, "the answer may have been lost"
    assert await world.other.get_committed(checkpoint.id) is None
    assert await world.other.get_checkpoints([checkpoint.id]) == {}
    assert await world.other.list() == [evicting], "its objects are still to be removed"
    assert await world.ledger.release(evicting)
    assert await world.other.list() == []
    assert await world.ledger.begin_eviction(checkpoint) is None


async def test_what_is_bad_goes_whatever_rests_on_it(world: World) -> None:
    epoch = await world.owner()
    links = await publish(world, chain_of(epoch, [16, 32, 40]))
    assert await world.other.begin_eviction(links[0], bad=True) == replace(links[0], state="evicting")
    with pytest.raises(ChainBroken):
        await world.ledger.get_chain(links[2].id)
    assert await world.ledger.release(links[0])
    assert await world.other.pins() == {links[0].id: [links[1].id], links[1].id: [links[2].id]}
    await world.ledger.release(links[2])
    await world.ledger.release(links[1])
    assert await world.other.pins() == {}


async def test_a_name_that_begins_alike_is_no_child(world: World) -> None:
    epoch = await world.owner()
    one = replace(link_record(epoch, 0, 0, 16), id="check")
    two = replace(link_record(further(epoch), 0, 0, 16, story=1), id="check2")
    for record in (one, two):
        await world.ledger.open(as_pending(record))
        await world.ledger.commit([record])
    await world.ledger.open(as_pending(link_record(further(two.epoch), 0, 16, 20, ["check2"])))
    assert await world.ledger.begin_eviction(two) is None
    assert await world.ledger.begin_eviction(one) is not None


async def test_nothing_is_opened_on_what_is_gone(world: World) -> None:
    epoch = await world.owner()
    (checkpoint,) = await publish(world, chain_of(epoch, [16], last_reusable=True))
    evicting = await world.ledger.begin_eviction(checkpoint)
    assert evicting is not None
    child = as_pending(link_record(further(epoch), 0, 16, 24, [checkpoint.id], reusable=False))
    with pytest.raises(ParentGone, match=checkpoint.id):
        await world.other.open(child)
    await world.ledger.release(evicting)
    with pytest.raises(ParentGone):
        await world.other.open(child)
    assert await world.other.pins() == {}


async def test_a_pending_record_is_no_parent(world: World) -> None:
    epoch = await world.owner()
    checkpoint = link_record(epoch, 0, 0, 16)
    await world.ledger.open(as_pending(checkpoint))
    with pytest.raises(ParentGone):
        await world.ledger.open(as_pending(link_record(further(epoch), 0, 16, 24, [checkpoint.id])))


async def test_the_pin_moves_to_the_last_checkpoint_of_the_commit(world: World) -> None:
    epoch = await world.owner()
    (root,) = await publish(world, chain_of(epoch, [16], last_reusable=True))
    new = further(epoch)
    middle = link_record(new, 0, 16, 32, [root.id])
    own = link_record(new, 1, 32, 40, [root.id, middle.id], reusable=False)
    await world.ledger.open(as_pending(replace(own, parents=(root.id,), base=16)))
    assert await world.other.pins() == {root.id: [own.id]}
    await world.ledger.commit([middle, own])
    assert await world.other.pins() == {root.id: [middle.id], middle.id: [own.id]}
    assert await world.other.get_chain(own.id) == (root, middle, own)
    await world.ledger.release(own)
    assert await world.ledger.begin_eviction(root) is None, "from the leaves only"
    assert await world.ledger.begin_eviction(middle) is not None


async def test_a_commit_that_rests_on_nothing_any_more_gives_its_pin_back(world: World) -> None:
    """The load of the parent failed, so everything was computed, and the boundary starts at token 0."""
    epoch = await world.owner()
    (root,) = await publish(world, chain_of(epoch, [16], last_reusable=True))
    own = link_record(further(epoch), 0, 0, 40, reusable=False)
    opened = replace(as_pending(own), parents=(root.id,), base=16)
    await world.ledger.open(opened)
    await world.ledger.commit([own], opened.id)
    assert await world.other.pins() == {}
    assert await world.other.get_chain(own.id) == (own,)


async def test_a_parent_that_was_swept_lets_no_child_be_committed(world: World) -> None:
    dead, living = await world.owner("prefill-1"), await world.owner("prefill-2")
    (root,) = await publish(world, chain_of(dead, [16], last_reusable=True))
    own = link_record(living, 0, 16, 40, [root.id], reusable=False, owner="prefill-2")
    await world.other.open(as_pending(own))
    await world.expire("prefill-1")

    async def remove(record: BoundaryRecord) -> None:
        assert record.id == root.id

    assert [record.id for record in await world.other.sweep(set(), remove)] == [root.id]
    with pytest.raises(ParentGone):
        await world.other.commit([own])
    await world.other.abort(as_pending(own))
    assert await world.other.pins() == {}


# ---- the same checkpoint twice


async def test_a_checkpoint_is_committed_once(world: World) -> None:
    epoch = await world.owner()
    first = await publish(world, chain_of(epoch, [16, 32, 40]))
    second = chain_of(further(epoch), [16, 32, 44])
    opened = as_pending(replace(second[-1], parents=(), base=0))
    await world.other.open(opened)
    with pytest.raises(CheckpointExists) as refused:
        await world.other.commit(second)
    assert {record.id for record in refused.value.records} == {first[0].id, first[1].id}
    left, copies = adopt(second, refused.value.records)
    assert copies == second[:2]
    assert [record.parents for record in left] == [(first[0].id, first[1].id)]
    await world.other.commit(left, opened.id)
    assert await world.other.get_chain(second[-1].id) == (*first[:2], left[0])
    assert len((await world.other.pins())[first[1].id]) == 2
    assert await world.ledger.get(second[0].id) is None


async def test_a_copy_may_be_committed_beside(world: World) -> None:
    epoch = await world.owner()
    await publish(world, chain_of(epoch, [16, 40]))
    second = chain_of(further(epoch), [16, 44])
    await world.ledger.open(as_pending(replace(second[-1], parents=(), base=0)))
    await world.ledger.commit(second, beside=True)
    assert await world.other.get_chain(second[-1].id) == tuple(second)


async def test_the_boundary_of_another_request_is_no_copy(world: World) -> None:
    """A boundary may be as long as a checkpoint, and of the same tokens: it is its request's own."""
    epoch = await world.owner()
    await publish(world, [link_record(epoch, 0, 0, 16, reusable=False)])
    await publish(world, chain_of(further(epoch), [16, 40]))


# ---- reading


async def test_a_chain_with_a_hole_is_broken(world: World) -> None:
    epoch = await world.owner()
    links = await publish(world, chain_of(epoch, [16, 32, 40]))
    await world.ledger.release(links[0])
    with pytest.raises(ChainBroken, match=links[0].id):
        await world.other.get_chain(links[-1].id)
    assert await world.other.get_chain(links[-1].id, {links[0].id: links[0]}) == tuple(links)
    with pytest.raises(ChainBroken, match="base"):
        await world.other.get_chain(links[-1].id, {links[0].id: replace(links[0], length=17)})


async def test_chains_are_checked() -> None:
    links = chain_of(Epoch(1, 1), [16, 32, 40])
    check_chain(links)
    wrong = [
        [],
        links[1:],
        [replace(links[0], model_digest="ee"), *links[1:]],
        [replace(links[0], reusable=False), *links[1:]],
    ]
    for chain in wrong:
        with pytest.raises(BoundaryInvalid):
            check_chain(chain)


async def test_the_watch_shows_committed_checkpoints_only(world: World) -> None:
    epoch = await world.owner()
    async with contextlib.aclosing(world.other.watch_checkpoints()) as watch:
        assert await _until(watch, lambda seen: True) == {}
        links = await publish(world, chain_of(epoch, [16, 32, 40]))
        wanted = {links[0].id: links[0], links[1].id: links[1]}
        assert await _until(watch, lambda seen: len(seen) == 2) == wanted
        await world.ledger.release(links[2])
        await world.ledger.begin_eviction(links[1])
        assert await _until(watch, lambda seen: len(seen) == 1) == {links[0].id: links[0]}


async def _until(watch: Any, holds: Callable[[dict[str, BoundaryRecord]], bool]) -> dict[str, BoundaryRecord]:
    async with asyncio.timeout(30):
        while True:
            seen: dict[str, BoundaryRecord] = await anext(watch)
            if holds(seen):
                return seen


# ---- sweeping


async def test_a_sweep_takes_links_pins_and_half_evicted_checkpoints(world: World) -> None:
    epoch = await world.owner()
    links = await publish(world, chain_of(epoch, [16, 32, 40]))
    half = as_pending(link_record(further(epoch), 0, 32, 50, [links[0].id, links[1].id], reusable=False))
    await world.ledger.open(half)
    (leaf,) = await publish(world, chain_of(further(half.epoch), [8], last_reusable=True, story=2))
    assert await world.ledger.begin_eviction(leaf) is not None
    await world.expire("prefill-1")
    seen: list[str] = []

    async def remove(record: BoundaryRecord) -> None:
        seen.append(record.state)

    gone = await world.other.sweep(set(), remove)
    assert len(gone) == 5
    assert sorted(seen) == ["committed"] * 3 + ["evicting", "pending"]
    assert await world.other.list() == []
    assert await world.other.pins() == {}


# ---- etcd only


async def test_none_under_compares_a_whole_range(etcd_config: EtcdConfig) -> None:
    etcd = Etcd(etcd_config)
    children, other = f"{etcd_config.prefix}/c/one/", f"{etcd_config.prefix}/c/one2/x"
    await etcd.put(other, "")
    assert (await etcd.txn([Compare.none_under(children)], [])).succeeded
    await etcd.put(children + "a", "")
    assert not (await etcd.txn([Compare.none_under(children)], [])).succeeded
    assert (await etcd.txn([Compare.exists(other)], [])).succeeded
    assert not (await etcd.txn([Compare.exists(other + "y")], [])).succeeded
    result = await etcd.txn([], [Op.get_prefix(children), Op.delete(children + "a")])
    assert [kv.key for kv in result.ranges[0]] == [children + "a"]
    assert result.deleted == 1
    assert (await etcd.txn([Compare.none_under(children)], [])).succeeded
    await etcd.close()


async def test_an_open_and_an_eviction_that_race_have_one_winner(etcd_config: EtcdConfig) -> None:
    ledgers: list[Ledger] = [EtcdLedger(etcd_config), EtcdLedger(etcd_config)]
    worker = EtcdMembership(etcd_config)
    lease = (await worker.join(member("prefill-1"))).lease
    outcomes = set()
    for number in range(30):
        (checkpoint,) = chain_of(Epoch(lease, 2 * number), [16], last_reusable=True, story=number)
        await ledgers[0].open(as_pending(checkpoint))
        await ledgers[0].commit([checkpoint])
        child = as_pending(link_record(Epoch(lease, 2 * number + 1), 0, 16, 20, [checkpoint.id]))
        calls = [ledgers[0].begin_eviction(checkpoint), ledgers[1].open(child)]
        order = 1 if number % 2 else -1
        results = await asyncio.gather(*calls[::order], return_exceptions=True)
        evicted, opened = results[::order]
        assert (evicted is not None) == isinstance(opened, ParentGone), results
        assert (evicted is None) == (opened is None), results
        outcomes.add(evicted is None)
    assert outcomes == {True, False}, "the control: both happen"
    for one in (*ledgers, worker):
        await one.close()


async def test_a_commit_of_many_links_takes_one_call(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, worker = EtcdLedger(etcd_config), EtcdMembership(etcd_config)
    epoch = Epoch((await worker.join(member("prefill-1"))).lease, 1)
    calls: list[str] = []
    original = Etcd._call

    async def counting(self: Etcd, name: str, make: Any) -> Any:
        calls.append(name)
        return await original(self, name, make)

    links = chain_of(epoch, [16, 32, 48, 60], ranks=8)
    monkeypatch.setattr(Etcd, "_call", counting)
    await ledger.open(as_pending(replace(links[-1], parents=(), base=0)))
    await ledger.commit(links)
    assert [name for name in calls if name != "keepalive"] == ["txn", "txn"]
    calls.clear()
    await ledger.get_chain(links[-1].id)
    assert [name for name in calls if name != "keepalive"] == ["txn", "txn"], "the record, then its parents"
    await ledger.close()
    await worker.close()
