# SPDX-License-Identifier: Apache-2.0
"""Scenarios 7 and 8, HETEROGENEOUS SHARDS and EMPTY DCP SHARD: any layout to any layout, also where a rank owns
nothing.

Caches are filled with NaN before anything is written, so a rank that uses what it does not hold gives no number."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from statestore.reshard import plan
from tests.scenario.stack import Ask, Stack, running

SIZES = (1, 2, 4, 8)
LENGTH = 75


def decode_layouts(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(TP, DCP): DCP of 1 and of TP."""
    return [(tp, dcp) for tp in sizes for dcp in sorted({1, tp})]


@pytest.fixture
async def cluster() -> AsyncIterator[Stack]:
    async with running() as made:
        yield made


async def handed_over(stack: Stack, length: int) -> Ask:
    """A request whose N-1 tokens come from the store."""
    ask = await stack.run(stack.prompt(length))
    assert stack.trace(ask)["from_store"] == length - 1
    return ask


def is_whole(stack: Stack, ask: Ask) -> bool:
    """Whether the gathered state of all decode ranks is that of one engine, and the answer too."""
    return stack.is_right(ask) and stack.decode.states[ask.name].equals(stack.model.after(ask.prompt))


@pytest.mark.parametrize("prefill_tp", SIZES)
async def test_every_layout_to_every_layout(cluster: Stack, prefill_tp: int) -> None:
    await cluster.add("prefill", tp=prefill_tp)
    for tp, dcp in decode_layouts(SIZES):
        decode = await cluster.add("decode", tp=tp, dcp=dcp, dcp_interleave=4)
        ask = await handed_over(cluster, LENGTH)
        assert is_whole(cluster, ask), f"TP {prefill_tp} to TP {tp} DCP {dcp}"
        await cluster.remove(decode)


@pytest.mark.parametrize("heads", [12, 24, 96])
async def test_numbers_of_heads(heads: int) -> None:
    """Heads that the larger TP does not divide in powers of two: 12 over 3 and 4 ranks."""
    first, second = (3, 4) if heads == 12 else (8, 6)
    async with running(heads) as stack:
        await stack.add("prefill", tp=first)
        await stack.add("decode", tp=second)
        assert is_whole(stack, await handed_over(stack, LENGTH))


@pytest.mark.parametrize(("dcp", "interleave"), [(8, 32), (8, 16), (8, 4), (4, 32), (2, 32)])
async def test_prompts_shorter_than_a_turn_of_the_owners(cluster: Stack, dcp: int, interleave: int) -> None:
    """Scenario 8: dcp x interleave tokens make one turn; of a shorter prompt some ranks own nothing."""
    await cluster.add("prefill")
    await cluster.add("decode", tp=8, dcp=dcp, dcp_interleave=interleave)
    for length in sorted({2, 3, interleave, interleave + 1, min(dcp * interleave - 1, 60)}):
        assert is_whole(cluster, await handed_over(cluster, length)), length


async def test_control_rows_for_the_wrong_owner(cluster: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that takes every row for the first owner leaves the others with nothing."""
    await cluster.add("prefill")
    await cluster.add("decode", tp=8, dcp=8, dcp_interleave=4)
    right = plan.owner
    monkeypatch.setattr(plan, "owner", lambda tokens, dcp, interleave: right(tokens, dcp, interleave) * 0)
    ask = await cluster.run(cluster.prompt(20))
    assert not is_whole(cluster, ask) or cluster.trace(ask)["from_store"] == 0


async def test_control_heads_of_another_rank(cluster: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.add("prefill", tp=4)
    await cluster.add("decode", tp=8)
    right = plan.heads_of

    def shifted(geometry: object, rank: int) -> range:
        heads = right(geometry, rank)  # type: ignore[arg-type]
        # One reading rank takes its neighbour's heads; writers are as they were.
        return right(geometry, 6) if len(heads) == 1 and rank == 7 else heads  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "heads_of", shifted)
    ask = await cluster.run(cluster.prompt(LENGTH))
    assert not is_whole(cluster, ask)
