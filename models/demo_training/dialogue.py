# SPDX-License-Identifier: Apache-2.0
"""Conversations as token batches for training."""

from __future__ import annotations

from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.demo_training import chat
from models.demo_training.tasks import Batch

USER_WEIGHT, ASSISTANT_WEIGHT, FIRST_WEIGHT = 0.02, 0.5, 1.5
"""Loss weights of what a user wrote, of what the assistant wrote, and of the first token of its answer."""


class Dialogues:
    """A pool of tokenized conversations on a device; rows are windows that start with a conversation."""

    def __init__(self, tokenizer: Tokenizer, count: int, device: torch.device, seed: int) -> None:
        rng = Random(seed)
        texts = [chat.conversation(rng).text() for _ in range(count)]
        vocab = tokenizer.get_vocab()
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = torch.tensor([i for e in encoded for i in e.ids])
        lengths = torch.tensor([len(e.ids) for e in encoded])
        self.device = device
        self.ids = ids.to(device)
        self.weight = speaker_weights(ids, vocab["<assistant>"], vocab["<eos>"]).to(device)
        self.starts = (lengths.cumsum(0) - lengths).to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def draw(self, batch: int, length: int) -> Batch:
        """Rows of several conversations one after the other; each starts with `<bos>`."""
        usable = int((self.starts < len(self.ids) - length).sum())
        drawn = torch.rand(batch, 1, device=self.device, generator=self.generator) * usable
        place = self.starts[drawn.long()] + torch.arange(length, device=self.device)
        ids, weight = self.ids[place], self.weight[place]
        none = torch.full_like(ids, -1)
        return Batch(ids, weight, weight >= ASSISTANT_WEIGHT, none, none)


def speaker_weights(ids: Tensor, assistant: int, end: int) -> Tensor:
    """The weight of each token of conversations; ids [N]. An answer includes the end of its turn."""
    weights = []
    current = USER_WEIGHT
    for token in ids.tolist():
        weights.append(current)
        if token == assistant:
            current = FIRST_WEIGHT
        elif token == end:
            current = USER_WEIGHT
        elif current == FIRST_WEIGHT:
            current = ASSISTANT_WEIGHT
    return torch.tensor(weights)
