# SPDX-License-Identifier: Apache-2.0
"""The demonstration tokenizer: byte-level BPE with whole numbers, task markers and a chat template.

Numbers from 0 to 198 (with their leading space) are single tokens, so that sums and recalled values are one
token long. No other merge contains a digit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = (
    "<pad>", "<bos>", "<eos>", "<unk>", "<copy>", "<to>", "<kv>", "<text>", "<user>", "<assistant>", "<system>",
)  # fmt: skip
SYMBOLS = ("=", "?", "!", ";", "+", "with", "and")
NUMBERS = 199
KEY_WORDS = 256
CHAT_TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] | trim) + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_SPACE = "\u0120"  # how byte-level BPE writes a leading space


@dataclass(frozen=True)
class Vocabulary:
    """Token ids that the generated tasks are made of."""

    size: int
    special: dict[str, int]
    symbols: dict[str, int]
    numbers: tuple[int, ...]
    """Ids of " 0" to " 198"."""
    words: tuple[int, ...]
    """Ids of whole lower-case words with a leading space, used as keys and values."""


def build(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the tokenizer on `texts`; the result depends on nothing else.

    Raises ValueError when `vocab_size` cannot hold the bytes, the numbers and the markers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fixed = _number_merges() + [(_SPACE, symbol) for symbol in SYMBOLS if len(symbol) == 1]
    vocab: dict[str, int] = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    if vocab_size < len(vocab) + len(fixed):
        raise ValueError(f"vocab_size must be at least {len(vocab) + len(fixed)}, got {vocab_size}")
    merges: list[tuple[str, str]] = []
    for left, right in fixed + _learned_merges(texts, vocab_size):
        joined = left + right
        if len(vocab) >= vocab_size:
            break
        learned_digit = (left, right) not in fixed and re.search(r"\d", joined)
        if joined in vocab or left not in vocab or right not in vocab or learned_digit:
            continue
        vocab[joined] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def _number_merges() -> list[tuple[str, str]]:
    merges: dict[tuple[str, str], None] = {}
    for number in range(NUMBERS):
        token = _SPACE
        for digit in str(number):
            merges[(token, digit)] = None
            token += digit
    return list(merges)


def _learned_merges(texts: Iterable[str], vocab_size: int) -> list[tuple[str, str]]:
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    pairs = json.loads(learner.to_str())["model"]["merges"]
    return [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in pairs]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of `text` without a leading `<bos>`; markers such as `<kv>` are single tokens."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Find the ids that tasks use. Raises ValueError when a number or a symbol is not a single token."""

    def single(text: str) -> int:
        ids = encode(tokenizer, text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens in this tokenizer, expected one")
        return ids[0]

    vocab: dict[str, int] = tokenizer.get_vocab()
    words = sorted(
        index
        for token, index in vocab.items()
        if re.fullmatch(_SPACE + "[a-z]{3,}", token) and encode(tokenizer, " " + token[1:]) == [index]
    )
    return Vocabulary(
        size=len(vocab),
        special={token: vocab[token] for token in SPECIAL},
        symbols={symbol: single(" " + symbol) for symbol in SYMBOLS if len(symbol) == 1},
        numbers=tuple(single(f" {number}") for number in range(NUMBERS)),
        words=tuple(words[:KEY_WORDS]),
    )


def save(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template) as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def load(folder: Path) -> Tokenizer:
    """Read `tokenizer.json` from a checkpoint folder."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
