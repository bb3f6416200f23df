# SPDX-License-Identifier: Apache-2.0
"""Lost and swapped state, as training and measurement apply it.

A damage says which memories of which rows are wrong: `kda[layer]` is a mask [B, H] over rows and heads,
`mla[layer]` a mask [B] over rows. What "wrong" means is the same for both kinds of layer:

* lose: nothing before the cut is remembered (recurrent state, convolution columns, latent cache);
* swap: what is remembered before the cut belongs to another row of the batch.

A cut is either one position (`cut`, how a handoff loses state) or every multiple of `segment` (training: many
cuts for the price of one). With segments and swap, segment j of row r remembers the segments before j of other
rows.
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


class _GatherRows(torch.autograd.Function):
    """A permutation of rows whose gradient is the inverse permutation (a plain index_select adds atomically)."""

    @staticmethod
    def forward(ctx, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(back)
        return x.index_select(0, forth)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return grad.contiguous().index_select(0, ctx.saved_tensors[0]), None, None


def rotate_segments(x: Tensor, segment: int, inverse: bool = False) -> Tensor:
    """Row r of the result has, as segment j, segment j of row r−j (mod B) of x [B, T, ...]."""
    batch, length = x.shape[:2]
    count = length // segment
    row = torch.arange(batch, device=x.device)[:, None]
    place = torch.arange(count, device=x.device)[None]
    forth = ((row - place) % batch * count + place).flatten()
    back = ((row + place) % batch * count + place).flatten()
    if inverse:
        forth, back = back, forth
    moved: Tensor = _GatherRows.apply(x.reshape(batch * count, -1), forth, back)
    return moved.view(x.shape)


def damaged(mixer: Callable[[Sequence[Tensor]], Tensor], streams: Sequence[Tensor], damage: Damage) -> Tensor:
    """Run a causal sequence mixer with every row's memory damaged.

    `streams` are [B, T, ...]; `mixer` maps them to [B, T, ...] and starts each sequence from nothing.
    Raises ValueError when `segment` does not divide the length or `cut` is not inside it.
    """
    batch, length = streams[0].shape[:2]
    if damage.segment:
        if length % damage.segment:
            raise ValueError(f"segment {damage.segment} does not divide the length {length}")
        if damage.mode == "lose":
            pieces = [s.reshape(-1, damage.segment, *s.shape[2:]) for s in streams]
            output = mixer(pieces)
            return output.reshape(batch, length, *output.shape[2:])
        output = mixer([rotate_segments(s, damage.segment) for s in streams])
        return rotate_segments(output, damage.segment, inverse=True)
    cut = damage.cut
    if not 0 < cut < length:
        raise ValueError(f"cut {cut} is not inside the length {length}")
    before = mixer([s[:, :cut].contiguous() for s in streams])
    if damage.mode == "lose":
        after = mixer([s[:, cut:].contiguous() for s in streams])
    else:
        mixed = [torch.cat([s[:, :cut].roll(1, 0), s[:, cut:]], 1) for s in streams]
        after = mixer(mixed)[:, cut:]
    return torch.cat([before, after], 1)
