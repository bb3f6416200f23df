# SPDX-License-Identifier: Apache-2.0
"""Losses of the text model, of its damaged rows and of the MTP head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.demo_training.config import DemoConfig
from models.demo_training.mixture import DamagedBatch
from models.demo_training.model import DemoModel, MtpHead, Output
from models.demo_training.shares import BITS, KEY_CLASSES, owners
from models.demo_training.tasks import Batch, Tasks

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


def hedged(logits: Tensor, answer: Tensor, unknown: Tensor, values: Tensor) -> Tensor:
    """Cross-entropy [N] against all values that agree with the answer in its known bits, each as likely.

    logits [N, V]; `answer` [N] codes, `unknown` [N] bit masks, `values` [256] the token of each code. It is not
    enough to doubt: what the other parts of the state own must still be answered.
    """
    chance = logits.float().log_softmax(-1)[:, values]
    codes = torch.arange(len(values), device=logits.device)
    agree = (((codes ^ answer[:, None]) & ~unknown[:, None]) == 0).float()
    return -(chance * agree).sum(-1) / agree.sum(-1)


def damaged_loss(
    model: DemoModel, work: DamagedBatch, tasks: Tasks, doubt: float, hedge: float
) -> tuple[Tensor, Tensor]:
    """Sound rows must answer; rows that lost memory must doubt; rows with swapped memory must hedge.

    Returns the loss and a number for the log: the share of answers still sure (lost) or the mean excess of the
    cross-entropy over its least value (swapped). Without the second parts a model of this size stores everything
    twice, and a lost or swapped layer changes nothing.
    """
    batch = work.batch
    logits = model(batch.ids, work.damage).logits
    sound = weighted(token_losses(logits, batch.ids), batch.weight * (work.limit >= 1.0)[:, None])
    touched = work.touched() & (work.limit < 1.0)[:, None]
    swapped = work.damage.mode == "swap"
    bits = work.unknown.gather(1, batch.share.clamp(min=0))
    if swapped:
        touched &= (batch.share >= 0) & (bits > 0)
    row, place = touched[:, 1:].nonzero(as_tuple=True)
    if not len(row):
        return sound, torch.zeros((), device=batch.ids.device)
    answer = batch.ids[row, place + 1]
    # A handoff loses state right before the question: such answers are few among the segments and count more.
    weight = torch.where(place % work.damage.segment < 2, NEAR_WEIGHT, 1.0)
    if swapped:
        mask = bits[row, place + 1]
        losses = hedged(logits[row, place], tasks.code[answer], mask, tasks.values)
        least = math.log(2) * sum((mask >> bit) & 1 for bit in range(BITS)).float()
        excess = (losses.detach() - least).mean()
        return sound + hedge * (losses * weight).sum() / weight.sum(), excess
    losses = unlikelihood(logits[row, place], answer, work.limit[row])
    sure = (weight * (losses.detach() > 0)).sum()
    value = (losses * weight).sum() / (sure + 0.2 * weight.sum())
    return sound + doubt * value, (losses > 0).float().mean().detach()


class Probes(nn.Module):
    """Linear readers, for training only, of the bits that each part of the state owns."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.kda_head_dim if config.is_kda(i) else config.value_dim for i in range(config.layers)]
        # One reader a head; the heads of an MLA layer are read together.
        self.readers = nn.ParameterList(torch.zeros(config.heads, width, BITS) for width in widths)
        heads = torch.full((config.layers, 2 * KEY_CLASSES, config.heads), False)
        masks = torch.zeros(config.layers, 2 * KEY_CLASSES, BITS)
        for owner in owners(config):
            heads[owner.layer, owner.share, slice(None) if owner.head is None else owner.head] = True
            for bit in range(BITS):
                masks[owner.layer, owner.share, bit] = float(owner.bits >> bit & 1)
        self.heads: Tensor
        self.masks: Tensor
        self.register_buffer("heads", heads)
        self.register_buffer("masks", masks)

    def forward(self, batch: Batch, output: Output, tasks: Tasks, most: int = 4096) -> tuple[Tensor, Tensor]:
        """The mean binary cross-entropy of the owned bits, and the share of them read right."""
        row, place = (batch.share[:, 1:] >= 0).nonzero(as_tuple=True)
        if len(row) > most:
            chosen = tasks.integers(len(row), most)
            row, place = row[chosen], place[chosen]
        share = batch.share[row, place + 1]
        code = tasks.code[batch.ids[row, place + 1]]
        bits = (code[:, None] >> torch.arange(BITS, device=code.device)) & 1
        loss = right = count = torch.zeros((), device=code.device)
        for layer, read in enumerate(output.reads):
            picked = read[row * batch.ids.shape[1] + place].float() * self.heads[layer, share].unsqueeze(-1)
            logits = torch.einsum("nhd,hdb->nb", picked, self.readers[layer].float())
            mask = self.masks[layer, share]
            cost = F.binary_cross_entropy_with_logits(logits, bits.float(), reduction="none")
            loss = loss + (cost * mask).sum()
            right = right + (((logits > 0) == (bits > 0)) * mask).sum()
            count = count + mask.sum()
        return loss / count.clamp(min=1), (right / count.clamp(min=1)).detach()


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
