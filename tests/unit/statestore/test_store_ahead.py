# SPDX-License-Identifier: Apache-2.0
"""Store calls beside the work: pieces arrive in order, and all calls have ended, well or badly, when a `with` ends."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

from statestore.connector.store_ahead import PUT_PIECE, StreamedPuts
from statestore.pool import KeyExists, PoolFull, PoolMissing, PoolUnavailable, Reservation
from tests.doubles.pool import PoolDouble, Store
from tests.support.patience import HUNG


def data(nbytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)


def pool(**fields: int) -> PoolDouble:
    return PoolDouble(Store(), **fields)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("state-")}


def read(it: PoolDouble, key: str) -> np.ndarray:
    back = np.empty(it.size(key), np.uint8)
    it.register(back)
    it.get_into(key, [back])
    return back


@pytest.mark.parametrize("nbytes", [1000, 3 * PUT_PIECE])
def test_pieces_become_objects(nbytes: int) -> None:
    """Small ones with the call that seals, large ones beside the work."""
    it = pool(staging_bytes=2 * nbytes)
    puts = StreamedPuts(it, [Reservation("a", nbytes, ""), Reservation("b", nbytes, "")])
    puts.reserve()
    with it.staging(2 * nbytes, 1.0) as staged, puts:
        staged[:] = data(2 * nbytes)
        puts.write(0, 600, staged[600:nbytes])
        puts.write(0, 0, staged[:600])
        puts.write(1, 0, staged[nbytes:])
        with pytest.raises(PoolMissing):
            it.size("a")
        assert [placed.nbytes for placed in puts.seal()] == [nbytes, nbytes]
        assert (read(it, "a") == staged[:nbytes]).all()
        assert (read(it, "b") == staged[nbytes:]).all()
    assert not threads()


@pytest.mark.parametrize("nbytes", [1000, 2 * PUT_PIECE])
def test_what_is_given_up_never_existed(nbytes: int) -> None:
    it = pool(staging_bytes=2 * nbytes)
    puts = StreamedPuts(it, [Reservation("a", nbytes, ""), Reservation("b", nbytes, "")])

    def give_up(staged: np.ndarray) -> None:
        with puts:
            puts.write(0, 0, staged[:nbytes])
            raise RuntimeError("null state")

    puts.reserve()
    with it.staging(nbytes, 1.0) as staged:
        with pytest.raises(RuntimeError, match="null state"):
            give_up(staged)
        assert set(it.store.objects) == {"a", "b"}, "their room is still taken"
        assert puts.undo() == []
        assert not it.store.objects
        it.put("a", [staged], "")  # the room and the name are free again
    assert not threads()


def test_a_write_that_fails_is_told_and_nothing_is_left() -> None:
    it = pool(staging_bytes=4 * PUT_PIECE)
    puts = StreamedPuts(it, [Reservation("a", 3 * PUT_PIECE, "")])
    puts.reserve()

    def fail(operation: str, key: str) -> None:
        if operation == "write":
            raise PoolUnavailable("the store is away")

    it.store.before = fail
    with it.staging(3 * PUT_PIECE, 1.0) as staged, puts:
        puts.write(0, 0, staged)
        with pytest.raises(PoolUnavailable):
            puts.seal()
    assert puts.undo() == []
    assert not it.store.objects
    assert not threads()


def test_objects_are_written_beside_each_other_and_each_in_its_order() -> None:
    it = pool(staging_bytes=6 * PUT_PIECE)
    puts = StreamedPuts(it, [Reservation(key, 3 * PUT_PIECE, "") for key in "ab"])
    puts.reserve()
    meet, begun = threading.Barrier(2, timeout=HUNG), list[str]()

    def both(operation: str, key: str) -> None:
        if operation == "write":
            begun.append(key)
            if begun.count(key) == 1:
                meet.wait()  # passes only while a write of the other object is under way too

    it.store.before = both
    with it.staging(6 * PUT_PIECE, 1.0) as staged, puts:
        staged[:] = data(6 * PUT_PIECE)
        for piece in range(3):
            for number in range(2):
                at, base = piece * PUT_PIECE, number * 3 * PUT_PIECE
                puts.write(number, at, staged[base + at : base + at + PUT_PIECE])
        puts.seal()
        assert {*begun} == {"a", "b"}
        assert (read(it, "a") == staged[: 3 * PUT_PIECE]).all()
        assert (read(it, "b") == staged[3 * PUT_PIECE :]).all()
    assert not threads()


def test_a_write_that_fails_stops_the_other_objects_too() -> None:
    it = pool(staging_bytes=8 * PUT_PIECE)
    puts = StreamedPuts(it, [Reservation("a", 4 * PUT_PIECE, ""), Reservation("b", 4 * PUT_PIECE, "")])
    puts.reserve()
    failed, written = threading.Event(), list[str]()

    def fail(operation: str, key: str) -> None:
        if operation == "write" and key == "a":
            failed.set()
            raise PoolUnavailable("the store is away")
        if operation == "write":
            assert failed.wait(HUNG)
            written.append(key)

    it.store.before = fail
    with it.staging(8 * PUT_PIECE, 1.0) as staged, puts:
        puts.write(0, 0, staged[:PUT_PIECE])
        with contextlib.suppress(PoolUnavailable):
            for piece in range(4):
                at = piece * PUT_PIECE
                puts.write(1, at, staged[at : at + PUT_PIECE])
        with pytest.raises(PoolUnavailable):
            puts.seal()
    assert len(written) <= 1
    assert puts.undo() == []
    assert not it.store.objects
    assert not threads()


def test_what_was_sealed_goes_too() -> None:
    """The second of two seals fails: the first object goes with it."""
    it = pool()
    puts = StreamedPuts(it, [Reservation("a", 100, ""), Reservation("b", 100, "")])
    puts.reserve()

    def fail(operation: str, key: str) -> None:
        if (operation, key) == ("seal", "b"):
            raise PoolUnavailable("the store is away")

    it.store.before = fail
    with it.staging(200, 1.0) as staged, puts:
        puts.write(0, 0, staged[:100])
        puts.write(1, 0, staged[100:])
        with pytest.raises(PoolUnavailable):
            puts.seal()
    assert it.store.objects["a"].sealed
    assert puts.undo() == []
    assert not it.store.objects


def test_a_full_store_and_a_key_that_is_there() -> None:
    it = pool(segment_bytes=4096)
    with it.staging(100, 1.0) as staged:
        it.put("k", [staged])
    large = StreamedPuts(it, [Reservation("small", 100, ""), Reservation("large", 8192, "")])
    with pytest.raises(PoolFull):
        large.reserve()
    assert large.undo() == []
    again = StreamedPuts(it, [Reservation("other", 100, ""), Reservation("k", 200, "")])
    with pytest.raises(KeyExists):
        again.reserve()
    assert again.undo() == []
    assert set(it.store.objects) == {"k"}
    assert it.size("k") == 100, "somebody else's object stays"
