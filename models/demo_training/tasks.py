# SPDX-License-Identifier: Apache-2.0
"""Generated tasks whose answers stand in the context: recall, copying, and addition.

All of them are drawn on one device from one generator, so a seed fixes the prompts. Measurement draws on the
CPU, which gives the same prompts whatever engine answers them.

    recall   <kv> for = use ; with = 3 ; for ? use        `?` asks for the latest value, keys may change
             <kv> for = use ; with = 3 ; for ! use        `!` asks for a key that never changes
    copy     <copy> passage … <to> passage
    addition  23 + 45 = 68 ;
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.demo_training.config import BOS
from models.demo_training.shares import KEY_CLASSES
from models.demo_training.tokenizer import Vocabulary

MAX_KEYS = 128
"""Most different keys in one context."""
VALUES = 256
"""Different values; a value's place among them is its code, whose bits `shares` deals out to the layers."""
OPERATORS = ("?", "!")
COPY_LENGTHS = (8, 16, 32, 64, 128, 256)
COPY_GAPS = (0, 0, 64, 256, 1024)
SPARSE_STRIDES = (8, 16, 16, 32)
TEXT_WEIGHT = 0.02
"""Loss weight of the text between sparse records. A record's answer weighs 1, and there are few of them."""


@dataclass
class Batch:
    """Rows of one length. All tensors are [B, T]."""

    ids: Tensor
    weight: Tensor
    """Loss weight of each token as a target."""
    answer: Tensor
    """True where the token is an answer to be measured."""
    source: Tensor
    """Where the answer stood last before the question, −1 where there is none."""
    share: Tensor
    """Which row of the ownership table an answer of recall belongs to (see `shares`), −1 where there is none."""

    @staticmethod
    def join(batches: list[Batch]) -> Batch:
        """Stack batches of one length."""
        fields = zip(*(b.fields() for b in batches), strict=True)
        return Batch(*(torch.cat(parts) for parts in fields))

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(t.to(device) for t in self.fields()))

    def fields(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors in order."""
        return self.ids, self.weight, self.answer, self.source, self.share

    def rows(self, order: Tensor) -> Batch:
        """The rows that `order` [N] picks."""
        return Batch(*(t[order] for t in self.fields()))


class Tasks:
    """Draws batches on `device` from `seed`; `filler` is free text as token ids [N]."""

    def __init__(self, vocabulary: Vocabulary, filler: Tensor, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.special, self.symbols = vocabulary.special, vocabulary.symbols
        self.words = torch.tensor(vocabulary.words, device=device)
        self.numbers = torch.tensor(vocabulary.numbers, device=device)
        self.values = torch.cat([self.words[: VALUES - 100], self.numbers[:100]])
        self.code = torch.full((vocabulary.size,), -1, device=device)
        self.code[self.values] = self.range_of(len(self.values))
        self.key_class = torch.zeros(vocabulary.size, dtype=torch.long, device=device)
        self.key_class[self.words] = self.range_of(len(self.words)) % KEY_CLASSES
        self.filler = filler.to(device)
        self.range = torch.arange(1 << 15, device=device)

    def range_of(self, count: int) -> Tensor:
        """0 … count−1."""
        return torch.arange(count, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform draws in [0, 1)."""
        return torch.rand(*shape, device=self.device, generator=self.generator)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Uniform integers in [0, high)."""
        return (self.uniform(*shape) * high).long().clamp_(max=high - 1)

    def one_of(self, choices: tuple[int, ...]) -> int:
        """One uniform choice."""
        return choices[int(self.integers(len(choices), 1))]

    def text(self, batch: int, length: int) -> Tensor:
        """Windows of the filler text [B, T]."""
        start = self.integers(len(self.filler) - length - 1, batch, 1)
        return self.filler[start + self.range[:length]].clone()

    def prose(self, batch: int, length: int) -> Batch:
        """Plain text, every token a target."""
        ids = self.text(batch, length)
        ids[:, 0] = BOS
        nothing = torch.zeros_like(ids, dtype=torch.bool)
        none = torch.full_like(ids, -1)
        return Batch(ids, torch.full(ids.shape, 0.3, device=self.device), nothing, none, none)

    def recall(
        self,
        batch: int,
        length: int,
        key_words: int = 1,
        stride: int | None = None,
        asked: float = 0.5,
        operator: str | None = None,
        max_keys: int = MAX_KEYS,
    ) -> Batch:
        """Records `key = value ;` and questions `key ? value ;`, one every `stride` tokens, text between them.

        Half of the rows (or all, with `operator`) ask with `?`, and most of those change their keys' values.
        """
        size = key_words + 3
        stride = stride or size
        first = 2 + self.integers(16, batch, 1)  # so that a cut can fall on any part of a record
        count = (length - 18) // stride
        latest = self.uniform(batch, 1) < 0.5
        if operator is not None:
            latest = torch.full((batch, 1), operator == "?", device=self.device)
        ids = self.text(batch, length)
        ids[:, 0], ids[:, 1] = BOS, self.special["<kv>"]
        weight = torch.full(ids.shape, TEXT_WEIGHT if stride > size else 0.0, device=self.device)

        keys, key_id = self._keys(batch, count, key_words, max_keys)
        question, last, seen = self._history(key_id, asked)
        fresh = self.integers(len(self.values), batch, count)
        fixed = self.integers(len(self.values), batch, MAX_KEYS).gather(1, key_id)
        changes = (self.uniform(batch, 1) < 0.6) & latest
        value = torch.where(changes, fresh, fixed)
        value = torch.where(question, value.gather(1, last.clamp(min=0)), value)

        start = first + self.range[:count] * stride
        if stride > size:
            start = start + self.integers(stride - size + 1, batch, count)
        ask = torch.where(latest, self.symbols["?"], self.symbols["!"])
        middle = torch.where(question, ask, self.symbols["="])
        end = torch.full_like(middle, self.symbols[";"])
        record = torch.cat([keys, torch.stack([middle, self.values[value], end], -1)], -1)
        place = (start.unsqueeze(-1) + self.range[:size]).flatten(1)
        ids.scatter_(1, place, record.flatten(1))
        marks = torch.zeros(batch, count, size, device=self.device)
        marks[..., key_words + 1] = question.float()
        marks[..., key_words + 2] = 0.1
        weight.scatter_(1, place, marks.flatten(1))
        at = start + key_words + 1
        answer = torch.zeros_like(ids, dtype=torch.bool).scatter_(1, at, question)
        seen_at = torch.where(question, at.gather(1, seen.clamp(min=0)), -1)
        share = self.key_class[keys[..., 0]] + torch.where(latest, 0, KEY_CLASSES)
        share = torch.where(question, share, -1)
        none = torch.full_like(ids, -1)
        return Batch(ids, weight, answer, none.scatter(1, at, seen_at), none.scatter(1, at, share))

    def _history(self, key_id: Tensor, asked: float) -> tuple[Tensor, Tensor, Tensor]:
        """Which records are questions, and for each the latest assignment and the latest mention of its key.

        All [B, count]; only a key that was written before is asked for, and −1 stands where there is nothing.
        """
        count = key_id.shape[1]
        order = key_id.argsort(dim=1, stable=True)  # groups of one key, in order of appearance
        key = key_id.gather(1, order)
        new = torch.ones_like(key, dtype=torch.bool)
        new[:, 1:] = key[:, 1:] != key[:, :-1]
        asks = (self.uniform(*key.shape) < asked) & ~new
        # Groups ascend, so a running maximum over key·count + index stays inside its group.
        latest = (key * count + torch.where(asks, 0, order)).cummax(1).values
        before = torch.full_like(key, -1)
        before[:, 1:] = torch.where(new[:, 1:], -1, latest[:, :-1] - key[:, 1:] * count)
        mention = torch.full_like(key, -1)
        mention[:, 1:] = torch.where(new[:, 1:], -1, order[:, :-1])
        question = torch.zeros_like(asks).scatter_(1, order, asks)
        return (
            question,
            torch.zeros_like(key).scatter_(1, order, before),
            torch.zeros_like(key).scatter_(1, order, mention),
        )

    def _keys(self, batch: int, count: int, key_words: int, max_keys: int) -> tuple[Tensor, Tensor]:
        """Key tokens [B, count, key_words] and which key each record has [B, count]."""
        words = len(self.words)
        most = min(max(4, count // 2), words if key_words == 1 else max_keys, max_keys)
        fewest = min(4, most)
        spread: Tensor = fewest * (most / fewest) ** self.uniform(batch, 1)  # log-uniform number of keys
        key_id = (self.uniform(batch, count) * spread.long().clamp(fewest, most)).long()
        code = self.uniform(batch, words**key_words).topk(most, 1).indices.gather(1, key_id)
        if key_words == 1:
            return self.words[code].unsqueeze(-1), key_id
        return torch.stack([self.words[code // words], self.words[code % words]], -1), key_id

    def copy(self, batch: int, length: int, passage: int | None = None, gap: int | None = None) -> Batch:
        """Passages of random words or of text, and their copies after a gap of text."""
        size = min(passage or self.one_of(COPY_LENGTHS), (length - 4) // 2)
        between = self.one_of(COPY_GAPS) if gap is None else gap
        between = min(between, max(0, length - 4 - 2 * size))
        unit = 2 * size + 2 + between
        ids = self.text(batch, length)
        ids[:, 0] = BOS
        weight = torch.zeros(ids.shape, device=self.device)
        answer = torch.zeros_like(ids, dtype=torch.bool)
        source = torch.full_like(ids, -1)
        random_words = self.uniform(batch, 1) < 0.5
        for i in range(max(1, (length - 1) // unit)):
            start = 1 + i * unit
            drawn = self.values[self.integers(len(self.values), batch, size)]
            words = torch.where(random_words, drawn, ids[:, start + 1 : start + 1 + size])
            to = start + 1 + size + between
            ids[:, start], ids[:, to] = self.special["<copy>"], self.special["<to>"]
            ids[:, start + 1 : start + 1 + size] = words
            copied = slice(to + 1, to + 1 + size)
            ids[:, copied] = words
            weight[:, copied], answer[:, copied] = 0.5, True
            source[:, copied] = start + 1 + self.range[:size]
        return Batch(ids, weight, answer, source, torch.full_like(ids, -1))

    def addition(self, batch: int, length: int) -> Batch:
        """Sums of two numbers under 100, one after the other."""
        count = (length - 1) // 6
        a, b = self.integers(100, batch, count), self.integers(100, batch, count)
        plus, equal, end = (torch.full_like(a, self.symbols[s]) for s in "+=;")
        sums = torch.stack([self.numbers[a], plus, self.numbers[b], equal, self.numbers[a + b], end], -1)
        ids = torch.full((batch, length), self.symbols[";"], device=self.device)
        ids[:, 0] = BOS
        ids[:, 1 : 1 + 6 * count] = sums.flatten(1)
        weight = torch.zeros(ids.shape, device=self.device)
        answer = torch.zeros_like(ids, dtype=torch.bool)
        place = 1 + self.range[:count] * 6 + 4
        weight[:, place], weight[:, place + 1], answer[:, place] = 1.0, 0.1, True
        none = torch.full_like(ids, -1)
        return Batch(ids, weight, answer, none, none)
