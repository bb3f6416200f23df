# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention in torch, for the CPU: the chunk form for prefill, the recurrence for decode.

Per token and head, with q and k normalised to unit length and q scaled by K^-1/2::

    S <- S diag(e^g);  u = beta (v - S k);  S <- S + u k^T;  o = S q          S is [V, K], fp32

Chunk form, with G the running sum of g inside a chunk of C tokens::

    A_ij = beta_i <k_i e^(G_i - G_j), k_j>   (i > j)         T = (I + A)^-1
    U    = T beta V - T beta (K e^G) S^T
    O    = (Q e^G) S^T + tril(<q_i e^(G_i - G_j), k_j>) U
    S'   = S diag(e^(G_C)) + U^T (K e^(G_C - G))

The decays e^(G_i - G_j) are never formed from e^(-G), which overflows, nor pair by pair, which needs C^2 K values.
A chunk is halved again and again: for i in the second half of a block and j in its first half,

    e^(G_i - G_j) = (decay from the middle to i) (decay from j to the middle)

and both factors are products of per-token decays <= 1. One pass over the block sizes 1, 2, 4, ..., C/2 therefore
gives every pair exactly, for any gate, with a relative error of a few roundings and without a single overflow;
what underflows is a decay below 1e-38. (I + A)^-1 is built in the same pass from its halves.

Sources: Kimi Linear (arXiv:2510.26692) for the recurrence and the gates; the chunk form is the WY representation of
DeltaNet (arXiv:2406.06484) with per-channel decay.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NULL_SLOT = 0
"""Slot 0 of the state cache is the null block: it is never read as state and never written."""

MAX_CHUNK = 64
"""Tokens per chunk; a power of two. A longer chunk means fewer sequential steps and more work inside each."""

TILE_BYTES = 24 << 20
"""Bound on the working set of one prefill tile, in bytes (about a dozen [chunks, H, C, K] arrays live at once)."""


def log_decay(raw_g: Tensor, a_log: Tensor, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """Return the log decay g <= 0, fp32, of shape [T, H, K].

    ``raw_g`` [T, H, K]; ``a_log`` [H]; ``dt_bias`` [H*K] or None. With ``lower_bound`` (K3, -5) the gate is
    ``lower_bound * sigmoid(e^a_log x)``, without (Kimi-Linear) ``-e^a_log softplus(x)``; x = raw_g + dt_bias.
    """
    heads, key_dim = raw_g.shape[-2:]
    x = raw_g.float()
    if dt_bias is not None:
        x = x + dt_bias.float().view(heads, key_dim)
    a = a_log.float().exp().view(heads, 1)
    if lower_bound is not None:
        return torch.sigmoid(a * x).mul_(lower_bound)
    return F.softplus(x, threshold=20.0).mul_(-a)


def normalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """Return ``x * scale / sqrt(sum(x^2) + 1e-6)`` over the last dimension, fp32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True).add_(1e-6).rsqrt_().mul_(scale))


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    spans: Sequence[tuple[int, int]],
    state: Tensor,
    out: Tensor,
    max_chunk: int = MAX_CHUNK,
    tile_bytes: int = TILE_BYTES,
) -> None:
    """Run prefill over packed sequences; write the outputs to ``out`` and the final states over ``state``.

    ``q``, ``k``, ``raw_g`` [T, H, K] and ``v`` [T, H, V] are what the convolution and the projections give (not yet
    normalised or activated); ``raw_beta`` [T, H]; sequence n is the tokens ``spans[n]`` = (start, stop) of T; ``state``
    [N, H, V, K] fp32 holds the initial states and receives the final ones; ``out`` [T, H, V]. Rows of ``out`` that
    belong to no sequence are left alone. Memory beyond the arguments is bounded by about ``tile_bytes``.
    """
    lengths = [stop - start for start, stop in spans]
    # Longest first: the sequences that still have a chunk at step c are then a prefix.
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: -lengths[i])
    if not order:
        return
    heads, key_dim = q.shape[1:]
    chunk = max(2, min(max_chunk, 1 << (lengths[order[0]] - 1).bit_length()))
    per_chunk = (
        4 * heads * chunk * (8 * key_dim + 4 * v.shape[2] + 4 * chunk) + 4 * heads * v.shape[2] * key_dim
    )
    tile_chunks = max(1, tile_bytes // per_chunk)
    for first in range(0, len(order), tile_chunks):
        group = order[first : first + tile_chunks]
        starts = [spans[i][0] for i in group]
        ends = [spans[i][1] for i in group]
        steps = [-(-lengths[i] // chunk) for i in group]
        s = state[group].flatten(0, 1)
        step = 0
        while step < steps[0]:
            active: list[int] = []
            while step + len(active) < steps[0]:
                n = sum(1 for x in steps if x > step + len(active))
                if active and sum(active) + n > tile_chunks:
                    break
                active.append(n)
            tile = _Tile(chunk, heads, starts, ends, step, active)
            tile.run(q, k, v, raw_g, raw_beta, a_log, dt_bias, lower_bound, s, out)
            step += len(active)
        state[group] = s.view(len(group), *state.shape[1:])


class _Tile:
    """Consecutive chunks of one group of sequences, ordered by step, then by sequence."""

    def __init__(
        self, chunk: int, heads: int, starts: list[int], ends: list[int], step: int, active: list[int]
    ) -> None:
        self.chunk = chunk
        self.heads = heads
        self.active = active
        first = [starts[i] + (step + c) * chunk for c, n in enumerate(active) for i in range(n)]
        last = [ends[i] for n in active for i in range(n)]
        index = torch.tensor(first).unsqueeze(1) + torch.arange(chunk)
        end = torch.tensor(last).unsqueeze(1)
        self.padded = bool((index[:, -1:] >= end).any())
        self.valid = index < end
        self.index = torch.minimum(index, end - 1).flatten()
        # One contiguous run of tokens needs no gather: a slice will do.
        self.rows = slice(first[0], first[0] + index.numel())
        self.contiguous = not self.padded and all(n == 1 for n in active)

    def take(self, x: Tensor) -> Tensor:
        """Rows of ``x`` [T, H, D] in chunk order, [n*C, H, D]."""
        return x[self.rows] if self.contiguous else x.index_select(0, self.index)

    def by_head(self, x: Tensor) -> Tensor:
        """[n*C, H, D] -> contiguous [n*H, C, D]."""
        n = x.shape[0] // self.chunk
        x = x.view(n, self.chunk, self.heads, -1).transpose(1, 2)
        return x.contiguous().view(n * self.heads, self.chunk, -1)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor | None,
        lower_bound: float | None,
        state: Tensor,
        out: Tensor,
    ) -> None:
        """Advance ``state`` [N*H, V, K] over the tile and write its outputs to ``out``."""
        decay = log_decay(self.take(raw_g), a_log, dt_bias, lower_bound).exp_()
        keys = normalize(self.take(k))
        beta = self.take(raw_beta.unsqueeze(-1)).float().sigmoid()
        if self.padded:
            # A padded token must leave the state as it is: no decay, no key, no update.
            hole = ~self.valid.flatten()
            decay[hole] = 1.0
            keys[hole] = 0.0
            beta[hole] = 0.0
        queries = self.by_head(normalize(self.take(q), q.shape[2] ** -0.5))
        beta = self.by_head(beta)
        intra = _intra_chunk(queries, self.by_head(keys), beta, self.by_head(decay))
        del queries, keys, decay

        key_dim, value_dim = q.shape[2], v.shape[2]
        rhs = torch.cat([self.by_head(self.take(v).float()), intra.keys_in], -1).mul_(beta)
        solved = torch.bmm(intra.inverse, rhs)
        del rhs
        u, w = solved.split([value_dim, key_dim], -1)
        before = torch.empty(u.shape[0], value_dim, key_dim, dtype=torch.float32)
        row = 0
        for n in self.active:
            rows = slice(row, row + n * self.heads)
            row = rows.stop
            s = state[: n * self.heads]
            before[rows] = s
            u_step = torch.baddbmm(u[rows], w[rows], s.transpose(1, 2), alpha=-1)
            u[rows] = u_step
            s.mul_(intra.decay[rows])
            s.baddbmm_(u_step.transpose(1, 2), intra.keys_out[rows])
        o = torch.bmm(intra.queries_in, before.transpose(1, 2))
        o.baddbmm_(intra.scores, u)
        n = o.shape[0] // self.heads
        o = o.view(n, self.heads, self.chunk, value_dim).transpose(1, 2)
        if self.contiguous:
            out[self.rows].unflatten(0, (n, self.chunk)).copy_(o)
        elif self.padded:
            valid = self.valid.flatten()
            out[self.index[valid]] = o.reshape(-1, self.heads, value_dim)[valid].to(out.dtype)
        else:
            out[self.index] = o.reshape(-1, self.heads, value_dim).to(out.dtype)


class _Intra:
    """What a chunk contributes whatever the state it starts from; M = chunks * heads, all fp32."""

    def __init__(self, queries: Tensor, keys: Tensor, decay: Tensor) -> None:
        m, c, _ = keys.shape
        self.queries_in = queries * decay  # [M, C, K], becomes Q e^G
        self.keys_in = keys * decay  # [M, C, K], becomes K e^G
        self.keys_out = keys.clone()  # [M, C, K], becomes K e^(G_C - G)
        self.decay = decay  # [M, C, K], becomes [M, 1, K] = e^(G_C)
        self.scores = torch.zeros(m, c, c)  # tril(<q_i e^(G_i - G_j), k_j>)
        self.scores.diagonal(dim1=1, dim2=2).copy_((queries * keys).sum(-1))
        self.inverse = torch.eye(c).repeat(m, 1, 1)  # (I + A)^-1


def _below_diagonal(x: Tensor, half: int) -> Tensor:
    """View [M, blocks, half, half] of the lower left quarters of the diagonal blocks of size 2*half of x [M, C, C]."""
    m, c, _ = x.shape
    return x.as_strided((m, c // (2 * half), half, half), (c * c, 2 * half * (c + 1), c, 1), half * c)


def _diagonal_block(x: Tensor, half: int, second: int) -> Tensor:
    """Copy [M*blocks, half, half] of the first or second diagonal quarters of the blocks of size 2*half."""
    m, c, _ = x.shape
    view = x.as_strided(
        (m, c // (2 * half), half, half), (c * c, 2 * half * (c + 1), c, 1), second * half * (c + 1)
    )
    return view.reshape(-1, half, half)


def _intra_chunk(queries: Tensor, keys: Tensor, beta: Tensor, decay: Tensor) -> _Intra:
    """Build the pairwise terms of every chunk by halving. [M, C, K] inputs, ``beta`` [M, C, 1], ``decay`` e^g."""
    x = _Intra(queries, keys, decay)
    m, c, key_dim = keys.shape
    half = 1
    while half < c:
        blocks = m * (c // (2 * half))
        rows_q = x.queries_in.view(blocks, 2 * half, key_dim)[:, half:]
        rows_k = x.keys_in.view(blocks, 2 * half, key_dim)[:, half:]
        columns = x.keys_out.view(blocks, 2 * half, key_dim)[:, :half]
        row_beta = beta.view(blocks, 2 * half, 1)[:, half:]
        scores = _products(rows_q, columns)
        a = _products(rows_k, columns).mul_(row_beta)
        shape = (m, c // (2 * half), half, half)
        _below_diagonal(x.scores, half).copy_(scores.view(shape))
        if half > 1:
            a = torch.bmm(
                _diagonal_block(x.inverse, half, 1), torch.bmm(a, _diagonal_block(x.inverse, half, 0))
            )
        _below_diagonal(x.inverse, half).copy_(a.neg_().view(shape))
        # Widen every factor from blocks of `half` to blocks of `2 * half` tokens.
        total = x.decay.view(blocks, 2, 1, key_dim)
        rows_q.mul_(total[:, 0])
        rows_k.mul_(total[:, 0])
        columns.mul_(total[:, 1])
        x.decay = total[:, 0] * total[:, 1]
        half *= 2
    x.decay = x.decay.view(m, 1, key_dim)
    return x


def _products(rows: Tensor, columns: Tensor) -> Tensor:
    """<row_i, column_j>: [B, h, K] x [B, h, K] -> [B, h, h]."""
    if rows.shape[1] == 1:
        return (rows * columns).sum(-1, keepdim=True)
    return torch.bmm(rows, columns.transpose(1, 2))


def recurrent_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row: return (o [B, H, V], new state [B, H, V, K]).

    ``q``, ``k`` [B, H, K] normalised and scaled, ``v`` [B, H, V], ``decay`` = e^g [B, H, K], ``beta`` [B, H], ``state``
    [B, H, V, K] fp32, which is not modified. Both products with the state use the state as it was
    (S diag(e^g) k = S (e^g k)), so that it is read once for them and once for the update.
    """
    b, h, value_dim, key_dim = state.shape
    flat = state.reshape(b * h, value_dim, key_dim)
    # Two rows times a matrix: the other way round, a matrix times two columns, takes six times as long.
    rows = torch.stack([k, q], 2).mul_(decay.unsqueeze(2)).view(b * h, 2, key_dim)
    seen = torch.bmm(rows, flat.transpose(1, 2)).view(b, h, 2, value_dim)
    u = (v - seen[:, :, 0]) * beta.unsqueeze(-1)
    o = seen[:, :, 1] + u * (k * q).sum(-1, keepdim=True)
    new = (state * decay.unsqueeze(2)).addcmul_(u.unsqueeze(-1), k.unsqueeze(2))
    return o, new


def decode_kda(
    qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """Decode one token per request and update ``state_cache`` in place; return the outputs [B, H, V], fp32.

    ``qkv`` [B, H*K + H*K + H*V] after the convolution; ``raw_g`` [B, H, K]; ``raw_beta`` [B, H]; ``state_cache``
    [slots, H, V, K]; ``slots`` [B] integer. A row whose slot is not positive is padding: its output is zero and
    nothing is written for it.
    """
    _, heads, value_dim, key_dim = state_cache.shape
    rows = qkv.shape[0]
    q, k, v = qkv.float().split([heads * key_dim, heads * key_dim, heads * value_dim], -1)
    slots = slots.long()
    real = slots > NULL_SLOT
    o, new = recurrent_step(
        normalize(q.view(rows, heads, key_dim), key_dim**-0.5),
        normalize(k.view(rows, heads, key_dim)),
        v.view(rows, heads, value_dim),
        log_decay(raw_g, a_log, dt_bias, lower_bound).exp_(),
        raw_beta.float().sigmoid(),
        state_cache.index_select(0, slots.clamp_min(NULL_SLOT)).float(),
    )
    if bool(real.all()):
        state_cache.index_copy_(0, slots, new.to(state_cache.dtype))
        return o
    state_cache.index_copy_(0, slots[real], new[real].to(state_cache.dtype))
    return torch.where(real.view(-1, 1, 1), o, 0.0)


def speculative_kda(
    qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    *,
    a_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    state_cache: Tensor,
    slots: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Sequence[int],
) -> Tensor:
    """Advance every request by its whole speculative window, one stored state a token; return [T, H, V], fp32.

    Request n owns tokens ``cu_seqlens[n]:cu_seqlens[n+1]`` and the cache slots ``slots[n]`` [num_spec + 1]: the state
    after its token t goes to ``slots[n, t]``, and it starts from ``slots[n, num_accepted[n] - 1]``, which is the
    state that the last step left after the tokens that were accepted. ``num_accepted`` None means one. Requests
    whose starting slot is not positive are padding: zero output, no write.
    """
    _, heads, value_dim, key_dim = state_cache.shape
    tokens = qkv.shape[0]
    count = len(cu_seqlens) - 1
    q, k, v = qkv.float().split([heads * key_dim, heads * key_dim, heads * value_dim], -1)
    q = normalize(q.view(tokens, heads, key_dim), key_dim**-0.5)
    k = normalize(k.view(tokens, heads, key_dim))
    v = v.view(tokens, heads, value_dim)
    decay = log_decay(raw_g, a_log, dt_bias, lower_bound).exp_()
    beta = raw_beta.float().sigmoid()
    out = torch.zeros(tokens, heads, value_dim)
    slots = slots[:count].long()
    if slots.ndim == 1:
        slots = slots.unsqueeze(1)
    accepted = torch.ones(count, dtype=torch.long) if num_accepted is None else num_accepted[:count].long()
    start = torch.tensor(cu_seqlens[:-1])
    length = torch.tensor(cu_seqlens[1:]) - start
    source = slots.gather(1, (accepted - 1).clamp_min(0).unsqueeze(1)).squeeze(1)
    rows = ((source > NULL_SLOT) & (length > 0)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return out
    state = state_cache.index_select(0, source[rows]).float()
    for t in range(int(length[rows].max())):
        live = length[rows] > t
        if not bool(live.all()):
            rows, state = rows[live], state[live]
        at = start[rows] + t
        o, state = recurrent_step(q[at], k[at], v[at], decay[at], beta[at], state)
        out[at] = o
        target = slots[rows, t]
        real = target > NULL_SLOT
        state_cache.index_copy_(0, target[real], state[real].to(state_cache.dtype))
    return out
