# SPDX-License-Identifier: Apache-2.0
"""What a training step sees: ordinary batches of every skill, and batches with damaged memories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.demo_training import shares
from models.demo_training.config import DemoConfig
from models.demo_training.damage import Damage
from models.demo_training.dialogue import Dialogues
from models.demo_training.shares import KEY_CLASSES
from models.demo_training.tasks import MAX_KEYS, SPARSE_STRIDES, Batch, Tasks

SHARES = {
    "one_word": 0.13, "two_words": 0.18, "sparse": 0.20, "copy": 0.15, "addition": 0.09, "chat": 0.19, "text": 0.06,
}  # fmt: skip
LONG_SHARES = {
    "one_word": 0.14, "two_words": 0.22, "sparse": 0.38, "copy": 0.12, "addition": 0.04, "chat": 0.06, "text": 0.04,
}  # fmt: skip
"""Shares in rows of 4,096 tokens and more, where sparse recall is the hardest skill."""
RECALL_SHARES = {"one_word": 0.35, "two_words": 0.35, "sparse": 0.30}
SEGMENTS = (32, 64, 128, 256)
PART_LIMIT, WHOLE_LIMIT = 0.3, 0.1
"""Highest probability that an answer may keep when a part (a layer, a head) or all of a memory is wrong."""
SWAP_SHARE = 0.75
"""Share of damaged steps that swap memories; the others lose them, which a model notices far more easily."""
PARTS_AT_ONCE = 3
"""Damaged parts in one step, each in its own rows."""


def lengths(progress: float, longest: int) -> tuple[int, ...]:
    """Row lengths to draw from at a share `progress` of the run: short rows first."""
    if progress < 0.08:
        stage: tuple[int, ...] = (256,)
    elif progress < 0.16:
        stage = (256, 512)
    elif progress < 0.3:
        stage = (512, 1024)
    elif progress < 0.5:
        stage = (1024, 2048)
    else:
        stage = (1024, 2048, 4096, 8192, 8192)
    return tuple(n for n in stage if n <= longest) or (longest,)


@dataclass
class DamagedBatch:
    """A recall batch and the damage of each row."""

    batch: Batch
    damage: Damage
    limit: Tensor
    """The probability that a row's answers may keep [B]; 1 in sound rows."""
    unknown: Tensor
    """The bits of an answer that a swap leaves unknown [B, rows of the ownership table]."""

    def touched(self) -> Tensor:
        """Answers [B, T] whose value stood last before the damage."""
        segment = self.damage.segment
        place = torch.arange(self.batch.ids.shape[1], device=self.limit.device)
        before = self.batch.source // segment < place // segment
        return self.batch.answer & (self.batch.source >= 0) & before


class Part(NamedTuple):
    """A damaged part of the memory: layers, and heads of the KDA layers among them."""

    layers: tuple[int, ...]
    heads: slice
    single: bool = True
    """One layer or one head, not a whole memory."""


class Mixture:
    """Draws training batches."""

    def __init__(self, config: DemoConfig, tasks: Tasks, dialogues: Dialogues) -> None:
        self.config, self.tasks, self.dialogues = config, tasks, dialogues

    def ordinary(self, rows: int, length: int, progress: float) -> tuple[Batch, list[tuple[str, int]]]:
        """A batch of all skills and how many rows each skill has, in order."""
        counts = self._counts(rows, LONG_SHARES if length >= 4096 else SHARES)
        return Batch.join([self._skill(n, k, length, progress) for n, k in counts]), counts

    def damaged(self, rows: int, length: int, progress: float) -> DamagedBatch:
        """Recall rows, three quarters of them with one of a few damaged parts of the memory."""
        counts = self._counts(rows, RECALL_SHARES)
        batch = Batch.join([self._skill(n, k, length, progress) for n, k in counts])
        order = self.tasks.uniform(rows).argsort()
        batch = batch.rows(order)
        segment = self.tasks.one_of(tuple(s for s in SEGMENTS if s <= length // 4))
        mode = "swap" if float(self.tasks.uniform(1)) < SWAP_SHARE else "lose"
        damage = Damage(mode, segment=segment)
        limit = torch.ones(rows, device=self.tasks.device)
        unknown = torch.zeros(rows, 2 * KEY_CLASSES, dtype=torch.long, device=self.tasks.device)
        parts = self._parts()
        picked = self.tasks.uniform(len(parts)).argsort()[:PARTS_AT_ONCE].tolist()
        sound = rows // 4  # rows are in random order, so any quarter may be the sound one
        for group, choice in enumerate(picked):
            part, one = parts[choice], slice(sound + group, rows, PARTS_AT_ONCE)
            limit[one] = PART_LIMIT if part.single else WHOLE_LIMIT
            heads = range(self.config.heads)[part.heads]
            masks = shares.unknown(self.config, part.layers, heads)
            unknown[one] = torch.tensor(masks, device=self.tasks.device)
            for i in part.layers:
                if self.config.is_kda(i):
                    blank = torch.zeros(rows, self.config.heads, dtype=torch.bool, device=self.tasks.device)
                    damage.kda.setdefault(i, blank)[one, part.heads] = True
                else:
                    blank = torch.zeros(rows, dtype=torch.bool, device=self.tasks.device)
                    damage.mla.setdefault(i, blank)[one] = True
        return DamagedBatch(batch, damage, limit, unknown)

    def _parts(self) -> list[Part]:
        """What can be damaged: every layer, every head's shard of all KDA layers, all KDA, all MLA."""
        config, every = self.config, slice(None)
        found = [Part((i,), every) for i in range(config.layers)]
        found += [Part(tuple(config.kda_layers), slice(h, h + 1)) for h in range(config.heads)]
        return [
            *found,
            Part(tuple(config.kda_layers), every, single=False),
            Part(tuple(config.mla_layers), every, single=False),
        ]

    def _counts(self, rows: int, shares: dict[str, float]) -> list[tuple[str, int]]:
        """Whole rows for each skill; what is left over is drawn by the fractions."""
        wanted = {name: share * rows for name, share in shares.items()}
        counts = {name: int(value) for name, value in wanted.items()}
        left = rows - sum(counts.values())
        if left:
            fractions = torch.tensor([wanted[n] - counts[n] + 1e-6 for n in shares])
            lots = self.tasks.uniform(left).cpu() * fractions.sum()
            picks = torch.bucketize(lots, fractions.cumsum(0)).clamp(max=len(shares) - 1)
            for i in picks.tolist():
                counts[list(shares)[i]] += 1
        return [(name, count) for name, count in counts.items() if count]

    def _skill(self, name: str, rows: int, length: int, progress: float) -> Batch:
        # Few keys and short passages first.
        most = MAX_KEYS if progress >= 0.15 else int(8 + 200 * progress / 0.15)
        tasks = self.tasks
        if name == "one_word":
            return tasks.recall(rows, length, 1, max_keys=most)
        if name == "two_words":
            return tasks.recall(rows, length, 2, max_keys=most)
        if name == "sparse":
            stride = tasks.one_of(SPARSE_STRIDES)
            return tasks.recall(rows, length, tasks.one_of((1, 2)), stride, 0.6, max_keys=most)
        if name == "copy":
            return tasks.copy(rows, length, tasks.one_of((8, 16, 32)) if progress < 0.15 else None)
        if name == "addition":
            return tasks.addition(rows, length)
        if name == "chat":
            return self.dialogues.draw(rows, length)
        return tasks.prose(rows, length)
