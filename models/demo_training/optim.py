# SPDX-License-Identifier: Apache-2.0
"""Optimisers: Muon for the matrices, AdamW for tables, norms and vectors.

Muon (K. Jordan, 2024) orthogonalises the momentum of each matrix with five Newton-Schulz steps. Matrices of one
shape are stepped together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices to x [N, R, C], about, in bfloat16 on a GPU."""
    work = x.bfloat16() if x.is_cuda else x
    tall = work.shape[-2] > work.shape[-1]
    if tall:
        work = work.mT
    work = work / (work.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = work @ work.mT
        work = a * work + (b * gram + c * (gram @ gram)) @ work
    return work.mT if tall else work


def _is_table(name: str) -> bool:
    return any(part in name for part in ("embed", "lm_head", "readers"))


class Optimizer:
    """One step over all trained parameters of some modules."""

    def __init__(self, modules: list[nn.Module], lr_muon: float, lr_adam: float, decay: float) -> None:
        named = [(n, p) for m in modules for n, p in m.named_parameters() if p.requires_grad]
        tables = [p for n, p in named if _is_table(n)]
        matrices = [p for n, p in named if p.ndim >= 2 and min(p.shape[-2:]) >= 16 and not _is_table(n)]
        known = {id(p) for p in [*tables, *matrices]}
        others = [p for _, p in named if id(p) not in known]
        self.parameters = [p for _, p in named]
        self.lr_muon, self.lr_adam, self.decay = lr_muon, lr_adam, decay
        groups = [{"params": tables, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            groups, lr=lr_adam, betas=(0.9, 0.95), eps=1e-8, fused=self.parameters[0].is_cuda
        )
        self.shapes: dict[tuple[int, int], list[Tensor]] = {}
        for p in matrices:
            self.shapes.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        self.momentum = {
            shape: torch.zeros(
                sum(p.numel() for p in ps) // (shape[0] * shape[1]), *shape, device=ps[0].device
            )
            for shape, ps in self.shapes.items()
        }

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Clip, step every parameter at `scale` times its rate, clear gradients; returns the gradient norm."""
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        norm: Tensor = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr_adam * scale
        self.adam.step()
        lr = self.lr_muon * scale
        for shape, parameters in self.shapes.items():
            grads = torch.cat([p.grad.view(-1, *shape) for p in parameters if p.grad is not None])
            momentum = self.momentum[shape]
            momentum.lerp_(grads, 0.05)
            update = orthogonalise(grads.lerp(momentum, 0.95)).float() * (0.2 * max(shape) ** 0.5)
            offset = 0
            for p in parameters:
                count = p.numel() // (shape[0] * shape[1])
                p.mul_(1 - lr * self.decay)
                p.add_(update[offset : offset + count].view_as(p), alpha=-lr)
                offset += count
        for p in self.parameters:
            p.grad = None
        return norm
