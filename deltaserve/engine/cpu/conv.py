# SPDX-License-Identifier: Apache-2.0
"""The short causal depthwise convolution of KDA on the CPU: SiLU(sum_w x[t - W + 1 + w] weight[w]).

The cache keeps the raw inputs, not the outputs: the last W-1 columns of q|k|v before the convolution, oldest first,
and one more column for every speculative token. ``state`` is always [slots, C, W-1+num_spec], a view that need not
be contiguous. All sums run in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.engine.cpu.kda import NULL_SLOT

_ROWS = 64
"""Tokens convolved at once, so that the rows are still in cache when the next tap is added."""


def _taps(rows: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [n, C] = SiLU(conv(rows [n+W-1, C])), ``weight`` [W, C] fp32."""
    n = out.shape[0]
    for start in range(0, n, _ROWS):
        stop = min(n, start + _ROWS)
        y = rows[start:stop] * weight[0]
        for w in range(1, weight.shape[0]):
            y.addcmul_(rows[start + w : stop + w], weight[w])
        out[start:stop] = F.silu(y, inplace=True)


def prefill_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Sequence[int],
    has_state: Sequence[bool],
    cu_seqlens: Sequence[int],
) -> Tensor:
    """Convolve packed sequences and leave the last raw rows of each in its slot; return [T, C] of x's dtype.

    ``x`` [T, C] raw; ``weight`` [C, W]; ``slots[n]`` is the slot of sequence n, which owns
    ``cu_seqlens[n]:cu_seqlens[n+1]``. A sequence with ``has_state[n]`` continues from its slot; any other starts from
    zeros, whatever a recycled slot still holds. Sequences on the null slot are padding and leave no state.
    """
    width = weight.shape[1]
    history = width - 1
    by_tap = weight.float().t().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    for n, slot in enumerate(slots):
        start, stop = cu_seqlens[n], cu_seqlens[n + 1]
        if start == stop:
            continue
        head = torch.zeros(history, x.shape[1], dtype=torch.float32)
        if has_state[n]:
            head.copy_(state[slot, :, :history].t())
        rows = x[start:stop].float()
        # The first outputs reach back into the history; all others only into x.
        lead = torch.cat([head, rows[:history]])
        _taps(lead, by_tap, out[start : start + min(history, stop - start)])
        if stop - start > history:
            _taps(rows, by_tap, out[start + history : stop])
        if slot > NULL_SLOT:
            store_columns(state, slot, rows if stop - start >= history else lead, history)
    return out


def store_columns(state: Tensor, slot: int, rows: Tensor, history: int) -> None:
    """Leave the last ``history`` of the raw ``rows`` [n, C], n >= history, in a slot."""
    state[slot, :, :history] = rows[-history:].t().to(state.dtype)


def decode_conv(x: Tensor, weight: Tensor, state: Tensor, slots: Tensor) -> Tensor:
    """One token per request: shift it into its slot and return the convolved rows [B, C] of x's dtype.

    ``x`` [B, C], ``weight`` [C, W], ``slots`` [B]. Rows on the null slot give zeros and write nothing.
    """
    history = weight.shape[1] - 1
    slots = slots.long()
    real = slots > NULL_SLOT
    window = torch.cat(
        [state.index_select(0, slots.clamp_min(NULL_SLOT))[..., :history].float(), x.float().unsqueeze(-1)],
        -1,
    )
    y = F.silu((window * weight.float()).sum(-1), inplace=True)
    shifted = window[..., 1:].to(state.dtype)
    if bool(real.all()):
        state[slots, :, :history] = shifted
        return y.to(x.dtype)
    state[slots[real], :, :history] = shifted[real]
    return torch.where(real.unsqueeze(1), y, 0.0).to(x.dtype)


def speculative_conv(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    num_accepted: Tensor | None,
    cu_seqlens: Sequence[int],
) -> Tensor:
    """Convolve every request's speculative window; return [T, C] of x's dtype.

    A slot holds W-1+num_spec raw columns; the history of the next token begins at column ``num_accepted - 1``, because
    the columns of rejected drafts lie behind it. After the step, column 0 is again where one accepted token begins:
    the kept history without its oldest column, then the window.
    """
    history = weight.shape[1] - 1
    columns = state.shape[2]
    weight = weight.float()
    out = torch.zeros(x.shape, dtype=x.dtype)
    slot_list = slots.tolist()
    accepted = [1] * len(slot_list) if num_accepted is None else num_accepted.tolist()
    for n in range(len(cu_seqlens) - 1):
        start, stop = cu_seqlens[n], cu_seqlens[n + 1]
        slot = slot_list[n]
        if start == stop or slot <= NULL_SLOT:
            continue
        first = accepted[n] - 1
        window = torch.cat([state[slot, :, first : first + history].float(), x[start:stop].t().float()], 1)
        y = (window.unfold(1, history + 1, 1) * weight.unsqueeze(1)).sum(-1)
        out[start:stop] = F.silu(y, inplace=True).t().to(out.dtype)
        kept = window[:, 1 : 1 + columns]
        state[slot, :, : kept.shape[1]] = kept.to(state.dtype)
    return out
