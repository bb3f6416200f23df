# SPDX-License-Identifier: Apache-2.0
"""The attention residual and the SiTU experts against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu.attention_residual import attention_residual
from deltaserve.engine.cpu.moe import situ_experts
from tests.unit.reference import kda as reference

HIDDEN = 40


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize("output_norm", [False, True])
@pytest.mark.parametrize("write", [-1, 2])
def test_attention_residual(num_blocks: int, output_norm: bool, write: int) -> None:
    tokens = 9
    prefix, delta = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    blocks = torch.randn(tokens, 4, HIDDEN)
    if write >= num_blocks:
        blocks[:, write] = float("nan")
    norm, query, out_norm = torch.randn(3, HIDDEN)
    weight = out_norm if output_norm else None
    before, total = blocks.clone(), prefix + delta
    out = attention_residual(prefix, delta, blocks, norm, query, weight, num_blocks, write, 1e-5, 1e-6)
    assert torch.equal(prefix, total)
    if write >= 0:
        assert torch.equal(blocks[:, write], total)
    # A block that is written and also a source (only then) is read after the write.
    sources = torch.cat(
        [(blocks if 0 <= write < num_blocks else before)[:, :num_blocks], total.unsqueeze(1)], 1
    )
    expected = reference.attention_residual(sources, norm, query, 1e-5, weight, 1e-6)
    assert error(out, expected) < 1e-5
    if num_blocks:
        assert (
            error(out, reference.attention_residual(sources.flip(1) * 1.1, norm, -query, 1e-5, weight, 1e-6))
            > 1e-3
        )
    wrong = reference.attention_residual(
        sources[:, -1:] - delta.unsqueeze(1), norm, query, 1e-5, weight, 1e-6
    )
    assert error(out, wrong) > 1e-2


def test_attention_residual_refuses_fp8() -> None:
    x = torch.randn(1, HIDDEN)
    with pytest.raises(ValueError, match="quant_dtype"):
        attention_residual(
            x, None, x.unsqueeze(1), x[0], x[0], None, 0, -1, 1e-5, 0.0, quant_dtype=torch.float8_e4m3fn
        )


@pytest.mark.parametrize("linear_beta", [None, 2.0])
def test_situ_experts(linear_beta: float | None) -> None:
    tokens, experts, inner, beta = 13, 5, 8, 1.5
    x = torch.randn(tokens, HIDDEN)
    w13, w2 = torch.randn(experts, 2 * inner, HIDDEN), torch.randn(experts, HIDDEN, inner)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
    ids[3, 1] = -1
    weights = torch.rand(tokens, 2)
    out = torch.empty_like(x)
    situ_experts(x, w13, w2, weights, ids, beta=beta, linear_beta=linear_beta, out=out)

    def expected(scale: float) -> Tensor:
        total = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
        for t in range(tokens):
            for j in range(2):
                e = int(ids[t, j])
                if e < 0:
                    continue
                gate, up = (w13[e].double() @ x[t].double()).split(inner)
                up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
                act = scale * torch.tanh(gate / scale) / (1 + torch.exp(-gate)) * up
                total[t] += float(weights[t, j]) * (w2[e].double() @ act)
        return total

    assert error(out, expected(beta)) < 1e-5
    assert error(out, expected(2 * beta)) > 1e-2
