# SPDX-License-Identifier: Apache-2.0
"""Several objects in one call, and objects at home: over the double and over a real Mooncake."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from statestore import mooncake_pool
from statestore.mooncake_client import EXISTS, FULL, Client
from statestore.mooncake_pool import MooncakePool
from statestore.pool import (
    KeyExists,
    Pool,
    PoolClosed,
    PoolFull,
    PoolMissing,
    PoolUnavailable,
    Reservation,
    SizeMismatch,
)
from tests.doubles.pool import PoolDouble, Store
from tests.support import services

SEGMENT = 32 << 20
Pair = tuple[Pool, Pool]


@pytest.fixture(scope="module")
def real(master: services.MasterService) -> Iterator[Pair]:
    config = master.config(segment_bytes=SEGMENT)
    pair = (MooncakePool(config, staging_bytes=4 << 20), MooncakePool(config, staging_bytes=4 << 20))
    yield pair
    for one in pair:
        one.close()


@pytest.fixture(params=["double", "mooncake"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "mooncake":
        return request.getfixturevalue("real")  # type: ignore[no-any-return]
    store = Store()
    return PoolDouble(store, SEGMENT, shows_home=True), PoolDouble(store, SEGMENT, shows_home=True)


def names(count: int) -> list[str]:
    stem = f"ds/test/{uuid.uuid4().hex}"
    return [f"{stem}/{number}" for number in range(count)]


def fill(staged: np.ndarray) -> None:
    staged[:] = np.random.default_rng(3).integers(0, 256, staged.nbytes, dtype=np.uint8)


def test_several_objects_are_written_and_sealed_together(pair: Pair) -> None:
    a, b = pair
    first, second = names(2)
    wanted = [Reservation(first, 5000, b.segment_name), Reservation(second, 3000, a.segment_name)]
    a.reserve_all(wanted)
    with a.staging(8000, 5) as source, b.staging(8000, 5) as target:
        fill(source)
        a.write(wanted[0], [(0, source[:1000])])
        with pytest.raises(PoolMissing):
            b.size(first)
        placed = a.complete([(wanted[0], [(1000, source[1000:5000])]), (wanted[1], [(0, source[5000:])])])
        assert [(one.key, one.nbytes, one.preferred) for one in placed] == [
            (first, 5000, True),
            (second, 3000, True),
        ]
        assert [one.segment for one in placed] == [b.segment_name, a.segment_name]
        b.get_into(first, [target[:5000]])
        b.get_into(second, [target[5000:]])
        assert (target == source).all()
    assert a.remove([first, second]) == []


def test_what_is_not_whole_is_not_sealed(pair: Pair) -> None:
    a, _ = pair
    first, second = names(2)
    wanted = [Reservation(first, 100, ""), Reservation(second, 100, "")]
    a.reserve_all(wanted)
    with a.staging(200, 5) as source:
        with pytest.raises(SizeMismatch):
            a.complete([(wanted[0], [(0, source[:100])]), (wanted[1], [(0, source[100:150])])])
        for one in wanted:
            a.cancel(one)
        assert a.remove([first, second]) == []
        for key in (first, second):
            with pytest.raises(PoolMissing):
                a.size(key)
        a.reserve_all(wanted)
        assert len(a.complete([(one, [(0, source[:100])]) for one in wanted])) == 2
    a.remove([first, second])


def test_room_is_taken_for_all_or_for_none(pair: Pair) -> None:
    a, b = pair
    first, second, third = names(3)
    with a.staging(100, 5) as source:
        a.put(second, [source])
    with pytest.raises(KeyExists):
        a.reserve_all([Reservation(one, 100, "") for one in (first, second, third)])
    assert a.size(second) == 100, "what was there stays"
    with pytest.raises(PoolFull):
        a.reserve_all([Reservation(first, 100, ""), Reservation(third, 4 * SEGMENT, "")])
    for one in (first, third):
        b.cancel(b.reserve(one, 100))
    a.remove([second])


def test_a_reservation_that_ended_is_not_completed(pair: Pair) -> None:
    a, _ = pair
    (key,) = names(1)
    wanted = Reservation(key, 100, "")
    a.reserve_all([wanted])
    a.cancel(wanted)
    with a.staging(100, 5) as source, pytest.raises(PoolMissing):
        a.complete([(wanted, [(0, source)])])


def test_room_that_may_be_others_is_not_written(real: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master gives room back that nobody ends; its clock is not waited for, ours is moved."""
    pool, (first, second) = real[0], names(2)
    began, late = time.monotonic(), 0.0
    monkeypatch.setattr(pool, "_write_within", 180.0)
    monkeypatch.setattr(
        mooncake_pool, "time", SimpleNamespace(monotonic=lambda: began + late, sleep=time.sleep)
    )
    wanted = [Reservation(one, 100, pool.segment_name) for one in (first, second)]
    pool.reserve_all(wanted)
    with pool.staging(200, 5) as source:
        late = 100.0
        pool.write(wanted[0], [(0, source[:50])])
        late = 180.0
        with pytest.raises(PoolUnavailable, match="180 s ago"):
            pool.write(wanted[0], [(50, source[50:100])])
        rest = [(wanted[0], [(50, source[50:100])]), (wanted[1], [(0, source[100:])])]
        with pytest.raises(PoolUnavailable, match="may be others'"):
            pool.complete(rest)
        late = 100.0
        assert len(pool.complete(rest)) == 2, "the control: in time it is written"
    assert pool.remove([first, second]) == []


def test_a_store_that_is_full_for_a_moment_is_asked_again(
    real: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object of two finds room only at the second look; the other one keeps what it has."""
    a = real[0]
    assert isinstance(a, MooncakePool)
    first, second = names(2)
    start_all = Client.start_all
    looks: list[list[str]] = []

    def once_full(client: Client, wanted: list[Reservation]) -> list[int]:
        looks.append([one.key for one in wanted])
        if len(looks) == 1:
            return [*start_all(client, wanted[:1]), FULL]
        return start_all(client, wanted)

    monkeypatch.setattr(Client, "start_all", once_full)
    wanted = [Reservation(first, 100, ""), Reservation(second, 100, "")]
    a.reserve_all(wanted)
    assert looks == [[first, second], [second]]
    with a.staging(100, 5) as source:
        assert len(a.complete([(one, [(0, source)]) for one in wanted])) == 2
    a.remove([first, second])
    # Control: what stays refused is told, and the other's room comes back.
    monkeypatch.setattr(
        Client,
        "start_all",
        lambda client, wanted: [*start_all(client, wanted[:1]), *[EXISTS] * (len(wanted) - 1)],
    )
    with pytest.raises(KeyExists):
        a.reserve_all(wanted)
    monkeypatch.setattr(Client, "start_all", start_all)
    a.cancel(a.reserve(first, 100))


def test_objects_at_home(pair: Pair) -> None:
    a, b = pair
    here, away, missing = names(3)
    with a.staging(4000, 5) as source:
        fill(source)
        a.put(here, [source], preferred_segment=b.segment_name)
        a.put(away, [source], preferred_segment=a.segment_name)
        with b.at_home([here, away, missing]) as home:
            assert set(home) == {here}
            assert (home[here] == source).all()
            with pytest.raises(ValueError, match="read-only"):
                home[here][0] = 1
    a.remove([here, away])
    with b.at_home([here]) as home:
        assert home == {}


def test_memory_at_home_outlives_a_close(master: services.MasterService) -> None:
    """Who reads where objects lie is waited for: the mapping must not go under its feet."""
    pool = MooncakePool(master.config(segment_bytes=SEGMENT), staging_bytes=1 << 20)
    (key,) = names(1)
    with pool.staging(1000, 5) as source:
        fill(source)
        expected = source.copy()
        pool.put(key, [source], preferred_segment=pool.segment_name)
    with pool.at_home([key]) as home:
        pool.close(0.2)
        assert (home[key] == expected).all(), "read after the close has given up"
    with pytest.raises(PoolClosed), pool.at_home([key]):
        pass
