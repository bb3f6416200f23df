# SPDX-License-Identifier: Apache-2.0
"""A model small enough for Python whose every answer depends on every byte of its state.

KDA layers follow the recurrence of the real ones (causal convolution of width 4 over raw q | k | v, normalised q and
k, log decay a key channel, delta rule), MLA layers keep one row a token, which also depends on the recurrent state. The
next token is a hash over all recurrent states, all convolution columns and all rows: one wrong bit anywhere, one
missing row, one token too many, and the answer is another one. All arithmetic is element-wise or over the axes of one
head, so that results do not depend on how heads are divided among ranks, nor on where a prompt is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

Floats = NDArray[np.float32]

KDA_LAYERS, MLA_LAYERS = (0, 1, 3, 4), (2, 5)
HEAD_K, HEAD_V, CONV_WIDTH, ROW_WIDTH = 4, 3, 4, 6
CHANNELS = 2 * HEAD_K + HEAD_V
FIRST_TOKEN, VOCABULARY = 3, 997


@dataclass
class State:
    """State of one sequence after `length` tokens, all heads."""

    recurrent: Floats
    """[KDA layers, heads, V, K]"""
    conv: Floats
    """[KDA layers, heads, W-1, q | k | v channels], raw columns, oldest first."""
    rows: Floats
    """[MLA layers, length, width]"""

    @property
    def length(self) -> int:
        return int(self.rows.shape[1])

    def equals(self, other: State) -> bool:
        """Bit for bit."""
        return all(
            mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
            for mine, theirs in (
                (self.recurrent, other.recurrent),
                (self.conv, other.conv),
                (self.rows, other.rows),
            )
        )


class ToyModel:
    """Weights for a number of heads; the same for every layout."""

    def __init__(self, heads: int = 8, seed: int = 7) -> None:
        rng = np.random.default_rng(seed)
        self.heads = heads
        layers, table = len(KDA_LAYERS), 64

        def normal(*shape: int) -> Floats:
            return rng.standard_normal(shape).astype(np.float32)

        self._raw = normal(table, layers, heads, CHANNELS)
        self._kernel = normal(layers, heads, CONV_WIDTH, CHANNELS) * np.float32(0.5)
        self._decay = -np.abs(normal(table, layers, heads, HEAD_K)) * np.float32(0.1)
        self._beta = (1 / (1 + np.exp(-normal(table, layers, heads, 1)))).astype(np.float32)
        self._row = np.float32(1.5) + np.abs(normal(table, len(MLA_LAYERS), ROW_WIDTH))
        self._mix = normal(layers, heads, HEAD_V)

    def empty(self) -> State:
        """The state before the first token."""
        layers = len(KDA_LAYERS)
        return State(
            np.zeros((layers, self.heads, HEAD_V, HEAD_K), np.float32),
            np.zeros((layers, self.heads, CONV_WIDTH - 1, CHANNELS), np.float32),
            np.zeros((len(MLA_LAYERS), 0, ROW_WIDTH), np.float32),
        )

    def advance(
        self, recurrent: Floats, conv: Floats, tokens: Sequence[int]
    ) -> tuple[Floats, Floats, Floats]:
        """(recurrent, conv, rows of these tokens [MLA layers, tokens, width]) after `tokens`."""
        rows = []
        for token in tokens:
            at = token % len(self._raw)
            window = np.concatenate((conv, self._raw[at][:, :, None]), axis=2)
            mixed = (window * self._kernel).sum(axis=2)
            mixed = mixed / (1 + np.exp(-mixed))
            q, k, v = np.split(mixed, (HEAD_K, 2 * HEAD_K), axis=-1)
            q = q / np.sqrt((q * q).sum(axis=-1, keepdims=True) + np.float32(1e-6))
            k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + np.float32(1e-6))
            recurrent = recurrent * np.exp(self._decay[at])[:, :, None, :]
            update = self._beta[at] * (v - (recurrent * k[:, :, None, :]).sum(axis=-1))
            recurrent = recurrent + update[..., None] * k[:, :, None, :]
            out = (recurrent * q[:, :, None, :]).sum(axis=-1)
            conv = window[:, :, 1:]
            rows.append(self._row[at] + np.tanh((out * self._mix).sum()) * np.float32(0.25))
        stacked = np.stack(rows, axis=1) if rows else np.zeros((len(MLA_LAYERS), 0, ROW_WIDTH), np.float32)
        return recurrent.astype(np.float32), np.ascontiguousarray(conv), stacked.astype(np.float32)

    def after(self, tokens: Sequence[int]) -> State:
        """The state after `tokens`, computed in one go, without a cache."""
        start = self.empty()
        return State(*self.advance(start.recurrent, start.conv, tokens))

    @staticmethod
    def next_token(state: State) -> int:
        """The greedy token after this state."""
        digest = xxhash.xxh3_64()
        for part in (state.recurrent, state.conv, state.rows):
            digest.update(np.ascontiguousarray(part).tobytes())
        return FIRST_TOKEN + digest.intdigest() % (VOCABULARY - FIRST_TOKEN)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """What one engine would answer: `count` tokens."""
        state = self.after(prompt)
        tokens: list[int] = []
        while True:
            tokens.append(self.next_token(state))
            if len(tokens) == count:
                return tokens
            recurrent, conv, row = self.advance(state.recurrent, state.conv, tokens[-1:])
            state = State(recurrent, conv, np.concatenate((state.rows, row), axis=1))
