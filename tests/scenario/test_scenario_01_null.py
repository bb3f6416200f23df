# SPDX-License-Identifier: Apache-2.0
"""Scenario 1, NULL BOUNDARY: state that is null or zero is never published; forced into the store, it is never used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from statestore.connector import proofs, publishing
from tests.doubles.toy_model import KDA_LAYERS
from tests.scenario.stack import Ask, Stack, failures, running


def zero_state_of(stack: Stack, rank: int) -> Callable[[str, int], None]:
    """Zeroes one layer's recurrent state of a rank, in the step that ends a prompt."""
    engine = stack.prefill.engine

    def zero(request_id: str, length: int) -> None:
        block = engine.tables(request_id)[0][-(-length // engine.block_size) - 1]
        engine.memory[rank].state(0, block)[0][:] = 0

    return zero


def null_table_of(stack: Stack) -> None:
    """From now on the cache manager tells the connector that running states lie in the null block."""
    manager = stack.prefill.engine.scheduler.kv_cache_manager
    honest = manager.get_block_ids

    def nulled(request_id: str) -> tuple[list[int], ...]:
        *states, rows = (list(table) for table in honest(request_id))
        return (*([*table[:-1], 0] for table in states), rows)

    manager.get_block_ids = nulled
    # The null block holds numbers that could be state: only its being the null block gives it away.
    values = np.random.default_rng(1).uniform(0.1, 1.0, 4096).astype(np.float32)
    for memory in stack.prefill.engine.memory:
        for number in range(len(KDA_LAYERS)):
            for part in memory.state(number, 0):
                part[:] = values[: part.size].reshape(part.shape)


async def published(stack: Stack) -> Ask:
    ask = await stack.run(stack.prompt(70))
    stack.prefill.tamper = lambda request_id, length: None
    return ask


async def refused_before_it_is_visible(stack: Stack, kind: str) -> None:
    before, baseline = failures("publish", kind), stack.gauges()
    ask = await published(stack)
    assert failures("publish", kind) > before
    trace = stack.trace(ask)
    assert trace["route"].startswith("local prefill_failed")
    assert trace["from_store"] == 0
    assert stack.is_right(ask)
    await stack.back_to(baseline)


async def test_a_zero_state_is_not_published(stack: Stack) -> None:
    stack.prefill.tamper = zero_state_of(stack, rank=3)
    await refused_before_it_is_visible(stack, "null_state")


async def test_a_null_block_is_not_published(stack: Stack) -> None:
    null_table_of(stack)
    await refused_before_it_is_visible(stack, "null_block")


async def test_a_null_state_in_the_store_is_not_used() -> None:
    """Its digests match: only the look at the state itself finds it."""
    async with running() as stack:
        await stack.add("prefill")
        await stack.add("decode", damage="null")
        before = failures("load", "null_state")
        ask = await stack.run(stack.prompt(70))
        assert failures("load", "null_state") == before + 1
        assert stack.trace(ask)["from_store"] == 0
        assert stack.is_right(ask)


async def test_control_without_the_look_at_states(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "first_null", lambda parts: None)
    stack.prefill.tamper = zero_state_of(stack, rank=3)
    ask = await published(stack)
    assert stack.trace(ask)["from_store"] == 69
    assert not stack.is_right(ask)


async def test_control_without_the_look_at_tables(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "check_table", lambda *arguments: None)
    null_table_of(stack)
    ask = await published(stack)
    assert stack.trace(ask)["from_store"] == 69
    assert not stack.is_right(ask)
