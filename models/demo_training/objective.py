# SPDX-License-Identifier: Apache-2.0
"""Losses of the text model, of its damaged rows and of the MTP head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from models.demo_training.mixture import DamagedBatch
from models.demo_training.model import DemoModel, MtpHead, Output
from models.demo_training.tasks import Batch

NEAR_WEIGHT = 8.0
"""Weight of damaged answers whose question is the first or second token after the cut."""


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy [B, T−1] of each next token; logits [B, T, V], ids [B, T]."""
    flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="none").view(ids.shape[0], -1)


def weighted(losses: Tensor, weight: Tensor) -> Tensor:
    """Mean of `losses` [B, T−1] under the weight of their targets [B, T]."""
    w = weight[:, 1:]
    return (losses * w).sum() / w.sum().clamp(min=1e-6)


def unlikelihood(logits: Tensor, target: Tensor, limit: Tensor) -> Tensor:
    """−log(1 − p(target)) where p exceeds `limit`, else 0; logits [N, V], target and limit [N].

    Its gradient on the target's logit is p itself, so it also moves answers that are certain, where the
    gradient of log p vanishes.
    """
    wide = logits.float()
    total = wide.logsumexp(-1)
    others = wide.scatter(1, target[:, None], float("-inf")).logsumexp(-1)
    chance = (wide.gather(1, target[:, None]).squeeze(1) - total).exp().detach()
    return torch.where(chance > limit, total - others, 0.0)


def damaged_loss(model: DemoModel, work: DamagedBatch, strength: float) -> tuple[Tensor, Tensor]:
    """Sound rows must answer; damaged rows must doubt. Returns the loss and the share of answers still sure.

    `strength` weighs the second part. Without it a model of this size stores everything twice, and a lost layer
    changes nothing.
    """
    batch = work.batch
    logits = model(batch.ids, work.damage).logits
    sound = weighted(token_losses(logits, batch.ids), batch.weight * (work.limit >= 1.0)[:, None])
    touched = work.touched() & (work.limit < 1.0)[:, None]
    row, place = touched[:, 1:].nonzero(as_tuple=True)
    if not len(row):
        return sound, torch.zeros((), device=batch.ids.device)
    losses = unlikelihood(logits[row, place], batch.ids[row, place + 1], work.limit[row])
    # A handoff loses state right before the question: such answers are few among the segments and count more.
    weight = torch.where(place % work.damage.segment < 2, NEAR_WEIGHT, 1.0)
    sure = (weight * (losses.detach() > 0)).sum()
    doubt = (losses * weight).sum() / (sure + 0.2 * weight.sum())
    return sound + strength * doubt, (losses > 0).float().mean().detach()


def draft_loss(head: MtpHead, text: DemoModel, batch: Batch, output: Output) -> tuple[Tensor, Tensor]:
    """The head learns what the text model itself would say next; returns the loss and the agreement.

    Agreement is the share of weighted positions where the draft's first choice is the text model's.
    """
    logits = head(text, batch.ids, output.hidden).logits[:, :-1]  # for tokens 2 … T−1
    said = output.logits[:, 1:-1].detach().argmax(-1)
    losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), said.reshape(-1), reduction="none")
    weight = (batch.weight[:, 2:] + 0.05).reshape(-1)
    loss = (losses * weight).sum() / weight.sum()
    hit = (logits.argmax(-1) == said).float().reshape(-1)
    return loss, ((hit * weight).sum() / weight.sum()).detach()
