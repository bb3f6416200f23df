# SPDX-License-Identifier: Apache-2.0
"""Checkpoints end to end: conversations, shared prefixes, budgets, damage and deaths, with real schedulers and
connectors. The toy model's answers depend on every byte of state, so an answer that is right was made of right state.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from statestore.boundary import BoundaryRecord
from tests.scenario.stack import Ask, Stack, Worker, running, until

SPACING = 32
KEEPS: dict[str, Any] = {
    "checkpoint_tokens": SPACING,
    "checkpoint_min_tokens": 16,
    "checkpoint_bytes": 1 << 22,
}


async def add(stack: Stack, role: str, engine: dict[str, Any] | None = None, **config: Any) -> Worker:
    """A worker that keeps checkpoints and follows those of others."""
    worker = await stack.add(role, engine, **{**KEEPS, "max_num_batched_tokens": SPACING, **config})
    publisher = worker.role.publisher  # type: ignore[union-attr]
    worker.role.background(publisher.index.follow(worker.ledger))  # type: ignore[union-attr]
    return worker


@pytest.fixture
async def keeping() -> AsyncIterator[Stack]:
    """One prefill worker of 2 ranks and one decode worker of 4 ranks, two of them one context-parallel group."""
    async with running() as made:
        await add(made, "prefill", tp=2)
        await add(made, "decode", tp=4, dcp=2)
        yield made


async def forget(stack: Stack) -> None:
    """Nothing is in any engine's own cache, and every index is up to date."""
    for worker in stack.workers:
        if worker.alive:
            await worker.forget()
    await settled(stack)


async def settled(stack: Stack) -> None:
    """No request owns anything in the ledger, and every index shows what it holds."""
    await until(lambda: all(r.reusable and r.state == "committed" for r in ledger(stack)))
    seen = {record.id for record in ledger(stack)}
    for worker in stack.workers:
        if worker.alive:
            index = worker.role.publisher.index  # type: ignore[union-attr]
            await until(lambda index=index: set(index.records) == seen)  # type: ignore[misc]


def ledger(stack: Stack) -> list[BoundaryRecord]:
    return [BoundaryRecord.from_json(text) for text in stack.records.values()]


async def everything_accounted(stack: Stack) -> None:
    """What lies in the store is what committed checkpoints name, and budgets say the same."""
    await settled(stack)
    named = {entry.key for record in ledger(stack) for entry in record.objects()}
    await until(lambda: set(stack.store.objects) == named)
    for worker in stack.workers:
        if worker.alive:
            budget = worker.role.publisher.budget  # type: ignore[union-attr]
            own = [record for record in ledger(stack) if record.owner == worker.worker_id]
            assert (budget.held_bytes, set(budget.checkpoints)) == (0, {record.id for record in own})
            assert budget.checkpoint_bytes == sum(record.nbytes for record in own)


def computed(stack: Stack, ask: Ask) -> int:
    """Prompt tokens that any worker computed."""
    trace = stack.trace(ask)
    if not trace["boundary_length"]:
        return int(trace["recomputed"])
    cached = trace["prefill_cached"] + trace["prefill_restored"]
    return int(trace["boundary_length"] - cached + trace["recomputed"])


async def test_a_conversation_computes_what_is_new(keeping: Stack) -> None:
    prompt = keeping.prompt(300)
    total = new = 0
    for turn in range(4):
        ask = await keeping.run(prompt, 8)
        assert keeping.is_right(ask)
        assert keeping.trace(ask)["from_store"] == len(prompt) - 1, "nothing is in a cache"
        if turn:
            total, new = total + len(prompt), new + computed(keeping, ask)
            # The last token of the answer before had been sampled, and not computed.
            assert keeping.trace(ask)["prefill_restored"] == len(prompt) - 12 - 1
        else:
            assert computed(keeping, ask) == len(prompt)
        prompt = [*prompt, *ask.tokens, *keeping.prompt(12)]
        await forget(keeping)
    assert new / total < 0.05
    await everything_accounted(keeping)


async def test_a_shared_prefix_is_restored_by_every_worker(keeping: Stack) -> None:
    await add(keeping, "prefill", tp=8)
    await add(keeping, "decode", {"block_size": 64}, tp=1)
    shared = keeping.prompt(5 * SPACING)
    assert keeping.is_right(await keeping.run([*shared, *keeping.prompt(9)]))
    await forget(keeping)
    for _ in range(6):
        ask = await keeping.run([*shared, *keeping.prompt(11)])
        assert keeping.is_right(ask)
        assert keeping.trace(ask)["prefill_restored"] == len(shared)
        await forget(keeping)
    await everything_accounted(keeping)


async def test_a_decode_worker_starts_from_a_checkpoint_without_a_boundary(keeping: Stack) -> None:
    shared = keeping.prompt(4 * SPACING)
    await keeping.run([*shared, *keeping.prompt(9)])
    await keeping.remove(keeping.prefill)
    await keeping.decode.forget()
    ask = await keeping.run([*shared, *keeping.prompt(7)])
    assert keeping.is_right(ask)
    # The prefill worker has gone politely and its memory with it; what is left may be found missing, never wrong.
    assert keeping.trace(ask)["from_store"] + keeping.trace(ask)["recomputed"] == len(shared) + 7


@pytest.mark.parametrize("group", ["kda", "mla"])
@pytest.mark.parametrize("damage", ["flipped", "gone"])
async def test_a_damaged_checkpoint_is_computed_around_and_written_anew(
    keeping: Stack, damage: str, group: str
) -> None:
    shared = keeping.prompt(3 * SPACING)
    await keeping.run([*shared, *keeping.prompt(5)])
    await forget(keeping)
    bad = max((r for r in ledger(keeping) if r.length == len(shared)), key=lambda r: r.length)
    for entry in bad.objects():
        if entry.group == group and damage == "flipped":
            keeping.store.objects[entry.key].data[3] ^= 0x10
        elif entry.group == group:
            del keeping.store.objects[entry.key]
    ask = await keeping.run([*shared, *keeping.prompt(6)])
    assert keeping.is_right(ask)
    assert keeping.trace(ask)["prefill_restored"] == 0
    await forget(keeping)
    assert bad.id not in keeping.records
    ask = await keeping.run([*shared, *keeping.prompt(6)])
    assert keeping.is_right(ask)
    assert keeping.trace(ask)["prefill_restored"] == len(shared), "healthy again"
    await everything_accounted(keeping)


async def test_control_unverified_damage_is_felt(keeping: Stack) -> None:
    """The damage of the test above changes answers where nothing checks: the witness can see it."""
    await add(keeping, "prefill", tp=2, verify=False)
    await keeping.remove(keeping.prefill)
    shared = keeping.prompt(3 * SPACING)
    await keeping.run([*shared, *keeping.prompt(5)])
    await forget(keeping)
    for record in ledger(keeping):
        for entry in record.objects():
            if record.length == len(shared) and entry.group == "kda":
                keeping.store.objects[entry.key].data[3] ^= 0x10
    ask = await keeping.run([*shared, *keeping.prompt(6)])
    assert keeping.trace(ask)["prefill_restored"] == len(shared)
    assert not keeping.is_right(ask)


async def test_the_death_of_an_owner_takes_its_chains_along(keeping: Stack) -> None:
    prompt = keeping.prompt(200)
    first = await keeping.run(prompt, 6)
    await forget(keeping)
    owner = keeping.prefill
    await add(keeping, "prefill", tp=4)
    await owner.kill()
    keeping.workers.remove(owner)
    await until(lambda: not any(record.owner == owner.worker_id for record in ledger(keeping)), 30)
    turn = [*prompt, *first.tokens, *keeping.prompt(10)]
    ask = await keeping.run(turn, 6)
    assert keeping.is_right(ask)
    assert keeping.trace(ask)["prefill_restored"] == 0, "the answer's end rested on what is gone"
    await forget(keeping)
    ask = await keeping.run([*turn, *ask.tokens, *keeping.prompt(10)], 6)
    assert keeping.is_right(ask)
    assert keeping.trace(ask)["prefill_restored"] > 200, "and the new one does not"


@pytest.mark.parametrize("seed", [1, 2])
async def test_many_conversations_within_small_budgets(seed: int) -> None:
    """Adoption, eviction, pins and copies at once, between four layouts: answers right, budgets kept, nothing lost."""
    rng = random.Random(seed)
    small = {"checkpoint_bytes": 60_000}
    async with running() as stack:
        for layout in ({"tp": 1}, {"tp": 4}):
            await add(stack, "prefill", **{**layout, **small})
        await add(stack, "decode", tp=2, **small)
        await add(stack, "decode", {"block_size": 64}, tp=4, dcp=2, **small)
        roots = [stack.prompt(rng.randrange(40, 130)) for _ in range(3)]
        restored = 0

        async def talk() -> None:
            nonlocal restored
            prompt = [*rng.choice(roots), *stack.prompt(rng.randrange(1, 60))]
            for _ in range(4):
                ask = await stack.end(stack.ask(prompt, rng.randrange(1, 9)), 60)
                assert stack.is_right(ask), stack.trace(ask)
                restored += stack.trace(ask)["prefill_restored"]
                prompt = [*prompt, *ask.tokens, *stack.prompt(rng.randrange(1, 20))]

        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(talk())
        await everything_accounted(stack)
        assert restored > 0, "the control: checkpoints were used"
        for worker in stack.workers:
            assert worker.role.publisher.budget.checkpoint_bytes <= 60_000  # type: ignore[union-attr]
