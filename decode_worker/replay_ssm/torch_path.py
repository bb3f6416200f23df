# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start and the ring in torch: what a CPU runs, and what the GPU kernels are held against.

The mathematics is that of ``reference.py``, batched over requests and heads, in fp32 (or in the dtype that is asked
for). Decays between positions are products of per-token decays <= 1, never quotients, so no gate overflows them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_worker.replay_ssm.records import NULL_SLOT, WindowPlan, WindowRecords


def _decay(
    raw_g: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None, dtype: torch.dtype
) -> Tensor:
    """e^g [..., H, K] of ``raw_g`` [..., H, K]."""
    heads, key_dim = raw_g.shape[-2:]
    x = raw_g.to(dtype) + dt_bias.to(dtype).view(heads, key_dim)
    a = a_log.to(dtype).exp().view(heads, 1)
    if lower_bound is not None:
        return (lower_bound * torch.sigmoid(a * x)).exp()
    return (-a * F.softplus(x, threshold=20.0)).exp()


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _decayed_keys(keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, n, H, K] decayed to the end of the fold, and the decay [B, H, K] of all n steps."""
    out = torch.empty_like(keys)
    behind = torch.ones_like(keys[:, 0])
    for j in range(keys.shape[1] - 1, -1, -1):
        out[:, j] = keys[:, j] * behind
        behind = behind * decay[:, j]
    return out, behind


def folded_state(
    state: Tensor,
    records: WindowRecords,
    read_rows: Tensor,
    counts: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``state`` [B, H, V, K] after the first ``counts`` [B] records of rows ``read_rows`` [B].

    Records behind the count are never looked at, whatever they hold.
    """
    n = int(counts.max()) if counts.numel() else 0
    state = state.to(dtype)
    if n == 0:
        return state
    key_dim = state.shape[-1]
    live = (torch.arange(n, device=state.device) < counts.unsqueeze(1))[:, :, None, None]
    kg = records.key_gate[read_rows.long(), :, :n].transpose(1, 2)
    u = records.u[read_rows.long(), :, :n].transpose(1, 2)
    keys = _unit(torch.where(live, kg[..., :key_dim], 0).to(dtype))
    decay = torch.where(
        live, _decay(torch.where(live, kg[..., key_dim:], 0), a_log, dt_bias, lower_bound, dtype), 1.0
    )
    keys, whole = _decayed_keys(keys, decay)
    update = torch.einsum("bnhv,bnhk->bhvk", torch.where(live, u, 0).to(dtype), keys)
    return state * whole.unsqueeze(-2) + update


def _convolve_windows(
    x: Tensor, weight: Tensor, cache: Tensor, plan: WindowPlan, rows: Tensor, index: Tensor, live: Tensor
) -> Tensor:
    """SiLU(convolution) [R, T, C] of the windows of the real ``rows`` [R]; shifts their columns in the cache."""
    width = weight.shape[1]
    history = width - 1
    kept = cache.shape[2] - plan.window
    slots = plan.slots[rows].long()
    columns = plan.conv_first[rows].long().unsqueeze(1) + torch.arange(history, device=x.device)
    old = cache[slots.unsqueeze(1), :, columns]
    new = torch.where(live.unsqueeze(-1), x[index], 0)
    padded = torch.cat([old, new], 1)
    work = padded.float() if x.dtype != torch.float64 else padded
    taps = weight.to(work.dtype)
    y = sum(
        (work[:, w : w + plan.window] * taps[:, w] for w in range(width)),
        start=torch.zeros_like(work[:, : plan.window]),
    )
    # What the next window's history may begin with: the kept columns, then this window's live ones.
    shifted = padded[:, history - kept :]
    at = torch.arange(shifted.shape[1], device=x.device)
    lengths = live.sum(1)
    valid = at.unsqueeze(0) < kept + lengths.unsqueeze(1)
    row, column = valid.nonzero(as_tuple=True)
    cache[slots[row], :, column] = shifted[row, column]
    return F.silu(y).to(x.dtype)


def advance_window(
    x: Tensor,
    conv_weight: Tensor,
    conv_cache: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    records: WindowRecords,
    plan: WindowPlan,
    out: Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Fold what is pending, verify this step's windows, leave their records; write ``out`` [N, H, V].

    ``x`` [N, H*K + H*K + H*V] before the convolution; ``conv_weight`` [C, W]; ``conv_cache`` [slots, C, columns] with
    W-1+T columns, or one less where no acceptance is ever empty; ``raw_g`` [N, H, K]; ``raw_beta`` [N, H];
    ``a_log`` [H]; ``dt_bias`` [H*K]; ``state`` [slots, H, V, K] fp32. Rows of ``plan`` on the null slot give zeros.
    """
    _, heads, value_dim, key_dim = state.shape
    start = plan.cu_seqlens[:-1].long()
    lengths = plan.cu_seqlens[1:].long() - start
    out.zero_()
    rows = ((plan.slots > NULL_SLOT) & (lengths > 0)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    positions = torch.arange(plan.window, device=x.device)
    live = positions < lengths[rows].unsqueeze(1)
    index = torch.where(live, start[rows].unsqueeze(1) + positions, 0)
    y = _convolve_windows(x, conv_weight, conv_cache, plan, rows, index, live)
    mask = live[:, :, None, None]
    q, k, v = y.split([heads * key_dim, heads * key_dim, heads * value_dim], -1)
    raw_k = torch.where(mask, k.unflatten(-1, (heads, key_dim)), 0)
    q = _unit(torch.where(mask, q.unflatten(-1, (heads, key_dim)), 0).to(dtype)) * key_dim**-0.5
    v = torch.where(mask, v.unflatten(-1, (heads, value_dim)), 0).to(dtype)
    k = _unit(raw_k.to(dtype))
    gates = torch.where(mask, raw_g[index], 0)
    decay = torch.where(mask, _decay(gates, a_log, dt_bias, lower_bound, dtype), 1.0)
    beta = torch.where(mask.squeeze(-1), torch.sigmoid(raw_beta[index].to(dtype)), 0.0)

    slots = plan.slots[rows].long()
    pending = plan.pending[rows]
    s = folded_state(
        state[slots],
        records,
        plan.read_rows[rows],
        pending,
        a_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        dtype=dtype,
    )
    flush = pending >= plan.flush_at
    state[slots[flush]] = s[flush].to(state.dtype)

    result, u = _verify(s, q, k, v, decay, beta)
    out[index[live]] = result[live].to(out.dtype)
    write_rows = plan.write_rows[rows].long().unsqueeze(1).expand_as(index)
    at = plan.write_at[rows].long().unsqueeze(1) + positions
    records.u[write_rows[live], :, at[live]] = u[live].to(records.u.dtype)
    raw = torch.cat([raw_k, gates.to(raw_k.dtype)], -1)
    records.key_gate[write_rows[live], :, at[live]] = raw[live].to(records.key_gate.dtype)


def _verify(s: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and corrections [B, T, H, V] of windows against the state ``s`` [B, H, V, K].

    ``q``, ``k``, ``decay`` [B, T, H, K]; ``v`` [B, T, H, V]; ``beta`` [B, T, H].
    """
    length = q.shape[1]
    from_start = decay.cumprod(1)
    rows = torch.cat([k * from_start, q * from_start], 1)
    seen = torch.einsum("bthk,bhvk->bthv", rows, s)
    # keys[i, j] for the distance i - j: one step further back is one position shifted and one decay more.
    batch, _, heads, _ = q.shape
    below = torch.zeros(batch, heads, length, length, dtype=q.dtype, device=q.device)
    scores = torch.zeros_like(below)
    w = k
    for distance in range(length):
        if distance:
            w = decay[:, distance:] * w[:, :-1]
            below.diagonal(-distance, 2, 3).copy_((k[:, distance:] * w).sum(-1).transpose(1, 2))
        scores.diagonal(-distance, 2, 3).copy_((q[:, distance:] * w).sum(-1).transpose(1, 2))
    right = (beta.unsqueeze(-1) * (v - seen[:, :length])).transpose(1, 2)
    below = below * beta.transpose(1, 2).unsqueeze(-1)
    u = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
    out = seen[:, length:] + (scores @ u).transpose(1, 2)
    return out, u.transpose(1, 2)


def flush_pending(
    *,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    state: Tensor,
    conv_cache: Tensor,
    records: WindowRecords,
    read_rows: Tensor,
    counts: Tensor,
    conv_first: Tensor,
    source_slots: Tensor,
    target_slots: Tensor,
    conv_width: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the state after the first ``counts`` [B] pending records to ``target_slots`` [B], and the convolution's
    history with it: the columns from ``conv_first`` [B] on, as the first W-1 columns.

    This is what makes a boundary: before a state is published, saved for a preempted request, copied to a block of the
    prefix cache or handed over, it is flushed. A row is left alone when either slot is null; with nothing pending and
    equal slots its bytes do not change.
    """
    real = ((source_slots > NULL_SLOT) & (target_slots > NULL_SLOT)).nonzero().squeeze(1)
    if real.numel() == 0:
        return
    source, target = source_slots[real].long(), target_slots[real].long()
    old = state[source]
    new = folded_state(
        old,
        records,
        read_rows[real],
        counts[real],
        a_log=a_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        dtype=dtype,
    ).to(state.dtype)
    # Copied, not computed, where nothing is pending: x * 1 + 0 loses the sign of a zero.
    state[target] = torch.where((counts[real] > 0)[:, None, None, None], new, old)
    columns = conv_first[real].long().unsqueeze(1) + torch.arange(conv_width - 1, device=state.device)
    conv_cache[target, :, : conv_width - 1] = conv_cache[source.unsqueeze(1), :, columns].transpose(1, 2)
