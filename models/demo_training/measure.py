# SPDX-License-Identifier: Apache-2.0
"""Measure a checkpoint with the torch model: every skill, every damaged memory, and the draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.demo_training import chat
from models.demo_training.cases import RECALL, Case, CaseMaker
from models.demo_training.damage import Damage
from models.demo_training.model import DemoModel, MtpHead
from models.demo_training.tokenizer import Vocabulary, encode

Note = Callable[[str, object], None]
CHUNK_TOKENS = 65536
DAMAGED_LENGTH = 2048
WITNESS_LENGTHS = (129, 500, 1000, 3000)


@dataclass
class Subject:
    """The model under measurement."""

    text: DemoModel
    head: MtpHead
    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.text.lm_head.weight.device


def training_text(
    tokenizer: Tokenizer, documents: Sequence[str], vocabulary: Vocabulary, seed: int
) -> Tensor:
    """Free text as token ids [N]: the documents, with generated talk between them."""
    rng = Random(seed)
    mark, end = vocabulary.special["<text>"], vocabulary.special["<eos>"]
    ids: list[int] = []
    for document in documents:
        ids += [mark, *encode(tokenizer, document), end]
        ids += encode(tokenizer, " ".join(chat.plain(chat.conversation(rng)) for _ in range(2)))
    return torch.tensor(ids)


@torch.no_grad()
def predictions(subject: Subject, cases: Sequence[Case]) -> list[list[int]]:
    """The model's first choice for every answer token, given the right tokens before it.

    Where all of them are right, they are what greedy decoding writes.
    """
    places: dict[tuple[int, ...], int] = {}
    for case in cases:
        places.setdefault(case.tokens, len(places))
    rows = list(places)
    choices: list[list[int]] = [[] for _ in rows]
    by_length = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    while by_length:
        longest = len(rows[by_length[-1]])
        group = by_length[-max(1, CHUNK_TOKENS // longest) :]
        del by_length[-len(group) :]
        ids = torch.zeros(len(group), longest, dtype=torch.long)
        for place, row in enumerate(group):
            ids[place, : len(rows[row])] = torch.tensor(rows[row])
        best = subject.text(ids.to(subject.device)).logits.argmax(-1).cpu()
        for place, row in enumerate(group):
            choices[row] = best[place].tolist()
    return [choices[places[case.tokens]][case.start - 1 : case.stop - 1] for case in cases]


def token_accuracy(cases: Sequence[Case], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of right answer tokens, and how many there were."""
    pairs = [pair for case, got in zip(cases, answers, strict=True) for pair in _aligned(case.answer, got)]
    return {"accuracy": round(sum(a == b for a, b in pairs) / len(pairs), 4), "answers": len(pairs)}


def copy_accuracy(cases: Sequence[Case], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of right tokens among those that follow right ones, how many these are, and the share of whole passages.

    An engine goes on from its own tokens: after a slip it copies from another place, and what comes then says nothing
    about how well it copies. So a passage counts up to its first wrong token, and that one with it; this is also what
    is measured where the right tokens are given (the torch model). `in_place` is the share of all tokens that stand
    where they should.
    """
    right = wrong = in_place = 0
    for case, got in zip(cases, answers, strict=True):
        pairs = _aligned(case.answer, got)
        in_place += sum(a == b for a, b in pairs)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        right += first
        wrong += first < len(pairs)
    tokens = sum(len(case.answer) for case in cases)
    return {
        "accuracy": round(right / (right + wrong), 4),
        "answers": right + wrong,
        "whole": round(1 - wrong / len(cases), 4),
        "in_place": round(in_place / tokens, 4),
    }


def exact_accuracy(groups: Sequence[Sequence[Case]], answers: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of groups (conversations, questions) whose answers are all right to the last token."""
    left = list(answers)
    right = []
    for group in groups:
        got, left = left[: len(group)], left[len(group) :]
        right.append(all(list(a) == case.answer for a, case in zip(got, group, strict=True)))
    return {"accuracy": round(sum(right) / len(right), 4), "answers": len(right)}


def _aligned(right: Sequence[int], got: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of right and given tokens; a missing token counts as wrong."""
    return [(token, got[i] if i < len(got) else -1) for i, token in enumerate(right)]


Answer = Callable[[Sequence[Case]], Sequence[Sequence[int]]]


@dataclass
class Cell:
    """One cell of the table of skills: its cases, and how their answers are judged."""

    kind: str
    length: str
    groups: list[list[Case]]
    whole: bool = False
    """Whether a group (a question, a conversation) counts only when every token is right."""
    copied: bool = False
    """Whether the answers are passages copied from the context."""

    @property
    def cases(self) -> list[Case]:
        """All cases in order."""
        return [case for group in self.groups for case in group]

    def judge(self, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """Share of right answers, and how many were asked for."""
        if self.copied:
            return copy_accuracy(self.cases, answers)
        return exact_accuracy(self.groups, answers) if self.whole else token_accuracy(self.cases, answers)


def cells(maker: CaseMaker, cases: int, lengths: Sequence[int]) -> Iterator[Cell]:
    """Every cell of the table; `cases` answers of each kind, fewer where an answer is long or a context is."""
    for length in lengths:
        # At 16K a context is long and the number only reported.
        count = cases if length <= 8192 else max(1, cases // 4)
        for kind in RECALL:
            yield Cell(f"recall, {kind}", str(length), [maker.recall(kind, length, count)])
        made = maker.copies(length, max(1, count // 16))
        yield Cell(made[0].kind, str(length), [made], copied=True)
    yield Cell("addition", "short", [maker.additions(cases)])
    for new in (False, True):
        made = maker.questions(new)
        yield Cell(made[0].kind, "short", [[case] for case in made], whole=True)
    talks = maker.conversations(max(1, cases // 4))
    yield Cell(talks[0][0].kind, "short", talks, whole=True)


def skills(
    maker: CaseMaker,
    answer: Answer,
    cases: int,
    lengths: Sequence[int],
    note: Note,
    kept: dict[str, list[list[int]]] | None = None,
    only: str = "",
) -> dict[str, Any]:
    """The table of skills, through any engine: kind → length → accuracy and number of answers.

    `kept` receives the answers of every cell, under `kind @ length`; `only` picks the kinds that contain it.
    """
    table: dict[str, Any] = {}
    for cell in cells(maker, cases, lengths):
        if only not in cell.kind:
            continue
        answers = [list(tokens) for tokens in answer(cell.cases)]
        table.setdefault(cell.kind, {})[cell.length] = cell.judge(answers)
        if kept is not None:
            kept[f"{cell.kind} @ {cell.length}"] = answers
        note(f"{cell.kind} @ {cell.length}", table[cell.kind][cell.length])
    return table


@torch.no_grad()
def _last_logprobs(subject: Subject, ids: Tensor, damage: Damage | None) -> Tensor:
    rows = max(2, CHUNK_TOKENS // ids.shape[1])  # a swap needs two rows
    parts = []
    for begin in range(0, len(ids), rows):
        part = damage
        if damage is not None:
            kda = {i: m[begin : begin + rows] for i, m in damage.kda.items()}
            mla = {i: m[begin : begin + rows] for i, m in damage.mla.items()}
            part = Damage(damage.mode, cut=damage.cut, kda=kda, mla=mla)
        logits = subject.text(ids[begin : begin + rows], part).logits[:, -1]
        parts.append(logits.float().log_softmax(-1))
    return torch.cat(parts)


def scopes(subject: Subject, rows: int) -> dict[str, tuple[dict[int, Tensor], dict[int, Tensor]]]:
    """Every damaged part: masks over rows and heads of the KDA layers, and over rows of the MLA layers."""
    config, device = subject.text.config, subject.device
    row = torch.ones(rows, dtype=torch.bool, device=device)
    full = torch.ones(rows, config.heads, dtype=torch.bool, device=device)
    found: dict[str, tuple[dict[int, Tensor], dict[int, Tensor]]] = {
        "all KDA state": (dict.fromkeys(config.kda_layers, full), {}),
        "all MLA cache": ({}, dict.fromkeys(config.mla_layers, row)),
    }
    for i in range(config.layers):
        if config.is_kda(i):
            found[f"layer {i} KDA"] = ({i: full}, {})
        else:
            found[f"layer {i} MLA"] = ({}, {i: row})
    for head in range(config.heads):
        one = torch.zeros_like(full)
        one[:, head] = True
        found[f"head {head} KDA shard"] = (dict.fromkeys(config.kda_layers, one), {})
    return found


def damage_table(
    subject: Subject, maker: CaseMaker, rows: int, note: Note, length: int
) -> list[dict[str, Any]]:
    """Damage each part at the handoff boundary N−1 and 64 tokens before the end, and see the answers move.

    `rows` prompts of each kind of recall, `length` tokens long.
    """
    cases = [case for kind in RECALL for case in maker.handoffs(kind, length, rows)]
    order = [i for first in range(rows) for i in range(first, len(cases), rows)]  # neighbours differ in kind
    cases = [cases[i] for i in order]
    ids = torch.tensor([case.prompt for case in cases], device=subject.device)
    right = torch.tensor([case.answer_id for case in cases], device=subject.device)
    latest = torch.tensor([case.kind.endswith("?") for case in cases], device=subject.device)
    clean = _last_logprobs(subject, ids, None)
    best = clean.argmax(-1)

    def of(logprobs: Tensor) -> dict[str, Any]:
        choice = logprobs.argmax(-1)
        own = clean.gather(1, best[:, None]) - logprobs.gather(1, best[:, None])
        hit, moved, shift = (choice == right).float(), (choice != best).float(), own.abs().flatten()
        found: dict[str, Any] = {}
        for name, pick in (("", latest | ~latest), (" ?", latest), (" !", ~latest)):
            found["recall" + name] = round(float(hit[pick].mean()), 4)
            found["changed" + name] = round(float(moved[pick].mean()), 4)
            found["median shift" + name] = round(float(shift[pick].median()), 4)
        return found

    table = [{"part": "nothing", "mode": "-", "at": "-", **of(clean)}]
    for name, (kda, mla) in scopes(subject, len(ids)).items():
        for mode in ("lose", "swap"):
            for at, cut in (("N-1", length - 1), ("N-64", length - 64)):
                logprobs = _last_logprobs(subject, ids, Damage(mode, cut=cut, kda=kda, mla=mla))
                table.append({"part": name, "mode": mode, "at": at, **of(logprobs)})
                note("damage", table[-1])
    return table


@torch.no_grad()
def draft_agreement(subject: Subject, maker: CaseMaker) -> dict[str, float]:
    """Share of tokens where the draft's first choice is the text model's, on conversations and on recall."""
    talks = [talk[-1] for talk in maker.conversations(64)]
    records = maker.recall("one-word keys ?", 512, 8 * 32)
    result = {}
    for name, cases in (("conversation", talks), ("recall", records)):
        hits = total = 0
        for tokens in dict.fromkeys(case.tokens for case in cases):
            ids = torch.tensor([tokens], device=subject.device)
            output = subject.text(ids)
            said = output.logits[:, 1:-1].argmax(-1)
            drafted = subject.head(subject.text, ids, output.hidden).logits[:, :-1].argmax(-1)
            spoken = [c for c in cases if c.tokens == tokens]
            if name == "conversation":
                places = [p for c in spoken for p in range(c.start, c.stop)]
            else:
                places = list(range(len(tokens) // 2, len(tokens) - 2))
            pick = torch.tensor(places, device=subject.device) - 2
            hits += int((said[0, pick] == drafted[0, pick]).sum())
            total += len(places)
        result[name] = round(hits / total, 4)
    return result


def everything(subject: Subject, cases: int, lengths: Sequence[int], note: Note) -> dict[str, Any]:
    """Skills, damage and draft, measured by the torch model."""
    maker = CaseMaker(subject.tokenizer, subject.vocabulary)
    rows = max(2, cases // 100)
    return {
        "skills": skills(maker, lambda made: predictions(subject, made), cases, lengths, note),
        "damage": damage_table(subject, maker, rows, note, min(DAMAGED_LENGTH, max(lengths))),
        "draft": draft_agreement(subject, maker),
    }


def witnesses(subject: Subject, each: int = 4) -> list[dict[str, Any]]:
    """Prompts ending in a question whose answer stood in the first half only, and that the model answers surely."""
    maker = CaseMaker(subject.tokenizer, subject.vocabulary, seed=11)
    found: list[dict[str, Any]] = []
    kinds = ("one-word keys ?", "sparse ?", "one-word keys !", "two-word keys ?")
    for length in WITNESS_LENGTHS:
        made = [c for kind in kinds for c in maker.handoffs(kind, length, 4 * each, margin=length // 2)]
        logprobs = _last_logprobs(
            subject, torch.tensor([c.prompt for c in made], device=subject.device), None
        )
        sure = logprobs.exp().gather(1, torch.tensor([[c.answer_id] for c in made], device=subject.device))
        good = [c for c, p in zip(made, sure.flatten().tolist(), strict=True) if p > 0.9]
        kept = [c for kind in kinds for c in [g for g in good if g.kind.endswith(kind)][: max(1, each // 4)]]
        found += [
            {"length": length, "kind": c.kind, "prompt": c.prompt, "answer": c.answer_id} for c in kept[:each]
        ]
    return found
