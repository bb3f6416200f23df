# SPDX-License-Identifier: Apache-2.0
"""Scenario 3, POISONED DUPLICATE: bad bytes under a key are found by digest and replaced under a new epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from statestore.boundary import BoundaryRecord
from statestore.pool import Placement, Reservation
from tests.doubles.pool import PoolDouble, Stored
from tests.scenario.stack import CHECKPOINTS, Stack, failures, running, until

LENGTH = 70


@pytest.fixture(params=[True, False], ids=["verified", "control: unverified"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stack, bool]]:
    async with running() as made:
        await made.add("prefill")
        await made.add("decode", verify=request.param)
        yield made, request.param


def epochs(stack: Stack) -> set[str]:
    """Epochs of the objects in the store."""
    return {key.split("/")[2] for key in stack.store.objects}


async def test_poison_is_found_and_replaced_under_a_new_epoch(cluster: tuple[Stack, bool]) -> None:
    stack, verified = cluster
    before = failures("load", "digest")
    prompt = stack.prompt(LENGTH)
    stack.decode.engine.hold()
    poisoned = stack.ask(prompt)
    await until(lambda: stack.decode.service.job_count == 1)
    first = epochs(stack)
    victim = next(o for key, o in sorted(stack.store.objects.items()) if "/kda/" in key)
    victim.data[victim.data.nbytes // 2] ^= 0x40
    stack.decode.engine.go()
    await stack.end(poisoned)
    assert stack.is_right(poisoned) == verified
    assert failures("load", "digest") == before + verified
    if verified:
        assert stack.trace(poisoned)["failure"] == "digest"
    # The same prompt again: put right, never "exists, skip".
    stack.decode.engine.hold()
    right = stack.ask(prompt)
    await until(lambda: stack.decode.service.job_count == 1)
    assert not first & epochs(stack)
    stack.decode.engine.go()
    await stack.end(right)
    if verified:
        assert stack.is_right(right)


async def test_a_poisoned_checkpoint_is_found_and_replaced() -> None:
    """State that later prompts would begin with: the first of them finds the poison, nobody after it meets it again."""
    async with running() as stack:
        for role in ("prefill", "decode"):
            await stack.add(role, **CHECKPOINTS)
        prompt = stack.prompt(150)

        async def continued() -> tuple[bool, float]:
            """Whether a prompt that shares 130 tokens is answered right, and how many loads failed for it."""
            for worker in (stack.prefill, stack.decode):
                await worker.forget()
            before = failures("load", "digest")
            ask = await stack.run([*prompt[:130], *stack.prompt(30)])
            return stack.is_right(ask), failures("load", "digest") - before

        async def checkpoints() -> list[BoundaryRecord]:
            records = await stack.decode.ledger.list()
            return [r for r in records if r.length == 128 and r.state == "committed"]

        await stack.run(prompt)
        async with asyncio.timeout(30):
            while not (poisoned := await checkpoints()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await continued() == (True, 0), "the control: it is used, and well"
        for entry in poisoned[0].objects():
            if entry.group == "kda":
                stack.store.objects[entry.key].data[3] ^= 4
        assert await continued() == (True, 1)
        assert await continued() == (True, 0)
        replaced = await checkpoints()
        assert [record.prefix_hash for record in replaced] == [poisoned[0].prefix_hash]
        assert replaced[0].epoch != poisoned[0].epoch


def squat(stack: Stack) -> list[str]:
    """Before rank 2 writes its KDA object, somebody else's bytes lie under that key."""
    taken: list[str] = []

    def before(operation: str, key: str) -> None:
        if operation == "reserve" and key.endswith("/kda/2") and not taken:
            taken.append(key)
            values = np.random.default_rng(3).integers(1, 64, 4096).astype(np.uint8)
            with stack.store.lock:
                stack.store.objects[key] = Stored(
                    values, stack.prefill.engine.pools[0].segment_name, sealed=True
                )

    stack.store.before = before
    return taken


async def test_a_key_that_exists_is_no_success(stack: Stack) -> None:
    taken = squat(stack)
    prompt = stack.prompt(LENGTH)
    ask = await stack.run(prompt)
    assert taken
    assert stack.is_right(ask)
    assert stack.trace(ask)["route"].startswith("local prefill_failed")
    again = await stack.run(prompt)
    assert stack.is_right(again)
    assert stack.trace(again)["route"].startswith(("local prefill_failed", "handover"))


async def test_control_a_store_that_skips_what_exists(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake's plain put: success, and the old bytes. The digests of what was meant find it."""
    skipped: set[str] = set()
    reserve, write, seal = PoolDouble.reserve, PoolDouble.write, PoolDouble.seal

    def reserving(self: PoolDouble, key: str, nbytes: int, *rest: Any, **more: Any) -> Reservation:
        self.store.before("reserve", key)
        if key in self.store.objects:
            skipped.add(key)
            return Reservation(key, nbytes, "")
        return reserve(self, key, nbytes, *rest, **more)

    def writing(self: PoolDouble, reservation: Reservation, pieces: Sequence[Any], *rest: Any) -> None:
        if reservation.key not in skipped:
            write(self, reservation, pieces, *rest)

    def sealing(self: PoolDouble, reservation: Reservation, *rest: Any) -> Placement:
        if reservation.key in skipped:
            return Placement(reservation.key, reservation.nbytes, "", True)
        return seal(self, reservation, *rest)

    monkeypatch.setattr(PoolDouble, "reserve", reserving)
    monkeypatch.setattr(PoolDouble, "write", writing)
    monkeypatch.setattr(PoolDouble, "seal", sealing)
    before = failures("load", "digest") + failures("load", "size")
    squat(stack)
    ask = await stack.run(stack.prompt(LENGTH))
    assert skipped
    assert failures("load", "digest") + failures("load", "size") == before + 1
    assert stack.is_right(ask)
