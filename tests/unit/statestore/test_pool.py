# SPDX-License-Identifier: Apache-2.0
"""The pool's contract, over the double and over a real Mooncake; then faults, staging and late calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import pytest

from deltaserve.config import StoreConfig
from statestore.bounded_calls import BoundedCalls
from statestore.mooncake_client import probe
from statestore.mooncake_link import reachable
from statestore.mooncake_pool import LEAST_SEGMENT, MooncakePool
from statestore.pool import (
    Bytes,
    KeyExists,
    Pool,
    PoolClosed,
    PoolError,
    PoolFull,
    PoolMissing,
    PoolUnavailable,
    Reservation,
    SizeMismatch,
)
from statestore.staging import ALIGN, Staging
from tests.doubles.pool import PoolDouble, Store
from tests.support import services
from tests.support.patience import HUNG

SEGMENT = 32 << 20


@dataclass
class Pair:
    """Two processes' views of one store: a writer and a reader."""

    a: Pool
    b: Pool

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture(scope="module")
def real(master: services.MasterService) -> Iterator[Pair]:
    config = master.config(segment_bytes=SEGMENT)
    pair = Pair(MooncakePool(config, staging_bytes=4 << 20), MooncakePool(config, staging_bytes=4 << 20))
    yield pair
    pair.close()


@pytest.fixture(params=["double", "mooncake"])
def pair(request: pytest.FixtureRequest) -> Pair:
    if request.param == "mooncake":
        return request.getfixturevalue("real")  # type: ignore[no-any-return]
    store = Store()
    return Pair(PoolDouble(store, SEGMENT), PoolDouble(store, SEGMENT))


@pytest.fixture
def key() -> str:
    return f"ds/test/{uuid.uuid4().hex}"


@pytest.fixture
def memory(pair: Pair) -> Iterator[tuple[Bytes, Bytes]]:
    """Staging of the writer, filled, and of the reader, poisoned; 256 KiB each."""
    with pair.a.staging(256 << 10, 5) as source, pair.b.staging(256 << 10, 5) as target:
        source[:] = np.random.default_rng(0).integers(0, 256, source.nbytes, dtype=np.uint8)
        target[:] = 0xEE
        yield source, target


Memory = tuple[Bytes, Bytes]


# ---- the contract


def test_put_and_get_of_buffers_that_follow_one_another(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    placement = pair.a.put(key, [source[1000:4096], source[:7], source[9000:9001]])
    assert (placement.key, placement.nbytes) == (key, 3096 + 7 + 1)
    assert pair.b.size(key) == 3104
    pair.b.get_into(key, [target[:100], target[200 : 200 + 3004]])
    expected = np.concatenate([source[1000:4096], source[:7], source[9000:9001]])
    assert (target[:100] == expected[:100]).all()
    assert (target[200:3204] == expected[100:]).all()
    assert (target[100:200] == 0xEE).all(), "nothing but the buffers is written"
    assert pair.a.remove([key]) == []


def test_ranged_reads(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    pair.a.put(key, [source])
    pieces = [(offset, target[n * 64 : n * 64 + 40]) for n, offset in enumerate((0, 77, 5000, 5000, 200_000))]
    pair.b.get_ranges(key, pieces)
    for offset, buffer in pieces:
        assert (buffer == source[offset : offset + 40]).all()
    assert (target[40:64] == 0xEE).all()
    pair.b.get_ranges(key, [])
    pair.a.remove([key])


def test_what_lies_at_home_is_copied_and_not_sent(
    real: Pair, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library sends ranges over the transport even to itself; whole objects and ranges both are copied."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the library was asked")

    with real.a.staging(64 << 10, 5) as source, real.b.staging(64 << 10, 5) as target:
        source[:] = np.random.default_rng(1).integers(0, 256, source.nbytes, dtype=np.uint8)
        assert real.a.put(key, [source], preferred_segment=real.b.segment_name).preferred
        here, away = real.b._link.client, real.a._link.client  # type: ignore[attr-defined]
        for name in ("get_into_ranges", "batch_get_into_multi_buffers"):
            monkeypatch.setattr(here, "_store", _Without(here._store, name, refuse))
            monkeypatch.setattr(away, "_store", _Without(away._store, name, refuse))
        target[:] = 0xEE
        real.b.get_into(key, [target[:1000], target[1000:]])
        assert (target == source).all()
        target[:] = 0xEE
        real.b.get_ranges(key, [(60_000, target[:5]), (0, target[100:300])])
        assert (target[:5] == source[60_000:60_005]).all()
        assert (target[100:300] == source[:200]).all()
        assert (target[5:100] == 0xEE).all()
        with pytest.raises(SizeMismatch):
            real.b.get_ranges(key, [(65_000, target[:600])])
        with pytest.raises(SizeMismatch):
            real.b.get_into(key, [target[:-1]])
        # Control: what lies elsewhere is asked of the library, also under an endpoint that was another process's.
        with pytest.raises(AssertionError, match="was asked"):
            real.a.get_ranges(key, [(0, source[:5])])
        monkeypatch.setattr(away, "_endpoint", here._endpoint)
        monkeypatch.setattr(away, "_lent", (here._lent[1], here._lent[1] + 4096))
        with pytest.raises(AssertionError, match="was asked"):
            real.a.get_into(key, [source])
    real.a.remove([key])


class _Without:
    """A library whose named call does something else."""

    def __init__(self, store: object, name: str, instead: object) -> None:
        self._store, self._name, self._instead = store, name, instead

    def __getattr__(self, name: str) -> object:
        return self._instead if name == self._name else getattr(self._store, name)


def test_many_ranges_in_one_call(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    pair.a.put(key, [source])
    pieces = [(n * 128, target[n * 64 : n * 64 + 64]) for n in range(2000)]
    pair.b.get_ranges(key, pieces)
    assert (target[: 2000 * 64].reshape(2000, 64) == source[: 2000 * 128].reshape(2000, 128)[:, :64]).all()
    pair.a.remove([key])


def test_objects_are_immutable(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    pair.a.put(key, [source[:100]])
    for pool in (pair.a, pair.b):
        with pytest.raises(KeyExists), pool.staging(100, 5) as other:
            pool.put(key, [other])
    pair.b.get_into(key, [target[:100]])
    assert (target[:100] == source[:100]).all()
    pair.a.remove([key])


def test_placement_in_the_readers_segment(pair: Pair, key: str, memory: Memory) -> None:
    source, _ = memory
    assert pair.a.segment_name != pair.b.segment_name
    for number, segment in enumerate((pair.b.segment_name, pair.a.segment_name) * 3):
        placement = pair.a.put(f"{key}/{number}", [source[:100]], preferred_segment=segment)
        assert placement.preferred
        assert placement.segment == segment
    elsewhere = pair.a.put(f"{key}/x", [source[:100]], preferred_segment="127.0.0.9:1@127.0.0.9:2")
    assert not elsewhere.preferred, "a fallback must be told"
    assert elsewhere.segment != "127.0.0.9:1@127.0.0.9:2"
    assert pair.b.size(f"{key}/x") == 100
    assert pair.a.remove([f"{key}/{n}" for n in (*range(6), "x")]) == []


def test_what_is_not_there(pair: Pair, key: str, memory: Memory) -> None:
    _, target = memory
    for call in (
        lambda: pair.b.get_into(key, [target[:10]]),
        lambda: pair.b.get_ranges(key, [(0, target[:10])]),
        lambda: pair.b.size(key),
    ):
        with pytest.raises(PoolMissing, match=key):
            call()
    assert pair.b.remove([key, f"{key}/2"]) == []
    assert pair.b.remove([]) == []


def test_removed_objects_are_gone(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    pair.a.put(key, [source[:1000]])
    pair.b.get_into(key, [target[:1000]])  # takes a lease
    assert pair.b.remove([key, key]) == []
    with pytest.raises(PoolMissing):
        pair.b.get_into(key, [target[:1000]])
    pair.a.put(key, [source[:500]])
    assert pair.b.size(key) == 500
    pair.a.remove([key])


def test_a_read_of_another_size_is_refused(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    pair.a.put(key, [source[:1000]])
    for nbytes in (999, 1001, 10, 100_000):
        with pytest.raises(SizeMismatch, match="1000 bytes are stored"):
            pair.b.get_into(key, [target[:nbytes]])
    for offset, nbytes in ((0, 1001), (990, 11), (5000, 1)):
        with pytest.raises(SizeMismatch):
            pair.b.get_ranges(key, [(0, target[:10]), (offset, target[100 : 100 + nbytes])])
    pair.b.get_into(key, [target[:1000]])
    assert (target[:1000] == source[:1000]).all()
    pair.a.remove([key])


def test_memory_must_be_registered(pair: Pair, key: str) -> None:
    stranger = np.zeros(100, np.uint8)
    for call in (
        lambda: pair.a.put(key, [stranger]),
        lambda: pair.a.get_into(key, [stranger]),
        lambda: pair.a.get_ranges(key, [(0, stranger)]),
    ):
        with pytest.raises(ValueError, match="registered"):
            call()
    with pytest.raises(PoolMissing):
        pair.a.size(key)
    pair.a.register(stranger)
    with pytest.raises(ValueError, match="already"):
        pair.a.register(stranger[10:20])
    pair.a.put(key, [stranger])
    pair.a.unregister(stranger)
    pair.a.unregister(stranger)
    with pytest.raises(ValueError, match="registered"):
        pair.a.get_into(key, [stranger])
    pair.a.remove([key])


def test_bad_arguments(pair: Pair, memory: Memory) -> None:
    for bad in ("", "with space", "line\n"):
        with pytest.raises(ValueError, match="key"):
            pair.a.reserve(bad, 10)
    with pytest.raises(ValueError, match="nbytes"):
        pair.a.reserve("ds/x", 0)
    with pytest.raises(ValueError, match="buffer"):
        pair.a.register(np.zeros((4, 4), np.uint8)[:, 1])
    with pytest.raises(ValueError, match="buffer"):
        pair.a.register(np.zeros(0, np.uint8))


# ---- reservations


def test_pieces_are_written_early_and_seen_only_when_sealed(pair: Pair, key: str, memory: Memory) -> None:
    source, target = memory
    reservation = pair.a.reserve(key, 3000, pair.b.segment_name)
    pair.a.write(reservation, [(2000, source[2000:3000])])
    pair.a.write(reservation, [])
    with pytest.raises(PoolMissing):
        pair.b.get_into(key, [target[:3000]], timeout=1)
    with pytest.raises(SizeMismatch, match="1000 of 3000"):
        pair.a.seal(reservation)
    pair.a.write(reservation, [(0, source[:500]), (500, source[500:2000])])
    assert pair.a.seal(reservation).segment == pair.b.segment_name
    pair.b.get_into(key, [target[:3000]])
    assert (target[:3000] == source[:3000]).all()
    pair.a.remove([key])


def test_a_cancelled_reservation_leaves_nothing(pair: Pair, key: str, memory: Memory) -> None:
    source, _ = memory
    reservation = pair.a.reserve(key, 1000)
    pair.a.write(reservation, [(0, source[:1000])])
    pair.a.cancel(reservation)
    pair.a.cancel(reservation)
    for call in (
        lambda: pair.a.write(reservation, [(0, source[:10])]),
        lambda: pair.a.seal(reservation),
        lambda: pair.b.size(key),
    ):
        with pytest.raises(PoolMissing):
            call()
    pair.b.cancel(pair.b.reserve(key, 1000))


def test_cancel_after_the_seal_keeps_the_object(pair: Pair, key: str, memory: Memory) -> None:
    source, _ = memory
    reservation = pair.a.reserve(key, 10)
    pair.a.write(reservation, [(0, source[:10])])
    pair.a.seal(reservation)
    pair.a.cancel(reservation)
    assert pair.b.size(key) == 10
    pair.a.remove([key])


def test_one_writer_a_key(pair: Pair, key: str) -> None:
    reservation = pair.a.reserve(key, 1000)
    for pool in (pair.a, pair.b):
        with pytest.raises(KeyExists):
            pool.reserve(key, 1000)
    pair.a.cancel(reservation)


def test_a_piece_outside_its_object(pair: Pair, key: str, memory: Memory) -> None:
    source, _ = memory
    reservation = pair.a.reserve(key, 1000)
    for offset, nbytes in ((0, 1001), (999, 2), (-1, 1)):
        with pytest.raises(SizeMismatch):
            pair.a.write(reservation, [(offset, source[:nbytes])])
    pair.a.cancel(reservation)


def test_a_full_store_says_so_and_room_comes_back(pair: Pair, key: str) -> None:
    held: list[Reservation] = []

    def fill() -> None:
        while True:
            held.append(pair.a.reserve(f"{key}/{len(held)}", 6 << 20))

    began = time.monotonic()
    with pytest.raises(PoolFull, match=str(6 << 20)):
        fill()
    assert 8 <= len(held) <= 2 * SEGMENT // (6 << 20)
    assert time.monotonic() - began < HUNG
    pair.a.cancel(held.pop())
    held.append(pair.a.reserve(f"{key}/again", 6 << 20))
    for reservation in held:
        pair.a.cancel(reservation)


def test_threads_do_not_mix_their_bytes(pair: Pair, key: str) -> None:
    failed: list[str] = []

    def work(number: int) -> None:
        with pair.a.staging(20_000, 10) as source, pair.b.staging(20_000, 10) as target:
            for turn in range(8):
                source[:] = number * 8 + turn
                pair.a.put(f"{key}/{number}/{turn}", [source], pair.b.segment_name)
                pair.b.get_into(f"{key}/{number}/{turn}", [target])
                if not (target == number * 8 + turn).all() or pair.b.remove([f"{key}/{number}/{turn}"]):
                    failed.append(f"{number}/{turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert not any(thread.is_alive() for thread in threads)


def test_after_close_everything_is_refused() -> None:
    pool = PoolDouble(Store())
    _refuses_after_close(pool)


def test_after_close_mooncake_refuses_and_does_not_crash(master: services.MasterService) -> None:
    _refuses_after_close(MooncakePool(master.config(), lend=False))


def _refuses_after_close(pool: Pool) -> None:
    with pool.staging(100, 1) as buffer:
        pool.close()
        pool.close()
        assert not pool.available
        for call in (
            lambda: pool.size("ds/x"),
            lambda: pool.reserve("ds/x", 10),
            lambda: pool.get_into("ds/x", [buffer]),
            lambda: pool.remove(["ds/x"]),
            lambda: pool.staging(10, 1).__enter__(),
        ):
            with pytest.raises(PoolClosed):
                call()


# ---- Mooncake's faults


def test_a_client_that_lends_nothing(real: Pair, master: services.MasterService, key: str) -> None:
    client = MooncakePool(master.config(segment_bytes=1), lend=False)
    assert client.segment_name == ""
    with client.staging(100, 5) as buffer:
        buffer[:] = 7
        assert client.put(key, [buffer]).preferred
        buffer[:] = 0
        client.get_into(key, [buffer])
        assert (buffer == 7).all()
    assert client.remove([key]) == []
    client.close()


def test_no_master_is_an_error_at_once() -> None:
    config = StoreConfig(master=f"127.0.0.1:{services.free_port()}")
    began = time.monotonic()
    with pytest.raises(PoolUnavailable, match=r"store\.master.*mooncake_master"):
        MooncakePool(config)
    assert time.monotonic() - began < HUNG
    with pytest.raises(ValueError, match=r"store\.segment_bytes"):
        MooncakePool(StoreConfig(segment_bytes=LEAST_SEGMENT - 1))
    assert not reachable("etcd://127.0.0.1:1;127.0.0.1:2")
    assert not reachable("nonsense")


@pytest.mark.cluster
def test_master_killed_and_restarted(own_master: services.MasterService, key: str) -> None:
    pool = MooncakePool(own_master.config(timeout=3.0))
    with pool.staging(1000, 5) as buffer:
        buffer[:] = 7
        pool.put(key, [buffer])
        own_master.service.kill()
        began = time.monotonic()
        for call in (
            lambda: pool.get_into(key, [buffer]),
            lambda: pool.put(f"{key}/2", [buffer]),
            lambda: pool.size(key),
            lambda: pool.remove([key]),
        ):
            with pytest.raises(PoolUnavailable):
                call()
        assert time.monotonic() - began < HUNG
        assert not pool.available
        began = time.monotonic()
        with pytest.raises(PoolUnavailable):
            pool.size(key)
        assert time.monotonic() - began < 2.5, "while the master is known to be away, calls fail at once"
        own_master.service.start()
        _wait(lambda: pool.available, 30)
        with pytest.raises(PoolMissing):
            pool.get_into(key, [buffer])  # without HA a restart loses everything
        _wait(lambda: _puts(pool, f"{key}/3", buffer), 30)
        buffer[:] = 0
        pool.get_into(f"{key}/3", [buffer])
        assert (buffer == 7).all()
    pool.close()


@pytest.mark.cluster
def test_a_hung_master_costs_a_deadline_and_late_calls_are_cleaned_up(
    own_master: services.MasterService, key: str
) -> None:
    pool = MooncakePool(own_master.config())
    with pool.staging(1000, 5) as buffer, pool.staging(1000, 5) as other:
        buffer[:] = 7
        pool.put(key, [buffer])
        own_master.service.hang()
        began = time.monotonic()
        with pytest.raises(PoolUnavailable, match="no answer"):
            pool.get_into(key, [buffer], timeout=0.5)
        with pytest.raises(PoolUnavailable):
            pool.reserve(f"{key}/2", 1000, timeout=0.5)
        assert time.monotonic() - began < HUNG
        assert pool.busy(buffer)
        assert not pool.busy(other)
        _wait(lambda: not pool.available, 30)
        own_master.service.resume()
        _wait(lambda: not pool.busy(buffer), 30)
        _wait(lambda: pool.available, 30)
        _wait(lambda: _puts(pool, f"{key}/2", other), 30)  # the late reservation has been revoked
    pool.close()


@pytest.mark.cluster
def test_a_client_that_does_not_recover_is_replaced(
    own_master: services.MasterService, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statestore.mooncake_link.REBUILD_SECONDS", 0.2)
    pool = MooncakePool(own_master.config(segment_bytes=LEAST_SEGMENT))
    first = pool._link.client
    with pool.staging(1000, 5) as buffer:
        buffer[:] = 7
        monkeypatch.setattr(first, "health", lambda: 2)
        pool._link.suspect()
        _wait(lambda: pool._link.client is not first, 30)
        _wait(lambda: pool.available, 30)
        assert pool.segment_name != first.segment_name
        pool.put(key, [buffer], pool.segment_name)  # memory registered before is known to the new client
        buffer[:] = 0
        pool.get_into(key, [buffer])
        assert (buffer == 7).all()
        # The old segment goes: what fits the new one alone is all there is.
        _wait(lambda: not _fits(pool, f"{key}/2", LEAST_SEGMENT), 30)
    pool.close()


@pytest.mark.cluster
def test_no_replacement_while_the_master_takes_no_clients(
    own_master: services.MasterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statestore.mooncake_client.PROBE_SECONDS", 30.0)
    config = own_master.config(timeout=1.0)
    assert probe(config)
    own_master.service.hang()
    monkeypatch.setattr("statestore.mooncake_client.PROBE_SECONDS", 2.0)
    assert not probe(config), "its port is open, but it does not answer"
    assert reachable(config.master)
    own_master.service.kill()


def _fits(pool: Pool, key: str, nbytes: int) -> bool:
    try:
        pool.cancel(pool.reserve(key, nbytes))
    except PoolFull:
        return False
    return True


def _owner(connection: Connection, config: StoreConfig) -> None:
    pool = MooncakePool(config)
    connection.send(pool.segment_name)
    connection.recv()
    pool.close()


@pytest.mark.cluster
def test_a_hung_owner_hurts_nobody_else(own_master: services.MasterService, key: str) -> None:
    config = own_master.config()
    here, there = multiprocessing.Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_owner, args=(there, config))
    owner.start()
    assert owner.pid is not None
    pool = MooncakePool(config)
    try:
        assert here.poll(20)
        segment = here.recv()
        with pool.staging(1 << 20, 5) as far, pool.staging(1 << 20, 5) as near:
            far[:] = near[:] = 7
            assert pool.put(key, [far], segment).preferred
            os.kill(owner.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(PoolUnavailable):
                pool.get_into(key, [far], timeout=0.5)
            with pytest.raises(PoolUnavailable):
                pool.put(f"{key}/2", [far], segment, timeout=0.5)
            assert time.monotonic() - began < HUNG
            assert pool.busy(far)
            began = time.monotonic()
            for number in range(20):
                pool.put(f"{key}/near/{number}", [near], pool.segment_name)
                pool.get_into(f"{key}/near/{number}", [near])
                pool.remove([f"{key}/near/{number}"])
            assert time.monotonic() - began < HUNG, "calls to others must not wait behind the hung ones"
            assert pool.available
        # Staging keeps the memory that the late calls may still write into out of use.
        with pool.staging(1 << 20, 5) as again:
            assert not np.shares_memory(again, far)
    finally:
        os.kill(owner.pid, signal.SIGKILL)
        owner.join()
        pool.close()


def _wait(condition: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def _puts(pool: Pool, key: str, buffer: Bytes) -> bool:
    try:
        pool.put(key, [buffer])
    except PoolError:
        return False
    return True


# ---- staging


@pytest.fixture
def double() -> PoolDouble:
    return PoolDouble(Store())


def test_slices_do_not_overlap_and_come_back(double: PoolDouble) -> None:
    staging = Staging(double, 10 * ALIGN)
    slices = [staging.acquire(ALIGN + n, 1) for n in range(1, 6)]
    assert [s.view.nbytes for s in slices] == [ALIGN + n for n in range(1, 6)]
    for number, piece in enumerate(slices):
        piece.view[:] = number
    assert [int(s.view[-1]) for s in slices] == list(range(5))
    assert staging.free_bytes == 0
    with pytest.raises(PoolUnavailable, match="became free"):
        staging.acquire(1, 0.05)
    for number in (1, 3, 2, 0, 4):
        staging.release(slices[number])
    assert staging.free_bytes == staging.nbytes
    assert staging.acquire(10 * ALIGN, 0.1).view.nbytes == 10 * ALIGN, "free pieces join"


def test_a_waiter_is_served_when_room_comes(double: PoolDouble) -> None:
    staging = Staging(double, 4 * ALIGN)
    first = staging.acquire(3 * ALIGN, 1)
    order: list[str] = []

    def take(name: str, nbytes: int) -> None:
        piece = staging.acquire(nbytes, 5)
        order.append(name)
        staging.release(piece)

    large = threading.Thread(target=take, args=("large", 4 * ALIGN))
    large.start()
    time.sleep(0.05)
    small = threading.Thread(target=take, args=("small", ALIGN))
    small.start()
    time.sleep(0.05)
    assert order == [], "one page is free, but the large one asked first"
    staging.release(first)
    large.join(30)
    small.join(30)
    assert order == ["large", "small"]


def test_memory_of_a_late_call_is_not_given_out(double: PoolDouble) -> None:
    staging = Staging(double, 2 * ALIGN)
    late = staging.acquire(ALIGN, 1)
    double.set_busy([late.view])
    staging.release(late)
    other = staging.acquire(ALIGN, 1)
    assert not np.shares_memory(late.view, other.view)
    with pytest.raises(PoolUnavailable):
        staging.acquire(ALIGN, 0.1)
    threading.Timer(0.1, lambda: double.set_busy([])).start()
    assert np.shares_memory(staging.acquire(ALIGN, 2).view, late.view), "it comes back when it is quiet"


def test_more_than_the_whole_staging_memory(double: PoolDouble) -> None:
    staging = Staging(double, 2 * ALIGN)
    with staging.slice(100 * ALIGN, 1) as large:
        assert large.nbytes == 100 * ALIGN
        double.put("ds/large", [large])
        with pytest.raises(PoolUnavailable, match="larger"):
            staging.acquire(50 * ALIGN, 0.05)
        with staging.slice(ALIGN, 1):
            pass
    with staging.slice(50 * ALIGN, 1):
        pass
    registered = len(double._registered)
    with staging.slice(50 * ALIGN, 1):
        assert len(double._registered) == registered + 1
    assert len(double._registered) == registered


def test_staging_refuses_nonsense_and_use_after_close(double: PoolDouble) -> None:
    with pytest.raises(ValueError, match="nbytes"):
        Staging(double, 0)
    staging = Staging(double, ALIGN)
    with pytest.raises(ValueError, match="nbytes"):
        staging.acquire(0, 1)
    staging.close()
    with pytest.raises(PoolClosed):
        staging.acquire(1, 1)


def test_staging_costs_nothing_until_it_is_touched(double: PoolDouble) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * ALIGN

    before = resident()
    staging = Staging(double, 256 << 20)
    piece = staging.acquire(200 << 20, 1)
    assert resident() - before < 16 << 20
    piece.view[: 64 << 20] = 1
    assert resident() - before > 48 << 20, "negative control: touching it does cost"
    staging.close()


# ---- calls with a deadline


def test_results_and_errors_come_through() -> None:
    calls = BoundedCalls("test")
    assert calls.run("x", lambda: 7, 1) == 7

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        calls.run("x", fail, 1)

    def time_out() -> None:
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="of the work itself"):
        calls.run("x", time_out, 1)
    assert calls.late == 0
    assert calls.close(1)
    with pytest.raises(PoolClosed):
        calls.run("x", lambda: 7, 1)


def test_late_calls_do_not_use_up_the_threads() -> None:
    calls = BoundedCalls("test", threads=2, most_late=3)
    gate = threading.Event()
    memory = np.zeros(100, np.uint8)
    for _ in range(3):
        with pytest.raises(PoolUnavailable, match="no answer"):
            calls.run("x", lambda: gate.wait(20), 0.05, [memory[:50]])
    assert calls.late == 3
    assert calls.busy(memory[40:60])
    assert not calls.busy(memory[50:])
    with pytest.raises(PoolUnavailable, match="have not come back"):
        calls.run("x", lambda: 7, 1)
    gate.set()
    _wait(lambda: calls.late == 0, 30)
    assert not calls.busy(memory)
    assert calls.run("x", lambda: 7, 1) == 7
    assert calls.close(1)


def test_a_call_that_waits_for_a_thread_is_withdrawn() -> None:
    calls = BoundedCalls("test", threads=1)
    gate, ran = threading.Event(), []
    holder = threading.Thread(target=lambda: calls.run("x", lambda: gate.wait(20), 20))
    holder.start()
    time.sleep(0.05)
    with pytest.raises(PoolUnavailable):
        calls.run("x", lambda: ran.append(1), 0.05)
    gate.set()
    holder.join(30)
    assert calls.run("x", lambda: 7, 1) == 7
    assert ran == [], "what nobody waits for must not run later"
    assert calls.late == 0


def test_close_waits_and_says_when_it_waited_in_vain() -> None:
    calls = BoundedCalls("test")
    gate = threading.Event()
    with pytest.raises(PoolUnavailable):
        calls.run("x", lambda: gate.wait(20), 0.05)
    assert not calls.close(0.1)
    gate.set()
    assert calls.close(2)
