# SPDX-License-Identifier: Apache-2.0
"""What a training step sees: ordinary batches of every skill, and batches with damaged memories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.demo_training.config import DemoConfig
from models.demo_training.damage import Damage
from models.demo_training.dialogue import Dialogues
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


def lengths(progress: float, longest: int) -> tuple[int, ...]:
    """Row lengths to draw from at a share `progress` of the run: short rows first."""
    if progress < 0.08:
        stage: tuple[int, ...] = (256,)
    elif progress < 0.18:
        stage = (256, 512)
    elif progress < 0.35:
        stage = (512, 1024)
    elif progress < 0.6:
        stage = (1024, 2048)
    else:
        stage = (1024, 2048, 4096, 8192, 8192)
    return tuple(n for n in stage if n <= longest) or (longest,)


@dataclass
class DamagedBatch:
    """A recall batch, the damage of each row, and the probability that its answers may keep [B] (1: sound row)."""

    batch: Batch
    damage: Damage
    limit: Tensor

    def touched(self) -> Tensor:
        """Answers [B, T] whose value stood last before the damage."""
        segment = self.damage.segment
        place = torch.arange(self.batch.ids.shape[1], device=self.limit.device)
        before = self.batch.source // segment < place // segment
        return self.batch.answer & (self.batch.source >= 0) & before


class Mixture:
    """Draws training batches."""

    def __init__(self, config: DemoConfig, tasks: Tasks, dialogues: Dialogues) -> None:
        self.config, self.tasks, self.dialogues = config, tasks, dialogues

    def ordinary(self, rows: int, length: int, progress: float) -> tuple[Batch, list[tuple[str, int]]]:
        """A batch of all skills and how many rows each skill has, in order."""
        counts = self._counts(rows, LONG_SHARES if length >= 4096 else SHARES)
        return Batch.join([self._skill(n, k, length, progress) for n, k in counts]), counts

    def damaged(self, rows: int, length: int, progress: float) -> DamagedBatch:
        """Recall rows, three quarters of them with one damaged part of the memory."""
        counts = self._counts(rows, RECALL_SHARES)
        batch = Batch.join([self._skill(n, k, length, progress) for n, k in counts])
        order = self.tasks.uniform(rows).argsort()
        batch = Batch(*(t[order] for t in (batch.ids, batch.weight, batch.answer, batch.source)))
        segment = self.tasks.one_of(tuple(s for s in SEGMENTS if s <= length // 4))
        damage = Damage(("lose", "swap")[self.tasks.one_of((0, 1))], segment=segment)
        limit = torch.ones(rows, device=self.tasks.device)
        config, heads = self.config, self.config.heads
        for i in config.kda_layers:
            damage.kda[i] = torch.zeros(rows, heads, dtype=torch.bool, device=self.tasks.device)
        for i in config.mla_layers:
            damage.mla[i] = torch.zeros(rows, dtype=torch.bool, device=self.tasks.device)
        parts = len(config.kda_layers) + len(config.mla_layers) + heads
        # One row in four is sound; of the others one in eight loses all KDA and one in eight all MLA.
        choice = self.tasks.integers(parts, rows)
        lot = self.tasks.uniform(rows)
        whole_kda, whole_mla = (lot >= 0.25) & (lot < 0.345), (lot >= 0.345) & (lot < 0.44)
        part = lot >= 0.44
        for place, i in enumerate(config.kda_layers):
            damage.kda[i] |= (whole_kda | (part & (choice == place)))[:, None]
        for place, i in enumerate(config.mla_layers):
            damage.mla[i] |= whole_mla | (part & (choice == len(config.kda_layers) + place))
        for head in range(heads):
            shard = part & (choice == parts - heads + head)
            for i in config.kda_layers:
                damage.kda[i][:, head] |= shard
        limit[part] = PART_LIMIT
        limit[whole_kda | whole_mla] = WHOLE_LIMIT
        return DamagedBatch(batch, damage, limit)

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
