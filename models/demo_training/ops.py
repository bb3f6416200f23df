# SPDX-License-Identifier: Apache-2.0
"""Element-wise pieces of the model. On a GPU `compile_all` fuses each of them; on a CPU they run as written.

Every function computes in float32 and returns the input's dtype unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Op = Callable[..., Tensor]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _situ(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    bounded = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * bounded).to(x.dtype)


def _short_conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    wide = x.float()
    size = weight.shape[1]
    y = wide * weight[:, size - 1]
    for back in range(1, size):
        shifted = F.pad(wide, (0, 0, back, 0))[: wide.shape[0]]
        y = y + torch.where(position >= back, shifted, 0.0) * weight[:, size - 1 - back]
    return F.silu(y).to(x.dtype)


def _gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    wide = o.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (normed * torch.sigmoid(gate.float())).to(gate.dtype)


def _residual_mix(sources: list[Tensor], score: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    if len(sources) == 1:
        mixed = sources[0].float()
    else:
        stacked = torch.stack([source.float() for source in sources], 1)
        logits = (stacked * score).sum(-1) * torch.rsqrt(stacked.pow(2).mean(-1) + eps)
        mixed = (logits.softmax(-1).unsqueeze(-1) * stacked).sum(1)
    if norm is not None:
        mixed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + eps) * norm.float()
    return mixed


_EAGER: dict[str, Op] = {
    "rms_norm": _rms_norm,
    "situ": _situ,
    "short_conv": _short_conv,
    "gated_norm": _gated_norm,
    "residual_mix": _residual_mix,
}
_active: dict[str, Op] = dict(_EAGER)


def compile_all() -> None:
    """Fuse every piece with torch.compile; each is compiled at its first call."""
    dynamo: Any = torch._dynamo
    dynamo.config.cache_size_limit = 64
    for name, function in _EAGER.items():
        _active[name] = torch.compile(function, dynamic=False)


def use_eager() -> None:
    """Go back to the plain functions."""
    _active.update(_EAGER)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, C] / rms(x) · weight [C]."""
    return _active["rms_norm"](x, weight, eps)


def situ(x: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU of x [N, 2C] = gate | up: β·tanh(g/β)·σ(g) · λ·tanh(u/λ), as K3's activation; returns [N, C]."""
    return _active["situ"](x, beta, linear_beta)


def short_conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution of x [N, C] with weight [C, size].

    `position` [N, 1] is each row's place in its own sequence: what lies before a sequence counts as zero.
    """
    return _active["short_conv"](x, weight, position)


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """rms_norm(o [N, H, D]) · weight [D] · σ(gate [N, H, D]), in gate's dtype."""
    return _active["gated_norm"](o, weight, gate, eps)


def residual_mix(sources: list[Tensor], score: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Attention over residual streams, each [N, C], with one learned query `score` [C]; float32 out.

    Scores are taken on the RMS-normalised streams; the result is RMS-normalised with `norm` [C] if given.
    """
    return _active["residual_mix"](sources, score, norm, eps)
