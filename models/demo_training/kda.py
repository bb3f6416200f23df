# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention with gradients, in three forms that compute the same function.

For each head, with k̂, q̂ normalised to length 1 (q̂ also scaled by K^-½), per-channel log decay g and rate β:

    S ← diag(e^g)·S;   u = β·(v − Sᵀk̂);   S ← S + k̂ uᵀ;   o = Sᵀ q̂          S is [K, V], 0 at the start
    g = lower_bound · σ(e^A · (raw_gate + dt_bias)),   β = σ(raw_beta)

(Kimi Linear, arXiv:2510.26692; the bounded gate is Kimi K3's.) `recurrent` is the definition, `chunked` is the
same with matrix products over chunks of 16 tokens, and the `fla` library's Triton kernels serve on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 16  # e^(−sum of g) must stay finite in float32: 16 · 5 = 80 < 88
_kernel = "chunked"


class Streams(NamedTuple):
    """Inputs of the recurrence: q, k, v, gate [B, T, H, D] and beta [B, T, H]; gate and beta are raw."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    beta: Tensor


def use_kernel(name: str) -> None:
    """Choose `recurrent`, `chunked` or `fla` for every later call of `attention`."""
    global _kernel
    if name not in ("recurrent", "chunked", "fla"):
        raise ValueError(f"KDA kernel must be recurrent, chunked or fla, got {name!r}")
    _kernel = name


def attention(x: Streams, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """KDA outputs [B, T, H, D]; a_log [H], dt_bias [H·D]; the state starts at zero."""
    if _kernel == "fla":
        return _fla(x, a_log, dt_bias, lower_bound)
    form = recurrent if _kernel == "recurrent" else chunked
    with torch.autocast(x.q.device.type, enabled=False):
        return form(x, a_log, dt_bias, lower_bound)


def _fla(x: Streams, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    from fla.ops.kda import chunk_kda

    result: Any = chunk_kda(
        *x,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=lower_bound,
        A_log=a_log,
        dt_bias=dt_bias,
    )
    output: Tensor = result[0]
    return output


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def _log_decay(gate: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    heads, dim = gate.shape[-2:]
    shifted = gate.float() + dt_bias.float().view(heads, dim)
    return lower_bound * torch.sigmoid(a_log.float().exp().view(heads, 1) * shifted)


def recurrent(x: Streams, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """The definition, one token at a time."""
    batch, length, heads, dim = x.q.shape
    q, k, v = _unit(x.q) * dim**-0.5, _unit(x.k), x.v.float()
    g, beta = _log_decay(x.gate, a_log, dt_bias, lower_bound), x.beta.float().sigmoid()
    state = q.new_zeros(batch, heads, dim, dim)
    outputs = []
    for t in range(length):
        state = state * g[:, t].exp().unsqueeze(-1)
        read = (state * k[:, t].unsqueeze(-1)).sum(-2)
        u = (v[:, t] - read) * beta[:, t].unsqueeze(-1)
        state = state + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        outputs.append((state * q[:, t].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 1)


def chunked(x: Streams, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """The chunk form: within a chunk the updates u solve a triangular system; the state moves chunk by chunk.

    With G the running sum of g: (I + A) U = β(V − (K·e^G) S), A = β·tril(⟨k_i e^{G_i}, k_j e^{−G_j}⟩, −1).
    """
    batch, length, heads, dim = x.q.shape
    count = -(-length // CHUNK)

    def split(t: Tensor) -> Tensor:
        padded = F.pad(t, (0, 0, 0, 0, 0, count * CHUNK - length))
        return padded.view(batch, count, CHUNK, heads, -1).permute(1, 0, 3, 2, 4)

    q, k, v = split(_unit(x.q) * dim**-0.5), split(_unit(x.k)), split(x.v.float())
    beta = split(x.beta.float().sigmoid().unsqueeze(-1))
    total = split(_log_decay(x.gate, a_log, dt_bias, lower_bound)).cumsum(-2)
    middle = total[..., CHUNK // 2 : CHUNK // 2 + 1, :].detach()  # halves the exponents' range
    rise, fall = (total - middle).exp(), (middle - total).exp()
    k_fall = (k * fall).transpose(-1, -2)
    # The strictly lower triangular A has A^16 = 0, so (I + A)^-1 is a product of four factors in −A.
    a = -(beta * ((k * rise) @ k_fall)).tril(-1)
    identity = torch.eye(CHUNK, device=q.device)
    a2 = a @ a
    a4 = a2 @ a2
    inverse = (identity + a4 @ a4) @ (identity + a4) @ (identity + a2) @ (identity + a)
    own = inverse @ (beta * v)
    from_state = inverse @ (beta * (k * total.exp()))
    last = total[..., -1:, :]
    k_end, decay = (k * (last - total).exp()).transpose(-1, -2), last.exp().transpose(-1, -2)
    state = q.new_zeros(batch, heads, dim, dim)
    states, updates = [], []
    for i in range(count):
        states.append(state)
        update = own[i] - from_state[i] @ state
        updates.append(update)
        state = state * decay[i] + k_end[i] @ update
    inner = ((q * rise) @ k_fall).tril()
    output = (q * total.exp()) @ torch.stack(states) + inner @ torch.stack(updates)
    return output.permute(1, 0, 3, 2, 4).reshape(batch, count * CHUNK, heads, dim)[:, :length]


def compare_with_definition(name: str, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors ‖x − ref‖/‖ref‖ of one form's output and gradients against `recurrent` in float32."""
    generator = torch.Generator().manual_seed(3)
    heads, dim, length = 4, 128, 200
    shapes = [(2, length, heads, dim)] * 4 + [(2, length, heads)]
    raw = [torch.randn(shape, generator=generator) for shape in shapes]
    raw += [0.3 * torch.randn(heads, generator=generator)]
    raw += [torch.empty(heads * dim).uniform_(-8, -1, generator=generator)]
    weight = torch.randn(shapes[0], generator=generator).to(device)
    results: list[list[Tensor]] = []
    previous = _kernel
    for form in ("recurrent", name):
        inputs = [t.to(device).to(dtype if i < 5 else torch.float32) for i, t in enumerate(raw)]
        inputs = [(t.float() if form == "recurrent" else t).detach().requires_grad_() for t in inputs]
        use_kernel(form)
        try:
            output = attention(Streams(*inputs[:5]), inputs[5], inputs[6], -5.0)
        finally:
            use_kernel(previous)
        (output.float() * weight).sum().backward()
        gradients = [t.grad for t in inputs]
        results.append([output.detach().float(), *(g.float() for g in gradients if g is not None)])
    names = ("output", "d_q", "d_k", "d_v", "d_gate", "d_beta", "d_a_log", "d_dt_bias")
    pairs = zip(names, *results, strict=True)
    return {n: float((got - ref).norm() / ref.norm()) for n, ref, got in pairs}
