# SPDX-License-Identifier: Apache-2.0
"""The measured prompts. A seed fixes them, whatever engine answers and on whatever machine.

Everything is drawn on the CPU; the free text in them is generated (no file of the machine enters). The first n
cases of a kind are the same for every requested number of cases.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.demo_training import chat
from models.demo_training.config import BOS
from models.demo_training.questions import TOPICS
from models.demo_training.tasks import Batch, Tasks
from models.demo_training.tokenizer import Vocabulary, encode

PER_ROW = 8
"""Questions taken from one context (its last ones), each with its own prompt."""
ROWS = 4
"""Contexts drawn at a time."""
RECALL = {
    f"{name} {operator}": (words, stride, operator)
    for name, words, stride in (("one-word keys", 1, None), ("two-word keys", 2, None), ("sparse", 1, 16))
    for operator in ("?", "!")
}
"""Kinds of recall: words in a key, tokens from record to record, operator."""
COPIED = 64


@dataclass(frozen=True)
class Case:
    """`tokens[:start]` is the prompt and `tokens[start:stop]` the right answer; cases may share `tokens`."""

    kind: str
    tokens: tuple[int, ...]
    start: int
    stop: int

    @property
    def prompt(self) -> list[int]:
        """Prompt token ids."""
        return list(self.tokens[: self.start])

    @property
    def answer_id(self) -> int:
        """The answer's first token id."""
        return self.tokens[self.start]

    @property
    def answer(self) -> list[int]:
        """The right answer's token ids."""
        return list(self.tokens[self.start : self.stop])


class CaseMaker:
    """Makes the cases of every kind for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary, seed: int = 7) -> None:
        self.tokenizer, self.vocabulary, self.seed = tokenizer, vocabulary, seed
        rng = Random(seed)
        spoken = " ".join(chat.plain(chat.conversation(rng)) for _ in range(4000))
        self.filler = torch.tensor(encode(tokenizer, spoken))

    def tasks(self, name: str) -> Tasks:
        """A fresh source of draws for the kind `name`."""
        seed = zlib.crc32(f"{self.seed}/{name}".encode())
        return Tasks(self.vocabulary, self.filler, torch.device("cpu"), seed)

    def recall(self, kind: str, length: int, count: int) -> list[Case]:
        """`count` questions of one of the `RECALL` kinds in contexts of about `length` tokens."""
        words, stride, operator = RECALL[kind]
        tasks = self.tasks(f"{kind} {length}")
        cases: list[Case] = []
        while len(cases) < count:
            batch = tasks.recall(ROWS, length, words, stride, 0.6 if stride else 0.5, operator)
            for tokens, places in _rows(batch):
                cases += [Case(f"recall, {kind}", tokens, p, p + 1) for p in places[-PER_ROW:]]
        return cases[:count]

    def handoffs(self, kind: str, length: int, count: int, margin: int = 64) -> list[Case]:
        """Prompts of exactly `length` tokens whose last token is a question.

        The value asked for stood last at least `margin` tokens before the end.
        """
        words, stride, operator = RECALL[kind]
        tasks = self.tasks(f"handoff {kind} {length}")
        head = (BOS, self.vocabulary.special["<kv>"])
        cases: list[Case] = []
        while len(cases) < count:
            batch = tasks.recall(ROWS, length + 96, words, stride, 0.6 if stride else 0.5, operator)
            for row, (tokens, places) in enumerate(_rows(batch)):
                for p in reversed(places):
                    first = p - length + 2  # the first token kept after the head
                    source = int(batch.source[row, p])
                    if p >= length and first + words + 1 < source < p - margin:
                        kept = head + tokens[first : p + 1]
                        cases.append(Case(f"recall, {kind}", kept, length, length + 1))
                        break
        return cases[:count]

    def copies(self, length: int, count: int) -> list[Case]:
        """Copy a passage of 64 tokens that ended a quarter of the context earlier."""
        tasks = self.tasks(f"copy {length}")
        cases: list[Case] = []
        while len(cases) < count:
            batch = tasks.copy(ROWS, length, COPIED, min(256, length // 4))
            for tokens, places in _rows(batch):
                cases.append(Case(f"copy {COPIED} tokens", tokens, places[-COPIED], places[-1] + 1))
        return cases[:count]

    def additions(self, count: int) -> list[Case]:
        """Sums of two numbers under 100."""
        tasks = self.tasks("addition")
        cases: list[Case] = []
        while len(cases) < count:
            for tokens, places in _rows(tasks.addition(ROWS, 6 * PER_ROW + 1)):
                cases += [Case("addition", tokens, p, p + 1) for p in places]
        return cases[:count]

    def questions(self, new: bool) -> list[Case]:
        """Every question about deltaserve in its first phrasing, or in the phrasing that training left out."""
        kind = "README, new phrasing" if new else "README, known phrasing"
        talks = [chat.Turn(t.phrasings[-1 if new else 0], t.answer) for t in TOPICS]
        return [case for turn in talks for case in self._turns(kind, chat.Conversation([turn]))]

    def conversations(self, count: int) -> list[list[Case]]:
        """Conversations of three turns, one case a turn; the right answers of earlier turns are in the prompt."""
        rng = Random(self.seed + 1)
        return [self._turns("conversation, 3 turns", chat.three_turns(rng)) for _ in range(count)]

    def _turns(self, kind: str, talk: chat.Conversation) -> list[Case]:
        tokens = tuple(encode(self.tokenizer, talk.text()))
        speaks = self.vocabulary.special["<assistant>"]
        ends = self.vocabulary.special["<eos>"]
        starts = [i + 1 for i, token in enumerate(tokens) if token == speaks]
        return [Case(kind, tokens, s, tokens.index(ends, s) + 1) for s in starts]


def _rows(batch: Batch) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Each row's tokens and the places of its answers."""
    for ids, answer in zip(batch.ids, batch.answer, strict=True):
        yield tuple(ids.tolist()), _places(answer)


def _places(mask: Tensor) -> list[int]:
    places: list[int] = mask.nonzero().flatten().tolist()
    return places
