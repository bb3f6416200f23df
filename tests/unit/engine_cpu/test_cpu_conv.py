# SPDX-License-Identifier: Apache-2.0
"""The short convolution against float64: history, prompts shorter than the window, recycled slots full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu.conv import decode_conv, prefill_conv, speculative_conv
from tests.unit.reference import kda as reference

CHANNELS, WIDTH = 24, 4
HISTORY = WIDTH - 1


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def poisoned(slots: int, num_spec: int = 0) -> Tensor:
    """A cache of recycled slots, as a transposed view like vLLM's default layout."""
    return torch.full((slots, HISTORY + num_spec, CHANNELS), float("nan")).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 300])
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize("num_spec", [0, 3])
def test_prefill(length: int, continued: bool, num_spec: int) -> None:
    x, weight = torch.randn(length, CHANNELS), torch.randn(CHANNELS, WIDTH)
    state = poisoned(4, num_spec)
    history = torch.randn(HISTORY, CHANNELS) if continued else torch.zeros(HISTORY, CHANNELS)
    if continued:
        state[2, :, :HISTORY] = history.t()
    y = prefill_conv(x, weight, state, [2], [continued], [0, length])
    expected, raw = reference.conv(x, weight, history)
    assert error(y, expected) < 1e-6
    assert torch.equal(state[2, :, :HISTORY].t(), raw.float()), "the slot keeps raw columns, oldest first"
    assert bool(state[[0, 1, 3]].isnan().all())
    # Control: the same rows with the window reversed, or with another history, are not the same.
    assert error(y, reference.conv(x, weight.flip(1), history)[0]) > 1e-2
    assert error(y, reference.conv(x, weight, history + 1.0)[0]) > 1e-3


def test_prefill_packs_sequences_and_cuts_anywhere() -> None:
    lengths = [1, 5, 2, 90]
    cu = [0, 1, 6, 8, 98]
    x, weight = torch.randn(98, CHANNELS), torch.randn(CHANNELS, WIDTH)
    state = poisoned(6)
    y = prefill_conv(x, weight, state, [1, 2, 0, 4], [False] * 4, cu)
    zeros = torch.zeros(HISTORY, CHANNELS)
    for n, _ in enumerate(lengths):
        assert error(y[cu[n] : cu[n + 1]], reference.conv(x[cu[n] : cu[n + 1]], weight, zeros)[0]) < 1e-6
    assert bool(state[[0, 3, 5]].isnan().all()), "the null slot takes no state"
    for cut in (1, 2, 3, 4, 50):
        again = poisoned(6)
        first = prefill_conv(x[8 : 8 + cut], weight, again, [4], [False], [0, cut])
        rest = prefill_conv(x[8 + cut :], weight, again, [4], [True], [0, 90 - cut])
        torch.testing.assert_close(torch.cat([first, rest]), y[8:])
        assert torch.equal(again[4], state[4])


def test_decode_continues_prefill() -> None:
    x, weight = torch.randn(40, CHANNELS), torch.randn(CHANNELS, WIDTH)
    expected, _ = reference.conv(x, weight, torch.zeros(HISTORY, CHANNELS))
    for prompt in (1, 2, 3, 30):
        state = poisoned(5)
        prefill_conv(x[:prompt], weight, state, [3], [False], [0, prompt])
        for t in range(prompt, 40):
            rows = torch.stack([torch.randn(CHANNELS), x[t]])
            y = decode_conv(rows, weight, state, torch.tensor([0, 3]))
            assert error(y[1], expected[t]) < 1e-6, (prompt, t)
            assert torch.equal(y[0], torch.zeros(CHANNELS))
        assert torch.equal(state[3].t(), x[-HISTORY:])
        assert bool(state[[0, 1, 2, 4]].isnan().all())


@pytest.mark.parametrize("num_spec", [1, 3])
def test_speculation_with_any_number_accepted(num_spec: int) -> None:
    """Each window starts where the accepted tokens of the last one end, whatever the rejected ones were."""
    window = num_spec + 1
    weight = torch.randn(CHANNELS, WIDTH)
    prompt = torch.randn(2, CHANNELS)
    state = poisoned(3, num_spec)
    prefill_conv(prompt, weight, state, [1], [False], [0, 2])
    tokens, accepted = prompt, 1
    for step in range(12):
        drafted = torch.randn(window, CHANNELS)
        y = speculative_conv(
            drafted, weight, state, torch.tensor([1, 0]), torch.tensor([accepted, 1]), [0, window, window]
        )
        expected, _ = reference.conv(torch.cat([tokens, drafted]), weight, torch.zeros(HISTORY, CHANNELS))
        assert error(y, expected[-window:]) < 1e-6, step
        accepted = step % window + 1
        if step == 5:  # control: a wrong offset is seen
            wrong = accepted % window + 1
            y = speculative_conv(
                drafted, weight, state.clone(), torch.tensor([1]), torch.tensor([wrong]), [0, window]
            )
            right, _ = reference.conv(
                torch.cat([tokens, drafted[:accepted], drafted]), weight, torch.zeros(HISTORY, CHANNELS)
            )
            assert error(y, right[-window:]) > 1e-2
        tokens = torch.cat([tokens, drafted[:accepted]])
    assert bool(state[[0, 2]].isnan().all())
