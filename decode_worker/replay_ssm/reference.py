# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start in float64, one request and one equation at a time: what the fast paths are compared with.

A window of T positions is a chunk. With k, q normalised (q scaled by K^-1/2), G_i the sum of the log decays g_1..g_i of
the window and S the state [V, K] before it, the T recurrent steps

    S <- S diag(e^g);   u = beta (v - S k);   S <- S + u k^T;   o = S q

are the same as

    A_ij = beta_i <k_i e^(G_i - G_j), k_j>  (i > j)        P_ij = <q_i e^(G_i - G_j), k_j>  (i >= j)
    U    = (I + A)^-1 diag(beta) (V - (K e^G) S^T)         O    = (Q e^G) S^T + P U

so verification reads S for two products with T vectors each and does not change it. Whatever number n of positions is
accepted, the state after them is one rank-n update,

    S_n  = S diag(e^(G_n)) + sum_(j <= n) u_j (k_j e^(G_n - G_j))^T

which is why a window's records (u_j, k_j, g_j) are all that has to be kept until n is known.

Sources: Kimi Linear (arXiv:2510.26692) for recurrence and gates; the chunk form is the WY representation of DeltaNet
(arXiv:2406.06484) with per-channel decay. Nothing here is shared with the paths under test.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

F64 = torch.float64


class Window(NamedTuple):
    """A verified window of one request, float64."""

    out: Tensor
    """[T, H, V]"""
    u: Tensor
    """Corrections [T, H, V]."""
    k: Tensor
    """Normalised keys [T, H, K]."""
    g: Tensor
    """Log decays [T, H, K]."""


def log_decay(raw_g: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """g [T, H, K] of ``raw_g`` [T, H, K], ``a_log`` [H], ``dt_bias`` [H*K]: K3 with a bound, else Kimi-Linear."""
    heads, key_dim = raw_g.shape[-2:]
    x = raw_g.to(F64) + dt_bias.to(F64).view(heads, key_dim)
    a = a_log.to(F64).exp().view(heads, 1)
    if lower_bound is not None:
        return lower_bound / (1 + torch.exp(-a * x))
    return -a * torch.logaddexp(x, torch.zeros_like(x))


def _unit(x: Tensor) -> Tensor:
    x = x.to(F64)
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def verify(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
) -> Window:
    """Run a window against ``state`` [H, V, K], which stays as it is. ``q``, ``k``, ``raw_g`` [T, H, K] after the
    convolution, ``v`` [T, H, V], ``raw_beta`` [T, H]."""
    length = q.shape[0]
    s = state.to(F64)
    q, k, v = _unit(q) * q.shape[-1] ** -0.5, _unit(k), v.to(F64)
    g = log_decay(raw_g, a_log, dt_bias, lower_bound)
    beta = torch.sigmoid(raw_beta.to(F64))
    total = g.cumsum(0)
    u = torch.zeros_like(v)
    out = torch.zeros_like(v)
    for i in range(length):
        seen = torch.einsum("hvk,hk->hv", s, k[i] * total[i].exp())
        asked = torch.einsum("hvk,hk->hv", s, q[i] * total[i].exp())
        for j in range(i):
            decayed = k[j] * (g[j + 1 : i + 1].sum(0)).exp()
            seen = seen + (k[i] * decayed).sum(-1, keepdim=True) * u[j]
            asked = asked + (q[i] * decayed).sum(-1, keepdim=True) * u[j]
        u[i] = beta[i].unsqueeze(-1) * (v[i] - seen)
        out[i] = asked + (q[i] * k[i]).sum(-1, keepdim=True) * u[i]
    return Window(out, u, k, g)


def fold(state: Tensor, u: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """The state [H, V, K] after the n steps whose ``u`` [n, H, V], normalised ``k`` and ``g`` [n, H, K] are given."""
    s = state.to(F64) * g.to(F64).sum(0).exp().unsqueeze(-2)
    for j in range(u.shape[0]):
        decayed = k[j].to(F64) * g[j + 1 :].to(F64).sum(0).exp()
        s = s + torch.einsum("hv,hk->hvk", u[j].to(F64), decayed)
    return s
