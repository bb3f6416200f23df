# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention and its neighbours, token by token in float64: what every kernel is compared with.

Nothing here is shared with the kernels under test; each function follows the equations, not an implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def log_decay(raw_g: Tensor, a_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Log decay of K3 (``lower_bound``) or of Kimi-Linear (softplus), [T, H, K]."""
    heads, key_dim = raw_g.shape[-2:]
    x = raw_g.to(F64)
    if dt_bias is not None:
        x = x + dt_bias.to(F64).view(heads, key_dim)
    a = a_log.to(F64).exp().view(heads, 1)
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-a * x))
    return -a * torch.logaddexp(x, torch.zeros_like(x))


def unit(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6): the epsilon inside the root, the sum and not the mean."""
    x = x.to(F64)
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the outputs [T, H, V] and the state [T, H, V, K] after every token, from ``state`` [H, V, K]."""
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), v.to(F64)
    g = log_decay(raw_g, a_log, dt_bias, lower_bound)
    beta = 1 / (1 + torch.exp(-raw_beta.to(F64)))
    s = state.to(F64)
    outputs, states = [], []
    for t in range(q.shape[0]):
        s = s * g[t].exp().unsqueeze(-2)
        u = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hvk,hk->hv", s, k[t]))
        s = s + torch.einsum("hv,hk->hvk", u, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", s, q[t]))
        states.append(s)
    return torch.stack(outputs), torch.stack(states)


def conv(x: Tensor, weight: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of the causal depthwise convolution; return (y [T, C], the last W-1 raw rows [W-1, C]).

    ``x`` [T, C]; ``weight`` [C, W]; ``history`` [W-1, C] holds the raw rows before the first token, oldest first.
    """
    width = weight.shape[1]
    padded = torch.cat([history.to(F64), x.to(F64)])
    y = torch.stack(
        [
            sum(
                (padded[t + w] * weight[:, w].to(F64) for w in range(width)),
                start=torch.zeros(x.shape[1], dtype=F64),
            )
            for t in range(x.shape[0])
        ]
    )
    return y / (1 + torch.exp(-y)), padded[-(width - 1) :]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query [N, D] over keys [n, D] and values [n, L] -> (o [N, L], log-sum-exp [N])."""
    scores = (q.to(F64) @ k.to(F64).T) * scale
    return scores.softmax(-1) @ v.to(F64), scores.logsumexp(-1)


def attention_residual(
    sources: Tensor,
    norm_weight: Tensor,
    query: Tensor,
    eps: float,
    output_weight: Tensor | None,
    output_eps: float,
) -> Tensor:
    """Mix ``sources`` [T, R, D] by a softmax over R of <rms_norm(source), query>, then optionally RMS-normalise."""
    x = sources.to(F64)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * norm_weight.to(F64)
    weights = (normed * query.to(F64)).sum(-1).softmax(-1)
    mixed = (weights.unsqueeze(-1) * x).sum(1)
    if output_weight is None:
        return mixed
    return mixed / torch.sqrt((mixed * mixed).mean(-1, keepdim=True) + output_eps) * output_weight.to(F64)
