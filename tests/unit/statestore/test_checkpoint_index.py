# SPDX-License-Identifier: Apache-2.0
"""What a prompt may start from: the longest checkpoint whose chain is whole, of the same tokens and salt."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Etcd, EtcdMembership
from statestore.boundary import BoundaryRecord, Epoch
from statestore.checkpoints.index import CheckpointIndex
from statestore.etcd_ledger import EtcdLedger
from statestore.prefix import prefix_hash
from tests.support import services
from tests.support.chains import as_pending, link_record
from tests.support.ledger_world import World, member
from tests.unit.roles.harness import MODEL, geometry

PROMPT = list(range(500, 700))
GEOMETRY = geometry()
EPOCH = Epoch(1, 1)


def checkpoint(
    number: int, length: int, parents: Sequence[BoundaryRecord] = (), salt: str = "", **changes: Any
) -> BoundaryRecord:
    """A committed checkpoint of the first `length` tokens of PROMPT."""
    return link_record(
        Epoch(1, number),
        0,
        parents[-1].length if parents else 0,
        length,
        [parent.id for parent in parents],
        **{
            "prefix": prefix_hash(PROMPT[:length], salt),
            "model": MODEL,
            "geometry": GEOMETRY.to_json(),
            "created": float(number),
            **changes,
        },
    )


def index_of(*records: BoundaryRecord) -> CheckpointIndex:
    index = CheckpointIndex(GEOMETRY)
    index.apply({record.id: record for record in records})
    return index


def test_the_longest_chain_that_is_not_too_long() -> None:
    one = checkpoint(1, 32)
    two = checkpoint(2, 64, [one])
    three = checkpoint(3, 128, [one, two])
    index = index_of(one, two, three)
    assert index.lookup(PROMPT, "", 199) == (one, two, three)
    assert index.lookup(PROMPT, "", 128) == (one, two, three)
    assert index.lookup(PROMPT, "", 127) == (one, two)
    assert index.lookup(PROMPT[:50], "", 49) == (one,)
    assert index.lookup(PROMPT, "", 31) == ()
    assert index.lookup([1, *PROMPT[1:]], "", 199) == ()
    assert index.lookup([*PROMPT[:100], 1, *PROMPT[101:]], "", 199) == (one, two)


def test_another_salt_shares_nothing() -> None:
    one = checkpoint(1, 64, salt="tenant a")
    index = index_of(one)
    assert index.lookup(PROMPT, "tenant a", 199) == (one,)
    assert index.lookup(PROMPT, "tenant b", 199) == ()
    assert index.lookup(PROMPT, "", 199) == ()


def test_a_chain_with_a_hole_is_no_hit() -> None:
    one = checkpoint(1, 32)
    two = checkpoint(2, 64, [one])
    three = checkpoint(3, 96, [one, two])
    assert index_of(one, three).lookup(PROMPT, "", 199) == (one,)
    assert index_of(two, three).lookup(PROMPT, "", 199) == ()
    index = index_of(one, two, three)
    index.apply({one.id: one, three.id: three})
    assert index.lookup(PROMPT, "", 199) == (one,)


def test_what_another_geometry_or_model_wrote_is_left_out() -> None:
    good = checkpoint(1, 32)
    odd = [
        checkpoint(2, 64, geometry=geometry(conv_dtype="bfloat16").to_json()),
        checkpoint(3, 96, model="feed" * 4),
        checkpoint(4, 128, geometry="{}"),
    ]
    assert index_of(good, *odd).lookup(PROMPT, "", 199) == (good,)
    wide = checkpoint(5, 64, geometry=geometry(tp=4).to_json())
    assert index_of(good, wide).lookup(PROMPT, "", 199) == (wide,), "another TP maps"


def test_the_newest_of_equal_ones() -> None:
    old, new = checkpoint(1, 64), checkpoint(2, 64)
    assert index_of(new, old).lookup(PROMPT, "", 199) == (new,)
    index = index_of(new, old)
    index.quarantine(new.id)
    assert index.lookup(PROMPT, "", 199) == (old,)


def test_quarantine_hides_what_rests_on_it_too() -> None:
    one = checkpoint(1, 32)
    two = checkpoint(2, 64, [one])
    three = checkpoint(3, 96, [one, two])
    index = index_of(one, two, three)
    index.quarantine(two.id)
    assert index.is_quarantined(two.id)
    assert index.lookup(PROMPT, "", 199) == (one,)
    index.apply({one.id: one})
    index.apply({one.id: one, two.id: two})
    assert index.lookup(PROMPT, "", 199) == (one, two), "a new life of the record is another record"


def test_use_is_seen_in_hits_and_in_children() -> None:
    now = [0.0]
    index = CheckpointIndex(GEOMETRY, lambda: now[0])
    one, other = checkpoint(1, 32), checkpoint(2, 48)
    now[0] = 1.0
    index.apply({one.id: one, other.id: other})
    assert index.is_leaf(one.id)
    now[0] = 2.0
    two = checkpoint(3, 64, [one])
    index.add([two])
    assert not index.is_leaf(one.id)
    assert (index.last_used(one.id), index.last_used(other.id)) == (2.0, 1.0)
    now[0] = 3.0
    assert index.lookup(PROMPT[:60], "", 59) == (other,)
    assert (index.last_used(one.id), index.last_used(other.id)) == (2.0, 3.0)
    index.quarantine(other.id)
    assert index.last_used(other.id) == 0.0, "what failed goes first"
    index.remove(two.id)
    assert index.is_leaf(one.id)


def test_a_record_that_was_not_seen_yet_can_be_judged() -> None:
    one = checkpoint(1, 32)
    two = checkpoint(2, 64, [one])
    index = index_of(one)
    assert index.usable(two)
    index.quarantine(one.id)
    assert not index.usable(two)
    assert not index_of().usable(two)


async def test_it_follows_the_ledger(world: World) -> None:
    epoch = await world.owner()
    index = CheckpointIndex(GEOMETRY)
    task = asyncio.ensure_future(index.follow(world.other))
    try:
        record = replace(checkpoint(1, 64), epoch=epoch, id="c")
        record = replace(record, ranks=checkpoint(epoch.counter, 64).ranks)
        await world.ledger.open(as_pending(record))
        await world.ledger.commit([record])
        await _until(lambda: index.lookup(PROMPT, "", 199) == (record,))
        assert await world.ledger.begin_eviction(record) is not None
        await _until(lambda: index.lookup(PROMPT, "", 199) == ())
    finally:
        task.cancel()


async def test_it_follows_through_compaction_and_an_absence(own_etcd: services.EtcdService) -> None:
    config: EtcdConfig = own_etcd.config("/index", timeout=1.0)
    etcd, ledger, watched = Etcd(config), EtcdLedger(config), EtcdLedger(config)
    worker = EtcdMembership(config)
    lease = (await worker.join(member("prefill-1"))).lease
    index = CheckpointIndex(GEOMETRY)
    task = asyncio.ensure_future(index.follow(watched))

    async def commit(number: int, length: int) -> BoundaryRecord:
        record = checkpoint(number, length)
        record = replace(record, epoch=Epoch(lease, number), id=f"c{number}")
        await ledger.open(as_pending(record))
        await ledger.commit([record])
        return record

    try:
        one = await commit(1, 32)
        await _until(lambda: index.lookup(PROMPT, "", 199) == (one,))
        await etcd.compact((await etcd.list("/index")).revision)
        two = await commit(2, 64)
        await _until(lambda: index.lookup(PROMPT, "", 199) == (two,))
        own_etcd.service.kill()
        await asyncio.sleep(0.3)
        assert index.lookup(PROMPT, "", 199) == (two,), "the last view stands while etcd is away"
        own_etcd.service.start()
        await _until(lambda: bool(worker.lease))
        lease = worker.lease
        three = await commit(3, 96)
        await _until(lambda: index.lookup(PROMPT, "", 199) == (three,))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for one_of in (ledger, watched, worker, etcd):
            await one_of.close()


async def _until(holds: Any) -> None:
    for _ in range(3000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happens")


def test_a_look_up_among_1000_checkpoints_hashes_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """32K tokens, 1,000 lengths known: one pass over the prompt, not one a length. The time is printed, not judged."""
    long = [token % 50_000 for token in range(32_768)]
    index = CheckpointIndex(GEOMETRY)
    lengths = [32 * n for n in range(1, 1001)]
    others = [
        checkpoint(number, length, prefix=prefix_hash([number]), created=0.0)
        for number, length in enumerate(lengths)
    ]
    hit = checkpoint(2000, 32, prefix=prefix_hash(long[:32]))
    index.apply({record.id: record for record in [*others, hit]})
    assert len(index.records) == 1001
    times = []
    for _ in range(7):
        began = time.perf_counter()
        found = index.lookup(long, "", len(long) - 1)
        times.append(time.perf_counter() - began)
        assert found == (hit,)
    print(f"look-up: {1000 * min(times):.2f} ms at best, {1000 * sorted(times)[3]:.2f} ms in the middle")
    hashed = 0
    plain = hashlib.sha256

    class Counting:
        """SHA-256 that counts the bytes that it takes."""

        def __init__(self, data: bytes = b"", inner: Any = None) -> None:
            self._inner = plain() if inner is None else inner
            self.update(data)

        def update(self, data: Any) -> None:
            nonlocal hashed
            hashed += memoryview(data).nbytes
            self._inner.update(data)

        def copy(self) -> Counting:
            return Counting(inner=self._inner.copy())

        def hexdigest(self) -> str:
            return str(self._inner.hexdigest())

    monkeypatch.setattr(hashlib, "sha256", Counting)
    assert index.lookup(long, "", len(long) - 1) == (hit,)
    assert 4 * 32_000 <= hashed <= 4 * len(long) + 100


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_random_chains_give_the_longest_whole_prefix(salt: str) -> None:
    """Against a plain search over every record."""
    import random

    rng = random.Random(7)
    for _ in range(60):
        records: list[BoundaryRecord] = []
        for number in range(1, 12):
            parents: list[BoundaryRecord] = []
            if records and rng.random() < 0.6:
                leaf = rng.choice(records)
                known = {record.id: record for record in records}
                parents = [*(known[name] for name in leaf.parents), leaf]
            least = parents[-1].length if parents else 0
            if least >= 190:
                continue
            length = rng.randint(least + 1, 195)
            prompt = PROMPT if rng.random() < 0.7 else [1, *PROMPT[1:]]
            records.append(checkpoint(number, length, parents, prefix=prefix_hash(prompt[:length], salt)))
        here = [record for record in records if rng.random() < 0.8]
        names = {record.id for record in here}
        most = rng.randint(1, 199)
        fitting = [
            record.length
            for record in here
            if record.length <= most
            and record.prefix_hash == prefix_hash(PROMPT[: record.length], salt)
            and set(record.parents) <= names
        ]
        found = index_of(*here).lookup(PROMPT, salt, most)
        assert (found[-1].length if found else 0) == max(fitting, default=0)
