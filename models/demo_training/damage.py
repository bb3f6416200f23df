# SPDX-License-Identifier: Apache-2.0
"""Lost and swapped state, as training and measurement apply it.

A damage says which memories of which rows are wrong: `kda[layer]` is a mask [B, H] over rows and heads,
`mla[layer]` a mask [B] over rows. What "wrong" means is the same for both kinds of layer:

* lose: nothing before the cut is remembered (recurrent state, convolution columns, latent cache);
* swap: what is remembered before the cut belongs to another row of the batch.

A cut is either one position (`cut`, how a handoff loses state) or every multiple of `segment` (training: many
cuts for the price of one). With segments and swap, segment j of a damaged row remembers the segments before j of
other damaged rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Damage:
    """Which memories are wrong, and how. Exactly one of `cut` and `segment` is set."""

    mode: str
    """`lose` or `swap`."""
    cut: int = 0
    segment: int = 0
    kda: dict[int, Tensor] = field(default_factory=dict)
    mla: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in ("lose", "swap"):
            raise ValueError(f"damage mode must be lose or swap, got {self.mode!r}")
        if (self.cut > 0) == (self.segment > 0):
            raise ValueError(f"damage needs one of cut and segment, got {self.cut} and {self.segment}")


class _Exchange(torch.autograd.Function):
    """A permutation of blocks whose gradient is the inverse permutation (plain indexing adds atomically)."""

    @staticmethod
    def forward(ctx, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return _take(x, forth)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return _take(grad, ctx.saved_tensors[0]), None, None


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, T, ..., H, C] with segment j of head h in row r taken from row `rows[r, j, h]`; rows [B, J, H]."""
    batch, length, heads, width = x.shape[0], x.shape[1], x.shape[-2], x.shape[-1]
    count = rows.shape[1]
    blocks = x.reshape(batch, count, length // count, -1, heads, width)
    _, segments, steps, parts, _, _ = blocks.shape

    def axis(size: int, place: int) -> Tensor:
        shape = [1] * 5
        shape[place] = size
        return torch.arange(size, device=x.device).view(shape)

    index = (rows[:, :, None, None, :], axis(segments, 1), axis(steps, 2), axis(parts, 3), axis(heads, 4))
    return blocks[index].view(x.shape)


def exchange_rows(wrong: Tensor, count: int, inverse: bool = False) -> Tensor:
    """Where each of `count` segments of every row and head comes from, [B, count, H], when `wrong` [B, H] swap.

    Segment j of the i-th wrong row comes from the (i−j)-th wrong row, cyclically; a sound row keeps its own.
    """
    rank = wrong.long().cumsum(0) - 1
    total = wrong.sum(0).clamp(min=1)
    order = (~wrong).long().argsort(dim=0, stable=True)
    step = torch.arange(count, device=wrong.device)[None, :, None] * (1 if inverse else -1)
    chosen = (rank[:, None] + step) % total
    moved = order[:, None].expand(-1, count, -1).gather(0, chosen)
    own = torch.arange(len(wrong), device=wrong.device)[:, None, None]
    return torch.where(wrong[:, None], moved, own)


def damaged(
    mixer: Callable[[Sequence[Tensor]], Tensor], streams: Sequence[Tensor], damage: Damage, wrong: Tensor
) -> Tensor:
    """Run a causal sequence mixer with the memory of `wrong` rows and heads damaged.

    `streams` are [B, T, ..., H, C]; `mixer` maps them to [B, T, H, C] and starts each sequence from nothing;
    `wrong` is [B, H], or [B] for all heads of a row. Raises ValueError when `segment` does not divide the length
    or `cut` is not inside it.
    """
    batch, length = streams[0].shape[:2]
    wrong = wrong.view(batch, -1).expand(-1, streams[0].shape[-2])
    if damage.segment:
        if length % damage.segment:
            raise ValueError(f"segment {damage.segment} does not divide the length {length}")
        if damage.mode == "swap":  # one pass serves all rows
            forth = exchange_rows(wrong, length // damage.segment)
            back = exchange_rows(wrong, length // damage.segment, inverse=True)
            output: Tensor = _Exchange.apply(
                mixer([_Exchange.apply(s, forth, back) for s in streams]), back, forth
            )
            return output
        pieces = mixer([s.reshape(-1, damage.segment, *s.shape[2:]) for s in streams])
        return _choose(wrong, pieces.reshape(batch, length, *pieces.shape[2:]), mixer(streams))
    cut = damage.cut
    if not 0 < cut < length:
        raise ValueError(f"cut {cut} is not inside the length {length}")
    if damage.mode == "lose":
        after = mixer([s[:, cut:].contiguous() for s in streams])
    else:
        after = mixer([torch.cat([s[:, :cut].roll(1, 0), s[:, cut:]], 1) for s in streams])[:, cut:]
    sound = mixer(streams)
    return _choose(wrong, torch.cat([sound[:, :cut], after], 1), sound)


def _choose(wrong: Tensor, bad: Tensor, sound: Tensor) -> Tensor:
    return torch.where(wrong[:, None, :, None], bad, sound)
