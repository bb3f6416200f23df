# SPDX-License-Identifier: Apache-2.0
"""What several router processes share: limits, places at the door, and metrics that add up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from deltaserve.config import RouterConfig
from router.admission import Door, Key, KeyRing, Refused
from router.admission.share import Share
from router.errors import Failed
from router.main import _listen
from router.processes import siblings, start
from router.processes.merge import Counted, families, whole_health
from router.processes.parent import Parent
from router.processes.siblings import Siblings
from router.processes.tally import Tally

LIMITED = Key("a", concurrency=8)


def in_processes(number: int, work: Callable[[int], int]) -> list[int]:
    """What `work` gives in forked processes, at most 255 each."""
    pids = []
    for index in range(number):
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                code = work(index)
            finally:
                os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def doors(number: int, slots: int, keys: tuple[str, ...] = ("a",), shared: bool = True) -> list[Door]:
    """Doors of as many processes, in this one."""
    tally = Tally(number, keys)
    return [Door(lambda: slots, 100, share=tally.seat(i) if shared else Share()) for i in range(number)]


@pytest.mark.parametrize("shared", [True, False])
def test_a_keys_concurrency_holds_over_processes_that_race(shared: bool) -> None:
    """Exactly the limit gets in, whoever is first; the control: doors that share nothing let in three times that."""
    number = 3
    made = doors(number, 1000, shared=shared)
    go = time.monotonic() + 0.3

    def race(index: int) -> int:
        async def enter() -> int:
            entered = 0
            for _ in range(50):
                with contextlib.suppress(Refused):
                    await made[index].enter(LIMITED, 1)
                    entered += 1
            return entered

        time.sleep(max(0.0, go - time.monotonic()))
        return asyncio.run(enter())  # nobody leaves

    assert sum(in_processes(number, race)) == (8 if shared else 24)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_keys_rate_is_one_bucket(shared: bool) -> None:
    key = Key("a", requests_per_second=5)
    entered = 0
    for door in doors(3, 1000, shared=shared):
        for _ in range(10):
            with contextlib.suppress(Refused):
                await door.enter(key, 1)
                entered += 1
    assert entered in ((5, 6) if shared else (15, 16, 17))


async def test_a_permit_that_leaves_makes_room_in_another_process() -> None:
    one, other = doors(2, 1000)
    permits = [await one.enter(LIMITED, 1) for _ in range(8)]
    with pytest.raises(Refused, match="8 requests under way"):
        await other.enter(LIMITED, 1)
    permits[0].leave()
    await other.enter(LIMITED, 1)


async def test_what_a_dead_process_held_is_free_again() -> None:
    tally = Tally(2, ("a",))
    dead, living = (Door(lambda: 8, 100, share=tally.seat(i)) for i in range(2))
    for _ in range(8):
        await dead.enter(LIMITED, 1)
    with pytest.raises(Refused):
        await living.enter(LIMITED, 1)
    tally.clear(0)
    assert os.eventfd_read(tally.waker(1))  # and those that wait are told
    for _ in range(8):
        await living.enter(LIMITED, 1)


async def test_places_are_counted_over_all_and_shared_evenly() -> None:
    """One process has taken all places; what comes free goes to the other, which has none, and waits."""
    one, other = doors(2, 4)
    free = Key("free")
    permits = [await one.enter(free, 1) for _ in range(4)]
    ours = asyncio.ensure_future(one.enter(free, 1))
    await asyncio.sleep(0)
    theirs = asyncio.ensure_future(other.enter(free, 1))
    await asyncio.sleep(0)
    assert not ours.done()
    assert not theirs.done()
    permits[0].leave()
    await asyncio.sleep(0)
    assert not ours.done()  # it has 3 of 4, and the other one waits with none
    other.pump()  # as its event loop does when it is woken
    await asyncio.wait_for(theirs, 5)
    permits[1].leave()
    await asyncio.sleep(0)
    permits[2].leave()
    one.pump()
    await asyncio.wait_for(ours, 5)
    assert one.inside + other.inside == 3


async def test_all_that_wait_are_counted_against_the_queues_bound() -> None:
    tally = Tally(2)
    one, other = (Door(lambda: 1, 1, share=tally.seat(i)) for i in range(2))
    key = Key("free")
    await one.enter(key, 1)
    waiting = asyncio.ensure_future(one.enter(key, 1))
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="1 requests wait already"):
        await other.enter(key, 1)
    waiting.cancel()


def test_a_process_that_stops_with_the_lock_does_not_stop_the_others() -> None:
    tally = Tally(2, ("a",))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with tally.locked():
            os.write(write, b"x")
            time.sleep(30)
        os._exit(0)
    os.read(read, 1)
    began = time.monotonic()
    with tally.locked():
        pass
    assert time.monotonic() - began < 1
    os.kill(pid, 9)  # the kernel opens the lock
    os.waitpid(pid, 0)
    with tally.locked():
        pass


# ---- metrics


def registry(requests: float, inside: float, ready: float) -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("deltaserve_router_requests", "x", ["outcome"], registry=made).labels("finished").inc(requests)
    Gauge("deltaserve_router_inside", "x", registry=made).set(inside)
    Gauge("deltaserve_router_workers", "x", ["role", "state"], registry=made).labels("decode", "ready").set(
        ready
    )
    return made


def values(text: bytes) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_add_up_and_stay_when_a_process_has_ended(tmp_path: Path) -> None:
    counted = Counted(tmp_path)
    one, other = families(registry(3, 1, 2)), {**families(registry(4, 2, 2)), "pid": -7}
    counted.keep(1, other)
    both = values(counted.text([one, other], counted.kept()))
    assert both["deltaserve_router_requests_total"] == 7
    assert both["deltaserve_router_inside"] == 3
    assert both["deltaserve_router_workers"] == 2  # both see the same two
    # It has died and nobody has noticed: its file stands for it. Then the parent adds that up; then once more.
    assert values(counted.text([one], counted.kept()))["deltaserve_router_requests_total"] == 7
    for _ in range(2):
        counted.end(1, -7)
        after = values(counted.text([one], counted.kept()))
        assert after["deltaserve_router_requests_total"] == 7
        assert after["deltaserve_router_inside"] == 1
    # Control: without what is kept the sum falls, and Prometheus would count 3 anew.
    assert values(counted.text([one], {}))["deltaserve_router_requests_total"] == 3


async def test_a_full_disk_takes_no_metrics_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question is answered, and what could not be kept is kept as soon as there is room."""
    sibling = Siblings(0, 1, tmp_path, registry(3, 1, 2))
    monkeypatch.setattr(siblings, "SAVE_SECONDS", 0.01)
    write, tried = Counted._write, 0

    def full(self: Counted, path: Path, found: object) -> None:
        nonlocal tried
        tried += 1
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Counted, "_write", full)

    def counts() -> list[Path]:
        return list(tmp_path.glob("counts-*"))

    await sibling.start()
    try:
        assert values(await sibling.metrics())["deltaserve_router_requests_total"] == 3
        seen = tried
        await asyncio.sleep(0.1)
        assert tried > seen, "it goes on trying"
        assert not counts()
        monkeypatch.setattr(Counted, "_write", write)
        await asyncio.sleep(0.1)
        assert counts()
    finally:
        await sibling.close()


def test_a_child_that_left_a_message_unread_is_started_again(tmp_path: Path) -> None:
    """Such a pair is reset, which is no reason to end the parent; nor is a disk that takes no counts."""
    parent = Parent.__new__(Parent)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(b"adopt 1")
    theirs.close()  # unread
    child = SimpleNamespace(
        index=0, control=ours, pid=os.getpid(), ready=True, error="", began=0.0, pause=0.1
    )
    parent._selector = SimpleNamespace(unregister=lambda control: None)  # type: ignore[assignment]
    parent._tally = SimpleNamespace(clear=lambda index: None)  # type: ignore[assignment]

    def full(index: int, pid: int) -> None:
        raise OSError(28, "No space left on device")

    parent._counted = SimpleNamespace(end=full)  # type: ignore[assignment]
    parent._stopping, parent._announced = True, True
    parent._ended(child)  # type: ignore[arg-type]
    assert (child.pid, child.control) == (0, None)


def test_health_says_which_processes_are_away() -> None:
    workers = [{"id": "d0", "requests": 2, "outstanding_tokens": 5}]
    own = {
        "status": "ok",
        "in_flight": 2,
        "queued": 1,
        "missing": [],
        "roles": {"decode": {"ready": 1, "workers": workers}},
    }
    whole = whole_health(own, [own], 3)
    assert (whole["in_flight"], whole["queued"], whole["status"]) == (4, 2, "degraded")
    assert whole["processes"] == {"wanted": 3, "serving": 2}
    assert "1 of 3 router processes" in whole["missing"][0]
    assert whole["roles"]["decode"]["workers"] == [{"id": "d0", "requests": 4, "outstanding_tokens": 10}]
    assert whole_health(own, [own, own], 3)["status"] == "ok"


# ---- start


def test_a_port_that_another_router_shares_is_refused() -> None:
    """SO_REUSEPORT alone would let a second router take half of the first one's clients."""
    config = RouterConfig(port=0, processes=2)
    first = start.listen(config, _listen)
    taken = config.model_copy(update={"port": first[0].getsockname()[1]})
    try:
        with pytest.raises(Failed, match="cannot be bound"):
            start.listen(taken, _listen)
        _listen(taken, True).close()  # the control: the kernel would have let it in
    finally:
        for listener in first:
            listener.close()
    assert len({listener.fileno() for listener in first}) == 1  # closed


def test_stored_responses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RouterConfig(processes=2)
    start.check(config, lambda _: None)
    monkeypatch.setenv(start.STORE, "1")
    with pytest.raises(Failed, match=r"VLLM_ENABLE_RESPONSES_API_STORE.*unset it, or set processes to 1"):
        start.check(config, lambda _: None)


def test_what_a_check_says_in_its_own_process_is_heard() -> None:
    def bad(_: RouterConfig) -> None:
        raise Failed("tls_cert x: cannot be used")

    with pytest.raises(Failed, match=r"^tls_cert x: cannot be used$"):
        start.check(RouterConfig(processes=2), bad)


def test_a_process_that_cannot_start_ends_the_router_with_its_words(tmp_path: Path) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]

    def serve(place: object) -> int:
        place.tell("error the model is not there")  # type: ignore[attr-defined]
        return 1

    parent = Parent(serve, lambda: None, listeners, KeyRing(), tmp_path)  # type: ignore[arg-type]
    assert parent.run() == "the model is not there"
