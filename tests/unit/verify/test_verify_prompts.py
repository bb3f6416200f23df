# SPDX-License-Identifier: Apache-2.0
"""The prompts: exact lengths, the answer's record early and once, deterministic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deltaserve.verify.prompts import (
    LONGEST_BATCHED,
    SHORTEST_BATCHED,
    PromptError,
    PromptMaker,
    make_groups,
    spread,
)

DEMO = Path(__file__).parents[3] / "models" / "demo"
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 127, 128, 129, 500, 1000, 3000]
IS, END, ASK = 90, 91, 92


def write_model(folder: Path, prompts: object | None) -> Path:
    """A model folder with what the prompts are made from."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500}))
    if prompts is not None:
        (folder / "prompts.json").write_text(json.dumps(prompts))
    return folder


def records(start: int, count: int) -> list[int]:
    """`key IS value END`, again and again."""
    return [token for i in range(count) for token in (200 + start + i, IS, 300 + (start * 7 + i) % 100, END)]


def recall_model(folder: Path) -> Path:
    """Two recall prompts of 63 and 103 tokens."""
    first = [1, 6, *records(0, 14), 199, END, 203, ASK]
    second = [1, 6, *records(20, 24), 198, END, 230, ASK]
    return write_model(
        folder,
        [
            {"prompt": first, "answer": first[2 + 3 * 4 + 2]},
            {"prompt": second, "answer": second[2 + 10 * 4 + 2]},
        ],
    )


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("index", [0, 1, 2, 5])
def test_lengths_are_exact(length: int, index: int) -> None:
    assert len(PromptMaker(DEMO).make(length, index).tokens) == length


def test_the_same_call_gives_the_same_prompts() -> None:
    assert make_groups(DEMO, LENGTHS, 8, 16) == make_groups(DEMO, LENGTHS, 8, 16)


@pytest.mark.parametrize("length", [13, 16, 17, 33, 64, 129, 700])
@pytest.mark.parametrize("index", [0, 1])
def test_the_answers_record_stands_at_the_beginning_and_only_there(
    tmp_path: Path, length: int, index: int
) -> None:
    prompt = PromptMaker(recall_model(tmp_path)).make(length, index)
    key = (203, 230)[index]
    assert prompt.tokens[:2] == (1, 6)
    assert prompt.tokens[-2:] == (key, ASK)
    places = [i for i, token in enumerate(prompt.tokens) if token == key]
    assert len(places) == 2, "the key stands in its record and in the question"
    assert places[0] < 5
    assert prompt.tokens[places[0] + 1 : places[0] + 3] == (IS, prompt.answer)


def test_a_prompt_of_the_material_is_used_as_it_is(tmp_path: Path) -> None:
    model = recall_model(tmp_path)
    whole = json.loads((model / "prompts.json").read_text())[0]["prompt"]
    assert list(PromptMaker(model).make(len(whole)).tokens) == whole


def test_too_short_for_a_record_has_no_answer(tmp_path: Path) -> None:
    maker = PromptMaker(recall_model(tmp_path))
    assert maker.recalls
    assert maker.make(1).tokens == (1,)
    assert maker.make(4).answer is None


def test_a_model_without_material_gets_random_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    maker = PromptMaker(write_model(tmp_path, None))
    prompt = maker.make(300)
    assert not maker.recalls
    assert len(prompt.tokens) == 300
    assert all(0 <= token < 500 for token in prompt.tokens)
    assert maker.make(300, 1) != prompt


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "list of prompts"),
        ([3], "prompt 0 is no object"),
        ([{"prompt": "text", "answer": 1}], "field 'prompt'"),
        ([{"prompt": [1, 2], "answer": None}], "field 'answer'"),
        ([{"prompt": [1, 6, 10, IS, 20, END, 11, ASK], "answer": 20}], "no earlier record"),
    ],
)
def test_material_that_is_not_as_expected_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        PromptMaker(write_model(tmp_path, content))


def test_length_zero_is_refused() -> None:
    with pytest.raises(PromptError, match="lengths: 0"):
        PromptMaker(DEMO).make(0)


@pytest.mark.parametrize("count", [2, 4, 8, 32])
def test_lengths_sent_at_once_differ_and_span_the_range(count: int) -> None:
    lengths = spread(count)
    assert len(set(lengths)) == count
    assert (lengths[0], lengths[-1]) == (SHORTEST_BATCHED, LONGEST_BATCHED)


def test_groups_hold_greedy_and_seeded_and_the_batch() -> None:
    groups = make_groups(DEMO, [2, 129], 8, 5)
    assert [[case.mode for case in group.cases] for group in groups[:4]] == [["greedy"], ["seeded"]] * 2
    assert {case.mode for case in groups[4].cases} == {"greedy", "seeded"}
    assert len(groups[4].cases) == 8
    assert {case.max_tokens for group in groups for case in group.cases} == {5}
    greedy_only = make_groups(DEMO, [2, 129], 1, 5, seeded=False)
    assert [case.mode for group in greedy_only for case in group.cases] == ["greedy", "greedy"]


def test_a_short_list_is_a_part_of_a_long_one() -> None:
    long, short = make_groups(DEMO, LENGTHS, 8, 16), make_groups(DEMO, [500, 2], 8, 16, seeded=False)
    assert all(group in long for group in short)
