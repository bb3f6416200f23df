# SPDX-License-Identifier: Apache-2.0
"""The generated tasks say what they claim, checked against a plain reading of the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from models.demo_training import tokenizer as tok  # noqa: E402
from models.demo_training.cases import RECALL, CaseMaker  # noqa: E402
from models.demo_training.tasks import Batch, Tasks  # noqa: E402

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


@pytest.fixture(scope="module")
def maker() -> CaseMaker:
    tokenizer = tok.load(DEMO)
    return CaseMaker(tokenizer, tok.vocabulary(tokenizer))


def read_answers(tokens: list[int], tasks: Tasks, words: int) -> dict[int, int]:
    """Place of each question's answer → the value that a reader of the text would give."""
    signs = {tasks.symbols[s]: s for s in "=?!"}
    known: dict[tuple[int, ...], int] = {}
    answers = {}
    for i in range(words, len(tokens) - 1):
        key = tuple(tokens[i - words : i])
        if signs.get(tokens[i]) == "=":
            known[key] = tokens[i + 1]
        elif tokens[i] in signs and key in known:
            answers[i + 1] = known[key]
    return answers


def wrong_answers(batch: Batch, tasks: Tasks, words: int) -> int:
    wrong = 0
    for ids, answer in zip(batch.ids.tolist(), batch.answer, strict=True):
        reading = read_answers(ids, tasks, words)
        wrong += sum(reading.get(p) != ids[p] for p in answer.nonzero().flatten().tolist())
    return wrong


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("operator", ["?", "!"])
def test_recall_answers_follow_from_the_text(maker: CaseMaker, words: int, operator: str) -> None:
    tasks = maker.tasks("test")
    batch = tasks.recall(8, 512, words, operator=operator)
    assert int(batch.answer.sum()) > 100
    assert wrong_answers(batch, tasks, words) == 0


def test_a_changed_value_is_noticed(maker: CaseMaker) -> None:
    tasks = maker.tasks("test")
    batch = tasks.recall(8, 512, 1)
    row, place = batch.answer.nonzero()[20].tolist()
    batch.ids[row, place] = tasks.values[0] if batch.ids[row, place] != tasks.values[0] else tasks.values[1]
    assert wrong_answers(batch, tasks, 1) >= 1


def test_the_source_is_where_the_answer_stood_last(maker: CaseMaker) -> None:
    batch = maker.tasks("test").recall(8, 512, 1)
    for row, place in batch.answer.nonzero().tolist():
        source = int(batch.source[row, place])
        assert batch.ids[row, source] == batch.ids[row, place]
        assert batch.ids[row, source - 2] == batch.ids[row, place - 2]
        between = batch.ids[row, source + 1 : place - 2].tolist()
        key = int(batch.ids[row, place - 2])
        signs = {int(batch.ids[row, source - 1]), *(maker.vocabulary.symbols[s] for s in "=?!")}
        mentions = [
            i for i, t in enumerate(between) if t == key and i + 1 < len(between) and between[i + 1] in signs
        ]
        assert not mentions


def test_sums_are_right(maker: CaseMaker) -> None:
    numbers = {token: value for value, token in enumerate(maker.vocabulary.numbers)}
    for case in maker.additions(200):
        a, b = numbers[case.tokens[case.start - 4]], numbers[case.tokens[case.start - 2]]
        assert numbers[case.answer_id] == a + b


def test_copies_repeat_the_passage(maker: CaseMaker) -> None:
    case = maker.copies(512, 1)[0]
    text = " ".join(map(str, case.prompt))
    assert len(case.answer) == 64
    assert " ".join(map(str, case.answer)) in text


@pytest.mark.parametrize("kind", RECALL)
def test_handoff_prompts_have_one_length_and_an_early_source(maker: CaseMaker, kind: str) -> None:
    signs = {maker.vocabulary.symbols[s] for s in "?!"}
    for case in maker.handoffs(kind, 300, 6, margin=150):
        assert len(case.prompt) == 300
        assert case.tokens[299] in signs
        assert case.answer_id in case.tokens[:150]


def test_fewer_cases_are_the_first_of_more(maker: CaseMaker) -> None:
    assert maker.recall("sparse ?", 512, 10) == maker.recall("sparse ?", 512, 40)[:10]
    assert maker.recall("sparse ?", 512, 10) != CaseMaker(maker.tokenizer, maker.vocabulary, 8).recall(
        "sparse ?", 512, 10
    )
