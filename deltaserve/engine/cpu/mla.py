# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on the CPU: prefill, decode over the paged latent cache, and context parallelism.

The cache is [blocks, block_size, L + R]: per token the normalised latent (L) and the rotary key (R). Decode attends
in latent space, all heads to the same rows, and returns the log-sum-exp, so that partial results of the ranks of a
decode context parallel (DCP) group can be merged::

    owner(t) = (t // I) % c      local(t) = t // (I c) I + t % I      I = interleave, c = ranks, t = position
    merge    L = log sum_r e^(L_r),  o = sum_r e^(L_r - L) o_r        a rank that owns no token has L_r = -inf
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PAD_SLOT = -1
TILE_BYTES = 2 << 20
"""Bytes of latent rows gathered at once (at least one block a request); so few that they are read back from cache."""

_INF = float("inf")


def decode_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Sequence[int],
    *,
    scale: float,
    latent_dim: int,
    tile_bytes: int = TILE_BYTES,
) -> tuple[Tensor, Tensor]:
    """Attend each request's queries to its cached rows; return (o [B, N, L], log-sum-exp [B, N] fp32).

    ``q`` [B, N, L + R], B = requests x queries a request (a speculative window; its query j of p sees
    ``seq_len - (p - 1 - j)`` rows); ``block_table`` [requests, *]; ``seq_lens`` counts the rows that this rank holds. A
    query that sees no row gives zeros and -inf. Rows beyond a request's length never reach the result, even when
    they hold NaN.
    """
    requests = len(seq_lens)
    heads, width = q.shape[1:]
    window = q.shape[0] // max(requests, 1)
    block_size = cache.shape[1]
    queries = q.float().view(requests, window * heads, width)
    high = torch.full((requests, window * heads, 1), -_INF)
    total = torch.zeros(requests, window * heads, 1)
    value = torch.zeros(requests, window * heads, latent_dim)
    visible = torch.tensor(seq_lens).view(-1, 1) - torch.arange(window - 1, -1, -1)
    visible = visible.repeat_interleave(heads, 1).unsqueeze(-1)  # [requests, window * heads, 1]
    longest = max(seq_lens, default=0)
    shortest = min(seq_lens, default=0) - (window - 1)
    buffer = torch.empty(0, dtype=cache.dtype)
    start = 0
    while start < longest:
        rows = [r for r in range(requests) if seq_lens[r] > start]
        blocks = max(1, tile_bytes // (4 * len(rows) * block_size * width))
        stop = min(start + blocks * block_size, -(-longest // block_size) * block_size)
        pick = slice(None) if len(rows) == requests else torch.tensor(rows)
        lens = visible[pick]
        ids = block_table[pick, start // block_size : stop // block_size].flatten()
        size = ids.numel() * block_size * width
        if buffer.numel() < size:  # the first tile is the largest
            buffer = torch.empty(size, dtype=cache.dtype)
        kv = torch.index_select(cache, 0, ids, out=buffer[:size].view(ids.numel(), block_size, width))
        kv = kv.view(len(rows), stop - start, width).float()
        for i, r in enumerate(rows):
            if seq_lens[r] < stop:
                kv[i, seq_lens[r] - start :] = 0.0  # 0 * NaN would be NaN
        scores = torch.bmm(queries[pick], kv.transpose(1, 2)).mul_(scale)
        if stop > shortest:
            scores.masked_fill_(torch.arange(start, stop) >= lens, -_INF)
        new_high = torch.maximum(high[pick], scores.amax(-1, keepdim=True))
        # A query that has seen nothing yet keeps -inf; subtracting it would give NaN.
        base = torch.where(new_high == -_INF, 0.0, new_high)
        scores.sub_(base).exp_()
        old = (high[pick] - base).exp()
        total[pick] = total[pick] * old + scores.sum(-1, keepdim=True)
        value[pick] = torch.baddbmm(value[pick] * old, scores, kv[..., :latent_dim])
        high[pick] = new_high
        start = stop
    out = torch.where(total > 0, value / total, 0.0)
    lse = torch.where(total > 0, high + total.log(), -_INF)
    return out.to(q.dtype).view(q.shape[0], heads, latent_dim), lse.view(q.shape[0], heads)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Sequence[int],
    cu_keys: Sequence[int],
    *,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend packed requests to their own keys; return (o [Tq, N, V], log-sum-exp [N, Tq] fp32).

    ``q`` [Tq, N, D], ``k`` [Tk, N, D], ``v`` [Tk, N, V] with V <= D; request r owns ``cu_queries[r]:cu_queries[r+1]``
    and ``cu_keys[r]:cu_keys[r+1]``. With ``causal`` query i sees keys 0..i. A request without keys gives zeros, -inf.
    """
    tokens, heads, width = q.shape
    value_dim = v.shape[2]
    out = torch.empty(tokens, heads, value_dim, dtype=v.dtype)
    lse = torch.empty(heads, tokens)
    # The kernel wants one head size; the padding columns are dropped again.
    v = F.pad(v, (0, width - value_dim))
    for r in range(len(cu_queries) - 1):
        queries = slice(cu_queries[r], cu_queries[r + 1])
        keys = slice(cu_keys[r], cu_keys[r + 1])
        if queries.start == queries.stop:
            continue
        if keys.start == keys.stop:
            out[queries] = 0.0
            lse[:, queries] = -_INF
            continue
        part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[queries].transpose(0, 1).unsqueeze(0),
            k[keys].transpose(0, 1).unsqueeze(0),
            v[keys].transpose(0, 1).unsqueeze(0),
            is_causal=causal,
            scale=scale,
        )
        out[queries] = part[0, :, :, :value_dim].transpose(0, 1)
        lse[:, queries] = part_lse[0]
    return out, lse


def merge_partial(out: Tensor, lses: Tensor, rank: int, *, base_e: bool = True) -> tuple[Tensor, Tensor]:
    """Weight this rank's ``out`` [B, H, D] in place for a sum over ranks; return (out, merged log-sum-exp [B, H]).

    ``lses`` [ranks, B, H] are the gathered log-sum-exps, in base e or 2. A rank without tokens reports -inf (or NaN)
    and contributes exact zeros, whatever its ``out`` holds.
    """
    unit = 1.0 if base_e else 0.6931471805599453
    logs = torch.nan_to_num(lses.float() * unit, nan=-_INF, posinf=-_INF, neginf=-_INF)
    merged = torch.logsumexp(logs, 0)
    weight = torch.nan_to_num((logs[rank] - merged).exp(), nan=0.0).unsqueeze(-1)
    out.copy_(torch.where(weight == 0, 0.0, out * weight))
    return out, (merged / unit).to(lses.dtype)


def gather_rows(
    cache: Tensor, out: Tensor, block_table: Tensor, cu_seqlens: Sequence[int], starts: Sequence[int]
) -> None:
    """Copy rows ``starts[r] + 0 .. n_r`` of every request r to ``out[cu_seqlens[r]:cu_seqlens[r+1]]``.

    ``cache`` [blocks, block_size, D], ``block_table`` [requests, *]. Positions beyond the table repeat its last block:
    the ranks of a context parallel group gather equally many rows, and the surplus is dropped afterwards.
    """
    block_size = cache.shape[1]
    for r, start in enumerate(starts):
        first, last = cu_seqlens[r], cu_seqlens[r + 1]
        if first == last:
            continue
        position = torch.arange(start, start + last - first)
        column = torch.div(position, block_size, rounding_mode="floor").clamp_(max=block_table.shape[1] - 1)
        out[first:last] = cache[block_table[r].long()[column], position % block_size]


def slot_mapping(
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    ranks: int,
    rank: int,
    interleave: int,
) -> Tensor:
    """Cache slot of every token on this rank, int64 [T]; ``PAD_SLOT`` for a token that another rank owns.

    ``positions`` [T]; ``requests`` [T] is each token's row of ``block_table``. A block id is the same on every rank and
    covers ``block_size * ranks`` positions, of which each rank stores its ``block_size``.
    """
    span = block_size * ranks
    positions = positions.long()
    offset = positions % span
    block = block_table[requests, torch.div(positions, span, rounding_mode="floor")].long()
    local = torch.div(offset, ranks * interleave, rounding_mode="floor") * interleave + offset % interleave
    mine = torch.div(offset, interleave, rounding_mode="floor") % ranks == rank
    return torch.where(mine, block * block_size + local, PAD_SLOT)
