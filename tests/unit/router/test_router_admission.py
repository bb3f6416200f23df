# SPDX-License-Identifier: Apache-2.0
"""The door: limits, deadlines, fairness, and that it keeps a cluster useful under three times its load."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from router.admission import Door, Key, KeyRing, KeysInvalid, Refused
from router.admission.fair_queue import FairQueue
from router.admission.keys import ANONYMOUS
from router.admission.pace import Pace
from tests.support.virtual_time import run

A, B, HEAVY = Key("a"), Key("b"), Key("heavy", weight=3.0)


# ---- keys


def test_without_a_file_everybody_is_anonymous() -> None:
    assert KeyRing().find(b"") == KeyRing().find(b"Bearer anything") == ANONYMOUS


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"a": {"key": "secret-of-a", "weight": 2}, "b": {"key": "secret-of-b"}}))
    ring = KeyRing.read(path)
    found = ring.find(b"Bearer secret-of-a")
    assert found is not None
    assert (found.name, found.weight) == ("a", 2)
    assert ring.find(b"secret-of-b") == Key("b")
    assert ring.find(b"Bearer secret-of-") is None
    assert ring.find(b"") is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the file"),
        ("{}", "holds no key"),
        ('{"a": {"key": "short"}}', "a.key"),
        ('{"a": {"key": "long-enough", "wait": 1}}', "a.wait"),
        ('{"a": {"key": "long-enough", "weight": 0}}', "a.weight"),
        ('{"a": {"key": "long-enough"}, "b": {"key": "long-enough"}}', "share a key"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeysInvalid, match=words) as refused:
        KeyRing.read(path)
    assert "long-enough" not in str(refused.value), "no secret in an error"
    with pytest.raises(KeysInvalid, match="No such file"):
        KeyRing.read(tmp_path / "none.json")


# ---- the queue


def drain(queue: FairQueue[str]) -> list[str]:
    found = []
    while (item := queue.pop()) is not None:
        found.append(item)
    return found


def test_keys_share_by_weight_whatever_they_send() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"heavy{number}", HEAVY, 10, 0)
    for number in range(100):
        queue.push(f"a{number}", A, 10, 0)
    first = Counter(item.rstrip("0123456789") for item in drain(queue)[:40])
    assert first == {"heavy": 30, "a": 10}


def test_cost_counts_not_number() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(20):
        queue.push(f"a{number}", A, 100, 0)
        queue.push(f"b{number}", B, 10, 0)
    first = Counter(item[0] for item in drain(queue)[:11])
    assert first == {"b": 9, "a": 2} or first == {"b": 10, "a": 1}


def test_priority_comes_first_and_order_within_a_key_stays() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -1)):
        queue.push(name, A, 1, priority)
    assert drain(queue) == ["urgent", "first", "second", "late"]


def test_silence_saves_nothing_up_and_removal_leaves_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(50):
        queue.push(f"a{number}", A, 10, 0)
    for _ in range(40):
        queue.pop()
    for number in range(10):
        queue.push(f"b{number}", B, 10, 0)
    assert Counter(item[0] for item in [queue.pop() or "" for _ in range(10)]) == {"a": 5, "b": 5}
    for item in ("a45", "b5", "a46"):
        queue.remove(item)
    assert not queue.remove("a45")
    drain(queue)
    assert (len(queue), queue.cost, queue._heap, queue._finish, queue._waiting) == (0, 0.0, [], {}, {})


def test_what_is_ahead() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.push(f"a{number}", A, 10, 0)
    assert queue.ahead(A, 0) == 100
    assert queue.ahead(B, 0) == 10, "only what starts no later"
    assert queue.ahead(B, -1) == 0


# ---- the pace


def test_the_pace_is_learned_while_something_waits() -> None:
    pace = Pace()
    assert pace.wait(10_000) == 0, "nobody is refused for a guess"
    for step in range(200):
        pace.left(100, step * 0.5, waiting=True)
    assert pace.per_second == pytest.approx(200, rel=0.01)
    assert pace.wait(1000) == pytest.approx(5, rel=0.01)
    pace.left(100, 1000.0, waiting=False)
    pace.left(100, 5000.0, waiting=True)
    assert pace.per_second == pytest.approx(200, rel=0.01), "idle time says nothing"


# ---- the door


def door(slots: int = 1, **fields: Any) -> Door:
    loop = asyncio.get_running_loop()
    return Door(lambda: slots, fields.pop("max_queued", 100), clock=loop.time, **fields)


def test_who_has_no_slot_waits_for_one() -> None:
    async def go() -> None:
        it = door()
        first = await it.enter(A, 10)
        second = asyncio.ensure_future(it.enter(B, 10))
        await asyncio.sleep(1)
        assert not second.done()
        assert (it.inside, it.queued) == (1, 1)
        first.leave()
        first.leave()
        (await second).leave()
        assert (it.inside, it.queued) == (0, 0)

    run(go())


def test_limits_of_a_key() -> None:
    async def go() -> None:
        it, limited = door(slots=10), Key("l", requests_per_second=2.0, concurrency=2)
        held = [await it.enter(limited, 1), await it.enter(limited, 1)]
        with pytest.raises(Refused, match="2 requests under way") as refused:
            await it.enter(limited, 1)
        assert (refused.value.status, refused.value.retry_after) == (429, 1)
        for permit in held:
            permit.leave()
        with pytest.raises(Refused, match="2 requests a second"):
            await it.enter(limited, 1)
        await asyncio.sleep(0.6)
        (await it.enter(limited, 1)).leave()
        (await it.enter(A, 1)).leave()
        assert it.inside == 0

    run(go())


def test_a_full_queue_and_a_deadline_that_cannot_be_met() -> None:
    async def go() -> None:
        it = door(max_queued=2)
        permit = await it.enter(A, 100)
        waiting = [asyncio.ensure_future(it.enter(A, 100)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="2 requests wait already"):
            await it.enter(A, 100)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert it.queued == 0
        for step in range(10):
            it.pace.left(100, step, waiting=True)
        began = it.clock()
        with pytest.raises(Refused, match=r"after 1\.0 s, later than 0\.5 s") as refused:
            await it.enter(B, 100, deadline=0.5)
        assert it.clock() == began, "at once, not after a timeout"
        assert refused.value.retry_after == 1
        late = asyncio.ensure_future(it.enter(B, 100, deadline=1.5))
        with pytest.raises(Refused, match="in time"):
            await late
        assert it.clock() == pytest.approx(began + 1.5)
        permit.leave()
        assert (it.inside, it.queued) == (0, 0)

    run(go())


def test_nobody_serves() -> None:
    async def go() -> None:
        it = door(slots=0, nobody_wait=2.0)
        with pytest.raises(Refused) as refused:
            await it.enter(A, 1)
        assert refused.value.status == 503
        assert 2 <= it.clock() < 3
        assert (it.inside, it.queued) == (0, 0)

    run(go())


@pytest.mark.parametrize("given", [False, True])
def test_a_client_that_leaves_while_it_waits(given: bool) -> None:
    async def go() -> None:
        it = door()
        permit = await it.enter(A, 1)
        gone, stays = (asyncio.ensure_future(it.enter(key, 1)) for key in (A, B))
        await asyncio.sleep(0)
        if given:
            permit.leave()  # the slot is given in the moment in which the client goes
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        permit.leave()
        (await stays).leave()
        assert (it.inside, it.queued) == (0, 0)
        assert all(counts.running == 0 for counts in it._counts.values())

    run(go())


def test_priority_is_no_more_urgent_than_the_key_allows() -> None:
    async def go() -> list[str]:
        it, order = door(), []
        permit = await it.enter(A, 1)

        async def one(name: str, key: Key, priority: int | None) -> None:
            held = await it.enter(key, 1, priority)
            order.append(name)
            held.leave()

        vip = Key("vip", priority=-5)
        tasks = [one("plain", A, None), one("cheater", B, -9), one("vip", vip, -3), one("patient", vip, 3)]
        running = [asyncio.ensure_future(task) for task in tasks]
        await asyncio.sleep(0)
        permit.leave()
        await asyncio.gather(*running)
        return order

    assert run(go()) == ["vip", "plain", "cheater", "patient"]


# ---- three times the load

SLOTS, SERVICE, SLO = 8, 1.0, 2.0
SECONDS = 60


async def overload(load: float, with_door: bool) -> tuple[float, int]:
    """Offer `load` times what the slots can serve, for SECONDS; without the door everybody waits in one line.

    Returns goodput (the share of the capacity that was served in time) and refusals.
    """
    loop = asyncio.get_running_loop()
    it = Door(lambda: SLOTS, 10_000, SLO if with_door else 0.0, clock=loop.time)
    noise = random.Random(4)
    good, refused, tasks = 0, 0, []

    async def one(key: Key, service: float) -> None:
        nonlocal good, refused
        arrived = loop.time()
        try:
            permit = await it.enter(key, 100 * service)
        except Refused as error:
            refused += error.status == 429 and error.retry_after >= 1
            return
        await asyncio.sleep(0.1 * service)
        permit.first_byte()
        good += loop.time() - arrived <= SLO
        await asyncio.sleep(0.9 * service)
        permit.leave()

    while loop.time() < SECONDS:
        await asyncio.sleep(noise.expovariate(load * SLOTS / SERVICE))
        key = Key(f"k{noise.randrange(4)}")
        tasks.append(asyncio.ensure_future(one(key, SERVICE * noise.uniform(0.5, 1.5))))
    await asyncio.gather(*tasks)
    return good / (SECONDS * SLOTS / SERVICE), refused


def test_goodput_under_three_times_the_load() -> None:
    goodput, refused = run(overload(3.0, with_door=True))
    assert goodput >= 0.9, goodput
    assert refused > 700
    line, _ = run(overload(3.0, with_door=False))
    assert line < 0.2, "the control: without the door nearly everybody is late"


def test_nobody_is_refused_while_there_is_room() -> None:
    goodput, refused = run(overload(0.5, with_door=True))
    assert refused == 0
    assert goodput == pytest.approx(0.5, abs=0.05)
