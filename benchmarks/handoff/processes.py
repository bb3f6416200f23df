# SPDX-License-Identifier: Apache-2.0
"""Runs the two sides: the publisher in this process, the reader in one of its own, services beside them.

Handoffs (read after the commit, and beside it) and bare take turns, in every order, so that what else the machine does,
and what the one before has left to do, meets all alike. Every handoff is compared with what was published, off the
clock; one that does not hold exactly that ends the run. Threads change as in a worker (`SWITCH_SECONDS`).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, permutations
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, TypeVar

import torch

from benchmarks.handoff.bare import Bare
from benchmarks.handoff.ledgers import LedgerLoop
from benchmarks.handoff.shapes import MIB, shape_of
from benchmarks.handoff.sides import PublishingSide, ReadingSide
from benchmarks.handoff.table import EARLY_PATH, PATH, Repetition, SizeResult
from deltaserve.config import EtcdConfig, StoreConfig
from deltaserve.engine.worker import SWITCH_SECONDS
from deltaserve.etcd import EtcdMembership
from deltaserve.etcd_client import Etcd
from deltaserve.membership import Member
from statestore.connector.device_copies import pin
from statestore.etcd_ledger import EtcdLedger
from statestore.mooncake_pool import MooncakePool
from tests.support import services

T = TypeVar("T")

OWNER = "prefill-bench"
SEGMENT_BYTES = 256 * MIB
RECORD_BYTES = 1500
"""A record of this benchmark, about."""
WARM_UP = 2
"""Turns that are not counted: connections, page faults, imports."""
ANSWER_SECONDS = 120.0


class RunFailed(RuntimeError):
    """A side failed, or a handoff was not exact; the message is the side's own."""


@dataclass(frozen=True)
class Places:
    """Where the services are."""

    store: StoreConfig
    etcd: EtcdConfig


@contextlib.contextmanager
def started_services() -> Iterator[Places]:
    """An etcd and a Mooncake master of this run's own."""
    with services.etcd() as etcd, services.mooncake_master() as master:
        yield Places(
            master.config(segment_bytes=SEGMENT_BYTES, timeout=20.0), etcd.config("/bench", lease_ttl=30)
        )


class Run:
    """Two sides that are connected; use as a context manager, then `size` once or more."""

    def __init__(
        self, places: Places, damage: str = "none", device: str = "cpu", pass_seconds: float = 0.0
    ) -> None:
        """`pass_seconds`: of a pass before every handoff."""
        self._places, self._damage, self._device = places, damage, device
        self._pass_seconds = pass_seconds
        self._switch = sys.getswitchinterval()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Run:
        sys.setswitchinterval(SWITCH_SECONDS)
        with contextlib.ExitStack() as stack:
            places = self._places
            self._ask = stack.enter_context(_reader(places, self._damage, self._device))
            self._ledger = LedgerLoop(lambda: EtcdLedger(places.etcd))
            stack.callback(self._ledger.close)
            self._etcd = Etcd(places.etcd)
            stack.callback(lambda: self._ledger.run(self._etcd.close()))
            self._lease = stack.enter_context(_member(places.etcd))
            self._pool = _pool(places.store, self._device)
            stack.callback(self._pool.close)
            self._bare = Bare(places.store, lend=False)
            stack.callback(self._bare.close)
            self._segment, self._bare_segment = self._ask("segments")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # With what went wrong, so that a reader that has ended is not asked to stop.
        self._stack.__exit__(kind, error, trace)
        sys.setswitchinterval(self._switch)

    def size(self, mib: int, turns: int) -> SizeResult:
        """Measure one size, `turns` times. Raises RunFailed."""
        shape = shape_of(mib)
        self._ask("shape", mib)
        self._bare.take(shape.parts)
        side = PublishingSide(
            shape, self._pool, self._ledger, OWNER, self._lease, self._device, self._pass_seconds
        )
        result = SizeResult(mib, shape.nbytes, shape.length)
        record = b"x" * RECORD_BYTES
        try:
            ways: list[Callable[[int], None]] = [
                lambda turn: result.handoffs.append(self._handoff(side, turn)),
                lambda turn: result.early.append(self._early(side, turn)),
                lambda turn: result.bare.append(self._bare_turn(mib, turn)),
            ]
            orders = list(permutations(ways))
            for turn in range(WARM_UP + turns):
                for way in orders[turn % len(orders)]:
                    way(turn)
                if turn < WARM_UP:
                    result.clear()
                else:
                    result.etcd.append(self._ledger.run(_round_trips(self._etcd, record)))
        finally:
            side.close()
        return result

    def _handoff(self, side: PublishingSide, turn: int) -> Repetition:
        side.prepare(turn, self._segment)
        self._ask("prepare", turn)
        published = side.publish()
        loaded = self._ask("load", turn, published.boundary)
        self._ask("check", turn)
        side.release()
        stages = {**published.stages, **_reading(loaded.stages)}
        # Both processes are of one machine, and so is their monotonic clock.
        moments = [published.began, published.written, published.committed]
        moments += [loaded.asked, loaded.record, loaded.checked, loaded.ended]
        steps = (later - earlier for earlier, later in pairwise(moments))
        path = dict(zip(PATH, steps, strict=True))
        return Repetition(loaded.ended - published.began, stages, loaded.nbytes, path)

    def _early(self, side: PublishingSide, turn: int) -> Repetition:
        side.prepare(turn, self._segment)
        self._ask("prepare", turn)
        published = side.publish(lambda record: self._ask.tell("load_early", turn, record.to_json()))
        loaded = self._ask.answer("load_early")
        self._ask("check", turn)
        side.release()
        stages = {**published.stages, **_reading(loaded.stages)}
        moments = [
            published.began,
            published.written,
            loaded.asked,
            loaded.checked,
            loaded.in_cache,
            loaded.ended,
        ]
        steps = (later - earlier for earlier, later in pairwise(moments))
        path = dict(zip(EARLY_PATH, steps, strict=True))
        return Repetition(loaded.ended - published.began, stages, loaded.nbytes, path)

    def _bare_turn(self, mib: int, turn: int) -> tuple[float, float]:
        keys = [f"bare/{mib}/{turn}/{part}" for part in ("kda", "mla")]
        put = self._bare.put(keys, self._bare_segment)
        got = self._ask("bare_get", keys)
        self._bare.remove(keys)
        return put, got


def _pool(config: StoreConfig, device: str) -> MooncakePool:
    """As a worker's rank makes it: what a device copies from and to is pinned."""
    return MooncakePool(config, pin=None if device == "cpu" else partial(pin, torch.device(device)))


def _reading(stages: dict[str, float]) -> dict[str, float]:
    """The reader's stages, told apart from the publisher's of the same name."""
    return {f"{stage} (read)" if stage == "proof" else stage: s for stage, s in stages.items()}


async def _round_trips(etcd: Etcd, value: bytes) -> tuple[float, float]:
    """Seconds of a write and of a read, and nothing else."""
    began = time.monotonic()
    await etcd.put("/bare", value)
    written = time.monotonic()
    await etcd.get("/bare")
    return written - began, time.monotonic() - written


@contextlib.contextmanager
def _member(config: EtcdConfig) -> Iterator[int]:
    """A member of the cluster, kept alive by a thread; yields its lease."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="member", daemon=True)
    thread.start()

    def run(coro: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coro, loop).result(ANSWER_SECONDS)

    async def join() -> tuple[EtcdMembership, int]:
        membership = EtcdMembership(config)
        member = await membership.join(Member(OWNER, "prefill", "127.0.0.1:1", "0", "0", 0))
        return membership, member.lease

    async def leave(membership: EtcdMembership) -> None:
        await membership.leave()
        await membership.close()

    membership, lease = run(join())
    try:
        yield lease
    finally:
        run(leave(membership))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(ANSWER_SECONDS)


# ---- the reader's process


class _Asker:
    """Has the reader do something: `ask(what, *arguments)` returns the answer, or raises RunFailed."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, *message: Any) -> Any:
        self.tell(*message)
        return self.answer(message[0])

    def tell(self, *message: Any) -> None:
        """Ask, and do not wait: `answer` must follow."""
        try:
            self._pipe.send(message)
        except BrokenPipeError as error:
            raise RunFailed(f"the reader ended at {message[0]}") from error

    def answer(self, what: str) -> Any:
        """Wait for what was asked. Raises RunFailed."""
        try:
            if not self._pipe.poll(ANSWER_SECONDS):
                raise RunFailed(f"the reader did not answer {what} within {ANSWER_SECONDS:.0f} s")
            ok, answer = self._pipe.recv()
        except (EOFError, BrokenPipeError) as error:
            raise RunFailed(f"the reader ended at {what}") from error
        if not ok:
            raise RunFailed(answer)
        return answer


@contextlib.contextmanager
def _reader(places: Places, damage: str, device: str) -> Iterator[_Asker]:
    """A reader in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_reader_main, args=(places, damage, device, theirs), daemon=True)
    process.start()
    theirs.close()

    ask = _Asker(ours)
    try:
        yield ask
        ask("stop")
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def _reader_main(places: Places, damage: str, device: str, pipe: Connection) -> None:
    try:
        sys.setswitchinterval(SWITCH_SECONDS)
        pool = _pool(places.store, device)
        ledger = LedgerLoop(lambda: EtcdLedger(places.etcd))
        bare = Bare(places.store, lend=True)
        does: dict[str, Any] = {
            "segments": lambda: (pool.segment_name, bare.segment),
            "bare_get": bare.get,
        }
        sides: list[ReadingSide] = []

        def take_shape(mib: int) -> None:
            shape = shape_of(mib)
            while sides:
                sides.pop().close()
            side = ReadingSide(shape, pool, ledger, damage, device)
            sides.append(side)
            bare.take(shape.parts)
            does.update(prepare=side.prepare, load=side.load, load_early=side.load_early, check=side.check)

        does["shape"] = take_shape
        while True:
            what, *arguments = pipe.recv()
            if what == "stop":
                break
            pipe.send((True, does[what](*arguments)))
        ledger.close()
        pool.close()
        bare.close()
        pipe.send((True, None))
    except EOFError:
        pass
    except Exception as error:
        # Said in words: an exception of one process need not unpickle in another.
        with contextlib.suppress(OSError):
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"))
        time.sleep(0.1)
    finally:
        # The library's threads need not end by themselves.
        os._exit(0)
