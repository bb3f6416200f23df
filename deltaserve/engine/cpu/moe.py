# SPDX-License-Identifier: Apache-2.0
"""Routed experts with the SiTU gate: act(g, u) = b tanh(g/b) sigmoid(g) * l tanh(u/l), b = beta, l = linear beta."""

from __future__ import annotations

import torch
from torch import Tensor


def situ_and_mul(gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """[n, 2I] -> [n, I], fp32; the first half of the columns is the gate. Without ``linear_beta`` u stays as it is."""
    gate, up = gate_up.float().chunk(2, -1)
    activated = torch.tanh(gate / beta).mul_(beta).mul_(torch.sigmoid(gate))
    if linear_beta is not None:
        up = torch.tanh(up / linear_beta).mul_(linear_beta)
    return activated.mul_(up)


def situ_experts(
    hidden: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    beta: float,
    linear_beta: float | None,
    out: Tensor,
) -> None:
    """out [T, D] = sum over each token's experts e of weight * w2[e] act(w13[e] hidden).

    ``hidden`` [T, D]; ``w13`` [E, 2I, D]; ``w2`` [E, D, I]; ``topk_weights``, ``topk_ids`` [T, k]. An id below zero
    marks an expert that is not here.
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    experts = topk_ids.flatten()
    order = torch.argsort(experts, stable=True)
    tokens = order // topk_ids.shape[1]
    weights = topk_weights.flatten()[order].unsqueeze(1).float()
    present, counts = torch.unique_consecutive(experts[order], return_counts=True)
    start = 0
    for expert, count in zip(present.tolist(), counts.tolist(), strict=True):
        rows = slice(start, start + count)
        start += count
        if expert < 0:
            continue
        x = hidden[tokens[rows]]
        activated = situ_and_mul(x @ w13[expert].t(), beta, linear_beta).to(hidden.dtype)
        total.index_add_(0, tokens[rows], (activated @ w2[expert].t()).float() * weights[rows])
    out.copy_(total)
