# SPDX-License-Identifier: Apache-2.0
"""The prompts that a cluster is verified with, as token ids.

A prompt is a witness only when its answer depends on early tokens, because they reach the decode worker through the
state alone. So prompts are made of the model's own recall tasks (`prompts.json` beside its weights): the record that
holds the answer comes first, then as much other material as the wanted length takes, and the question comes last.
Models without that file get random tokens; then only the comparison itself says something.

Everything is deterministic: the same model folder and arguments give the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from deltaserve.documents import parse_json

WITNESSES = "prompts.json"
SEED = 20_250_801
SAMPLED_TEMPERATURE = 0.8
SHORTEST_BATCHED, LONGEST_BATCHED = 33, 1000
"""Bounds of the prompts that are sent at once: 33 is the first length with two full prefix units of 16."""
_HEAD = 2
"""Tokens that open every recall prompt: beginning of sequence and the task's marker."""
_LONGEST_KEY = 3


class PromptError(ValueError):
    """The prompts cannot be made; the message names the file or field and the remedy."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the token that a model with this prompt's skill answers first."""

    tokens: tuple[int, ...]
    answer: int | None = None
    """None: the prompt is too short to hold the question's record, or random."""


@dataclass(frozen=True)
class Case:
    """One request: a prompt and how its answer is sampled."""

    name: str
    prompt: Prompt
    temperature: float = 0.0
    seed: int = 0
    """Of the sampler; matters where `temperature` is not 0."""
    max_tokens: int = 16

    @property
    def length(self) -> int:
        """Prompt tokens."""
        return len(self.prompt.tokens)

    @property
    def mode(self) -> str:
        """`greedy` or `seeded`."""
        return "seeded" if self.temperature else "greedy"


@dataclass(frozen=True)
class Group:
    """Cases that are sent at once; most groups hold one."""

    cases: tuple[Case, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class _Witness:
    head: tuple[int, ...]
    record: tuple[int, ...]
    filler: tuple[int, ...]
    question: tuple[int, ...]
    answer: int
    whole: tuple[int, ...]


def make_groups(
    model: Path,
    lengths: Sequence[int],
    at_once: int,
    max_tokens: int,
    seeded: bool = True,
    greedy_only: bool = False,
) -> list[Group]:
    """Every length alone, greedy and (with `seeded`) sampled; then `at_once` different lengths together, of both kinds
    unless `greedy_only`: where answers can only be compared by likelihood, a sampled token proves nothing.

    What is made of a length does not depend on the other lengths, so that shorter lists are parts of longer ones.

    Raises PromptError for a `prompts.json` that cannot be read or lacks fields, and for a length below 1.
    """
    maker = PromptMaker(model)
    groups = []
    for length in lengths:
        prompt = maker.make(length, length)
        groups.append(Group((Case(f"{length} greedy", prompt, max_tokens=max_tokens),)))
        if seeded:
            groups.append(Group((_sampled(f"{length} seeded", prompt, max_tokens),)))
    batch = []
    for index, length in enumerate(spread(at_once)):
        prompt, name = maker.make(length, length + 1), f"{length} at once"
        greedy = Case(name, prompt, max_tokens=max_tokens)
        mixed = index % 2 and not greedy_only
        batch.append(_sampled(name, prompt, max_tokens) if mixed else greedy)
    if len(batch) > 1:
        groups.append(Group(tuple(batch)))
    return groups


def spread(count: int) -> list[int]:
    """`count` lengths from SHORTEST_BATCHED to LONGEST_BATCHED, evenly spaced on a logarithmic scale, all different."""
    if count < 2:
        return [LONGEST_BATCHED] * count
    ratio = (LONGEST_BATCHED / SHORTEST_BATCHED) ** (1 / (count - 1))
    lengths: list[int] = []
    for index in range(count):
        wanted = round(SHORTEST_BATCHED * ratio**index)
        lengths.append(wanted if not lengths else max(wanted, lengths[-1] + 1))
    return lengths


def _sampled(name: str, prompt: Prompt, max_tokens: int) -> Case:
    return Case(name, prompt, SAMPLED_TEMPERATURE, SEED + len(prompt.tokens), max_tokens)


class PromptMaker:
    """Makes prompts of any length for one model."""

    def __init__(self, model: Path) -> None:
        """Raises PromptError when `prompts.json` exists and is not as expected."""
        path = model / WITNESSES
        self._witnesses = [_take_apart(item, path, i) for i, item in enumerate(_read(path))]
        self._vocab_size = _vocab_size(model)

    @property
    def recalls(self) -> bool:
        """Whether prompts are recall tasks; False: random tokens."""
        return bool(self._witnesses)

    def make(self, length: int, index: int = 0) -> Prompt:
        """A prompt of exactly `length` tokens; `index` chooses the material. Raises PromptError below 1 token."""
        if length < 1:
            raise PromptError(f"lengths: {length} is no prompt length; give lengths of at least 1 token")
        if not self._witnesses:
            random = Random(f"{SEED}/{length}/{index}")
            # The first ids are usually special tokens.
            first = min(16, self._vocab_size - 1)
            return Prompt(tuple(random.randrange(first, self._vocab_size) for _ in range(length)))
        ready = [witness for witness in self._witnesses if len(witness.whole) == length]
        if ready:
            witness = ready[index % len(ready)]
            return Prompt(witness.whole, witness.answer)
        witness = self._witnesses[index % len(self._witnesses)]
        room = length - len(witness.head) - len(witness.record) - len(witness.question)
        if room < 0:
            return Prompt((witness.head + witness.question)[:length])
        filler = self._filler(witness, room)
        return Prompt(witness.head + witness.record + filler + witness.question, witness.answer)

    def _filler(self, witness: _Witness, room: int) -> tuple[int, ...]:
        """`room` tokens without the asked key, so that the answer stands at the prompt's beginning only."""
        key = witness.question[-2]
        material = [token for token in witness.filler if token != key]
        others = (other for other in self._witnesses if other is not witness)
        while len(material) < room:
            more = next(others, None)
            if more is None:
                material += material or [witness.head[0]]
            else:
                material += [token for token in more.filler if token != key]
        return tuple(material[:room])


def _take_apart(item: object, path: Path, index: int) -> _Witness:
    where = f"{path}: prompt {index}"
    if not isinstance(item, dict):
        raise PromptError(f"{where} is no object; write a list of {{'prompt': [token ids], 'answer': id}}")
    tokens, answer = item.get("prompt"), item.get("answer")
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise PromptError(f"{where}: field 'prompt' must be a list of token ids")
    if not isinstance(answer, int):
        raise PromptError(f"{where}: field 'answer' must be a token id")
    # A record is `key separator answer`, a question `key operator`; a key has up to three tokens.
    for size in range(min(_LONGEST_KEY, len(tokens) - _HEAD), 0, -1):
        key = tokens[-1 - size : -1]
        for at in range(_HEAD, len(tokens) - size - 2):
            if tokens[at : at + size] == key and tokens[at + size + 1] == answer:
                return _Witness(
                    tuple(tokens[:_HEAD]),
                    tuple(tokens[at : at + size + 2]),
                    tuple(tokens[at + size + 2 : -1 - size]) + tuple(tokens[_HEAD:at]),
                    tuple(tokens[-1 - size :]),
                    answer,
                    tuple(tokens),
                )
    raise PromptError(f"{where}: no earlier record gives the asked key its answer; remove the prompt")


def _read(path: Path) -> list[object]:
    if not path.is_file():
        return []
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PromptError(f"{path} is not JSON ({error}); repair or remove it") from error
    if not isinstance(document, list):
        raise PromptError(f"{path} must hold a list of prompts; repair or remove it")
    return document


def _vocab_size(model: Path) -> int:
    try:
        document = parse_json((model / "config.json").read_text(encoding="utf-8"))
        return int((document.get("text_config") or document).get("vocab_size") or 1000)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise PromptError(f"model {model}: config.json cannot be read: {error}") from error
