# SPDX-License-Identifier: Apache-2.0
"""What is kept of a plain request for the next of its shape, and the form of answers that are not streamed."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason

from router.faces.chunks import FormChanged
from router.faces.lean_stream import LeanStream
from router.faces.shapes import SHORT_BODY, Shapes
from router.faces.whole import WholeForm, draft_metrics, learn_whole
from tests.support import core_requests

MODEL = Path(__file__).parents[3] / "models" / "demo"
LONGEST = 64
PLAIN = {"scope": {"headers": []}, "nbytes": 100}
TOKENIZE = TokenizeParams(max_total_tokens=LONGEST, max_output_tokens=8, add_special_tokens=False)


@functools.cache
def tokenizer() -> Any:
    return get_tokenizer(str(MODEL))


class Renderer:
    """Renders as vLLM's does, by a template of one line."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self.template = "<user>{}"

    def render_messages(self, messages: Any, params: Any) -> Any:
        return messages, {"prompt": self.template.format(messages[0]["content"])}

    def validate_token_ids(self, tokens: list[int]) -> None:
        if max(tokens) > 1000:
            raise ValueError("out of vocabulary")

    def tokens(self, content: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(self.template.format(content), add_special_tokens=False)
        return found


def chat(content: Any = "the fox", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **more}


def made(tokens: list[int], **params: Any) -> EngineCoreRequest:
    return core_requests.core_request("chatcmpl-a-1", tokens, SamplingParams(**{"max_tokens": 8, **params}))


def noted(renderer: Renderer, document: dict[str, Any], **params: Any) -> tuple[Shapes, str]:
    shapes = Shapes(renderer, LONGEST)
    key = shapes.key(document=document, **PLAIN)  # type: ignore[arg-type]
    tokens = renderer.tokens(document["messages"][0]["content"])
    shapes.note(key, document, made(tokens, **params), (None, TOKENIZE))
    return shapes, key


def test_the_next_request_differs_in_prompt_and_names_alone() -> None:
    renderer = Renderer()
    shapes, key = noted(renderer, chat(seed=3), seed=3)
    second = chat("the lazy dog", seed=3)
    assert shapes.key(document=second, **PLAIN) == key  # type: ignore[arg-type]
    shape = shapes.find(key)
    assert shape is not None
    tokens = shapes.render(second, shape.arguments, shape.room)
    assert tokens == renderer.tokens("the lazy dog") != renderer.tokens("the fox")
    one, other = shape.ask(tokens, "chatcmpl-b"), shape.ask(tokens, "chatcmpl-b")
    assert one.request_id != other.request_id, "vLLM's names are unique as well"
    assert one.request_id.startswith("chatcmpl-b-")
    assert (one.external_req_id, one.prompt_token_ids) == ("chatcmpl-b", tokens)
    assert one.sampling_params == SamplingParams(max_tokens=8, seed=3)


@pytest.mark.parametrize(
    "document",
    [
        chat(seed=4),
        chat(seed=3.0),
        chat(seed=True),
        chat(seed=3, stream=True),
        chat(seed=3, max_tokens=9),
        {"prompt": "x", "max_tokens": 8, "seed": 3},
    ],
)
def test_another_field_is_another_shape(document: dict[str, Any]) -> None:
    shapes, key = noted(Renderer(), chat(seed=3))
    other = shapes.key(document=document, **PLAIN)  # type: ignore[arg-type]
    assert other
    assert other != key
    assert shapes.find(other) is None


@pytest.mark.parametrize(
    ("document", "changed"),
    [
        (chat(request_id="mine"), {}),
        (chat(cache_salt="mine"), {}),
        (chat(kv_transfer_params={"placement": "local"}), {}),
        (chat([{"type": "text", "text": "hi"}]), {}),
        ({"messages": [{"role": "tool", "content": "x"}]}, {}),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, {}),
        ({"messages": []}, {}),
        ({"prompt": ""}, {}),
        (chat(stop=["x" * 2000]), {}),
        (chat(), {"nbytes": SHORT_BODY + 1}),
        (chat(), {"scope": {"headers": [(b"x-vllm-priority", b"1")]}}),
        (chat(), {"scope": {"headers": [(b"x-session-id", b"1")]}}),
    ],
)
def test_what_has_no_shape(document: dict[str, Any], changed: dict[str, Any]) -> None:
    shapes = Shapes(Renderer(), LONGEST)
    assert shapes.key(document=chat(), **PLAIN), "the control"  # type: ignore[arg-type]
    assert shapes.key(document=document, **(PLAIN | changed)) == ""


@pytest.mark.parametrize("params", [{"max_tokens": 7}, {"max_tokens": None}, {"extra_args": {"a": 1}}])
def test_what_was_cut_short_or_is_its_own_is_not_noted(params: dict[str, Any]) -> None:
    shapes, key = noted(Renderer(), chat(), **params)
    assert shapes.find(key) is None


def test_a_prompt_that_renders_otherwise_is_not_noted() -> None:
    renderer = Renderer()
    shapes = Shapes(renderer, LONGEST)
    key = shapes.key(document=chat(), **PLAIN)  # type: ignore[arg-type]
    shapes.note(key, chat(), made([1, *renderer.tokens("the fox")]), (None, TOKENIZE))
    assert shapes.find(key) is None
    padded = TokenizeParams(max_total_tokens=LONGEST, max_output_tokens=8, pad_prompt_tokens=4)
    shapes.note(key, chat(), made(renderer.tokens("the fox")), (None, padded))
    assert shapes.find(key) is None


def test_a_prompt_without_room_goes_to_the_handler() -> None:
    renderer = Renderer()
    shapes, key = noted(renderer, chat())
    shape = shapes.find(key)
    assert shape is not None
    assert shape.room == LONGEST - 8
    fits = next(n for n in range(1, 99) if len(renderer.tokens("the " * n)) == shape.room)
    assert shapes.render(chat("the " * fits), shape.arguments, shape.room) is not None
    assert shapes.render(chat("the " * (fits + 1)), shape.arguments, shape.room) is None
    renderer.template = "{broken}"
    assert shapes.render(chat(), shape.arguments, shape.room) is None


def test_token_prompts_are_checked() -> None:
    shapes = Shapes(Renderer(), LONGEST)
    assert shapes.render({"prompt": [5, 6]}, (TOKENIZE,), 10) == [5, 6]
    assert shapes.render({"prompt": [5, 6000]}, (TOKENIZE,), 10) is None


def test_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.faces.shapes.CAPACITY", 2)
    renderer = Renderer()
    shapes = Shapes(renderer, LONGEST)
    keys = []
    for seed in range(3):
        keys.append(shapes.key(document=chat(seed=seed), **PLAIN))  # type: ignore[arg-type]
        shapes.note(keys[-1], chat(), made(renderer.tokens("the fox")), (None, TOKENIZE))
    assert [shapes.find(key) is not None for key in keys] == [False, True, True]


def test_the_shared_tokenizers_truncation_does_not_matter() -> None:
    """vLLM sets it on the tokenizer that requests share; the control is that tokenizer itself."""
    renderer = Renderer()
    shapes, key = noted(renderer, chat())
    shape = shapes.find(key)
    assert shape is not None
    backend = renderer.tokenizer._tokenizer
    backend.enable_truncation(2)
    try:
        cut = backend.encode("<user>the lazy dog", add_special_tokens=False).ids
        tokens = shapes.render(chat("the lazy dog"), shape.arguments, shape.room)
    finally:
        backend.no_truncation()
    assert len(cut) == 2
    assert tokens == renderer.tokens("the lazy dog")


# ---- answers that are not streamed


class Answer:
    """What vLLM's generator makes."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def model_dump_json(self) -> str:
        return json.dumps(self.document, separators=(",", ":"))


async def learned(**replaced: Any) -> WholeForm:
    async def generate(outputs: AsyncIterator[Any]) -> Any:
        (result,) = [output async for output in outputs]
        output = result.outputs[0]
        details = {"cached_tokens": 0, "created_cache_tokens": None}
        document = {
            "id": "@id@",
            "created": 7,
            "model": "@model@",
            "choices": [
                {
                    "text": output.text,
                    "finish_reason": output.finish_reason,
                    "stop_reason": output.stop_reason,
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": details},
            "metrics": None,
        }
        return Answer({**document, **replaced})

    return await learn_whole(generate)


async def test_an_answer_is_filled() -> None:
    form = await learned()
    stream = LeanStream(made([1, 5, 6]), tokenizer(), lambda request_id: None)
    *tokens, last = tokenizer().encode("the quick fox", add_special_tokens=False)
    for token in tokens:
        stream.take(EngineCoreOutput("r1", [token]))
    stream.take(EngineCoreOutput("r1", [last], finish_reason=FinishReason.LENGTH))
    await stream.end()
    assert not stream.failed
    found = json.loads(stream.whole(form, 'a"b', "m", 99))
    assert found == {
        "id": 'a"b',
        "created": 99,
        "model": "m",
        "choices": [
            {"text": tokenizer().decode([*tokens, last]), "finish_reason": "length", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": len(tokens) + 1,
            "total_tokens": len(tokens) + 4,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None},
        },
        "metrics": None,
    }


async def test_marks_in_a_text_are_text() -> None:
    form = await learned()
    text = '"@id@" "@stop@" "metrics":null \u00e9\n'
    data = form.fill(
        response_id="i",
        model="m",
        created=1,
        text=text,
        finish_reason="stop",
        stop_reason="\u00e9",
        prompt_tokens=1,
        completion_tokens=2,
        cached={"cached_tokens": 5},
        metrics='{"a":1}',
    )
    found = json.loads(data)
    assert found["choices"] == [{"text": text, "finish_reason": "stop", "stop_reason": "\u00e9"}]
    assert (found["metrics"], found["usage"]["prompt_tokens_details"]["cached_tokens"]) == ({"a": 1}, 5)


@pytest.mark.parametrize("name", ["id", "created", "choices", "metrics"])
async def test_answers_that_have_changed_are_refused(name: str) -> None:
    with pytest.raises(FormChanged, match="not once"):
        await learned(**{name: "gone"})


def test_what_drafts_did_is_told_as_vllm_tells_it() -> None:
    from vllm.entrypoints.generate.base.protocol import SpeculativeDecodingMetrics

    lists = ("acceptance_histogram", "per_step_accepted", "per_step_drafted")
    fields = {name: [1] if name in lists else 1 for name in SpeculativeDecodingMetrics.model_fields}
    found = json.loads(draft_metrics(SimpleNamespace(to_dict=lambda: fields)))
    assert found["speculative_decoding"] == fields
