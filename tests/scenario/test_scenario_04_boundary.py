# SPDX-License-Identifier: Apache-2.0
"""Scenario 4, H(N-1): the state after the decode worker's first step is that of one engine, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.doubles.engine import EngineDouble
from tests.scenario.stack import Ask, Stack

BLOCK = 32


async def handed_over(stack: Stack, prompt: list[int]) -> Ask:
    ask = await stack.run(prompt)
    assert stack.trace(ask)["from_store"] == len(prompt) - 1
    return ask


@pytest.mark.parametrize("length", [1, 2, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 150])
async def test_the_first_step_is_that_of_one_engine(stack: Stack, length: int) -> None:
    prompt = stack.prompt(length)
    ask = await handed_over(stack, prompt)
    assert stack.is_right(ask)
    assert stack.decode.states[ask.name].equals(stack.model.after(prompt))


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 97])
async def test_a_full_local_hit_on_the_prefill_side(stack: Stack, length: int) -> None:
    """All N-1 tokens are in the prefill worker's own cache, and again as a prefix of a longer prompt."""
    prompt = stack.prompt(length)
    await handed_over(stack, prompt)
    await stack.decode.forget()
    again = await handed_over(stack, prompt)
    assert stack.is_right(again)
    assert stack.decode.states[again.name].equals(stack.model.after(prompt))
    await stack.decode.forget()
    longer = await handed_over(stack, [*prompt, *stack.prompt(1)])
    assert stack.is_right(longer)


async def test_the_store_is_what_is_read(stack: Stack) -> None:
    """The decode worker has a cache of its own; with a prompt that it has never seen all N-1 come from the store."""
    ask = await handed_over(stack, stack.prompt(80))
    assert stack.trace(ask)["local"] == 0
    assert stack.trace(ask)["recomputed"] == 1


async def test_control_a_prefill_of_all_n_tokens(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published as the state after N-1 tokens, it holds token N twice once the decode worker has computed it."""
    prompt = stack.prompt(80)
    add = EngineDouble.add

    def longer(self: EngineDouble, request: Any, *rest: Any) -> None:
        if self is stack.prefill.engine:
            # As many tokens as it should have, the last of them token N.
            request.prompt_token_ids = [*prompt[1:]]
        add(self, request, *rest)

    monkeypatch.setattr(EngineDouble, "add", longer)
    ask = await handed_over(stack, prompt)
    assert not stack.is_right(ask)
    assert not stack.decode.states[ask.name].equals(stack.model.after(prompt))
