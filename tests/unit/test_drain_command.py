# SPDX-License-Identifier: Apache-2.0
"""Asking for a drain, over a real etcd: the order, the answer, and every way in which it may not come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from deltaserve import drain as drain_module
from deltaserve.cli.main import main
from deltaserve.config import EtcdConfig
from deltaserve.drain import Drained, DrainFailed, drain, find
from deltaserve.etcd import Etcd, EtcdMembership
from deltaserve.membership import DrainOrder, Member, Membership
from tests.doubles.membership import MembershipDouble, Register


def member(worker_id: str, address: str = "127.0.0.1:1") -> Member:
    return Member(worker_id, worker_id.split("-")[0], address, "digest", "geometry", 0)  # type: ignore[arg-type]


async def obey(worker: Membership, moved: int) -> DrainOrder:
    """What a worker does that is told to drain."""
    order = await worker.drain_order()
    await worker.drained(moved)
    await worker.leave()
    return order


async def joined(config: EtcdConfig, worker_id: str = "decode-1") -> EtcdMembership:
    worker = EtcdMembership(config)
    await worker.join(member(worker_id))
    return worker


async def left_over(config: EtcdConfig) -> list[str]:
    etcd = Etcd(config)
    try:
        return sorted((await etcd.list(config.prefix)).items)
    finally:
        await etcd.close()


async def test_a_worker_drains_and_nothing_stays_in_the_register(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "ORDER_TTL", 2)
    worker = await joined(etcd_config)
    working = asyncio.create_task(obey(worker, moved=2))
    gone = await drain(etcd_config, "decode-1", seconds=7.5, wait=30)
    assert (gone.worker_id, gone.moved) == ("decode-1", 2)
    assert (await working).seconds == 7.5
    async with asyncio.timeout(60):
        while await left_over(etcd_config):  # noqa: ASYNC110 - the answer goes with its lease
            await asyncio.sleep(0.2)
    await worker.close()


async def test_a_second_order_waits_for_the_first(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: asyncio.Queue[None] = asyncio.Queue()
    plain = drain_module._until_gone

    async def noted(*arguments: Any) -> int:
        entered.put_nowait(None)
        return await plain(*arguments)

    monkeypatch.setattr(drain_module, "_until_gone", noted)
    worker = await joined(etcd_config)
    first = asyncio.create_task(drain(etcd_config, "decode-1", seconds=3, wait=60))
    order = await worker.drain_order()
    second = asyncio.create_task(drain(etcd_config, "decode-1", seconds=99, wait=60))
    await asyncio.wait_for(asyncio.gather(entered.get(), entered.get()), 60)
    await worker.drained(0)
    await worker.leave()
    assert order.seconds == 3
    assert [outcome.worker_id for outcome in await asyncio.gather(first, second)] == ["decode-1"] * 2
    await worker.close()


async def test_a_worker_that_dies_is_no_drain(etcd_config: EtcdConfig) -> None:
    """The negative control of `done`: the record goes just the same."""
    worker = await joined(etcd_config)
    asking = asyncio.create_task(drain(etcd_config, "decode-1", wait=60))
    await worker.drain_order()
    await worker.leave()
    with pytest.raises(DrainFailed, match="went without finishing"):
        await asking
    assert await left_over(etcd_config) == []
    await worker.close()


async def test_a_worker_that_does_not_answer(etcd_config: EtcdConfig) -> None:
    worker = await joined(etcd_config)
    with pytest.raises(DrainFailed, match="still there after 1 s"):
        await drain(etcd_config, "decode-1", wait=1)
    assert len(await left_over(etcd_config)) == 1, "its record, and no order"
    await worker.close()


async def test_an_order_outlives_its_time_to_live_while_it_is_waited_for(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "ORDER_TTL", 2)
    worker = await joined(etcd_config)
    asking = asyncio.create_task(drain(etcd_config, "decode-1", wait=60))
    await worker.drain_order()
    await asyncio.sleep(5)
    await worker.drained(0)
    await worker.leave()
    assert (await asking).moved == 0
    await worker.close()


async def test_the_double_keeps_the_contract() -> None:
    register = Register()
    worker = MembershipDouble(register)
    await worker.join(member("decode-1"))
    waiting = asyncio.create_task(worker.drain_order())
    register.orders["decode-1"] = DrainOrder(4.0)
    await register.notify()
    assert (await waiting).seconds == 4.0
    await worker.drained(1)
    assert register.orders["decode-1"] == DrainOrder(done=True, moved=1)


def test_finding_a_worker() -> None:
    registered = [member("decode-12ab", "a:1"), member("decode-12cd", "b:2"), member("prefill-9", "c:3")]
    assert find(registered, "decode-12ab") is registered[0]
    assert find(registered, "prefill") is registered[2]
    assert find(registered, "b:2") is registered[1]
    with pytest.raises(DrainFailed, match="may be any of decode-12ab, decode-12cd"):
        find(registered, "decode-12")
    with pytest.raises(DrainFailed, match="no worker 'x' is registered; there are: decode-12ab"):
        find(registered, "x")
    with pytest.raises(DrainFailed, match="there are: none"):
        find([], "decode-1")


def test_an_order_survives_the_register() -> None:
    for order in (DrainOrder(), DrainOrder(0.0), DrainOrder(2.5, done=True, moved=3)):
        assert DrainOrder.from_json(order.to_json()) == order
    with pytest.raises(ValueError, match="does not fit"):
        DrainOrder.from_json('{"minutes": 1}')


def test_the_command(
    etcd_config: EtcdConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register = [f"--etcd-endpoints={etcd_config.endpoints[0]}", f"--etcd-prefix={etcd_config.prefix}"]
    assert main(["drain", "decode-1", *register]) == 1
    assert "no worker 'decode-1' is registered" in capsys.readouterr().err
    assert main(["drain", *register]) == 2
    assert "WORKER: field required" in capsys.readouterr().err
    assert main(["drain", "x", "--etcd-endpoints=127.0.0.1:1", "--etcd-timeout=0.5"]) == 1
    assert "error: etcd at 127.0.0.1:1" in capsys.readouterr().err

    asked: list[Any] = []

    async def drained(*arguments: Any) -> Drained:
        asked.append(arguments)
        return Drained("decode-1", 0, 1.25)

    monkeypatch.setattr("deltaserve.cli.drain.drain", drained)
    assert main(["drain", "decode-1", "--seconds=4", *register]) == 0
    assert capsys.readouterr().out == "decode-1 drained in 1.2 s; it finished all that it held\n"
    assert asked[0][1:] == ("decode-1", 4.0, 600.0)
