# SPDX-License-Identifier: Apache-2.0
"""A chat's template is called directly only where that is what the renderer does."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from vllm.tokenizers import get_tokenizer

from router.faces.templates import watched

MODEL = Path(__file__).parents[3] / "models" / "demo"
CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "hi"}]


@functools.cache
def tokenizer() -> Any:
    return get_tokenizer(str(MODEL))


class Renderer:
    """Renders by transformers, as vLLM's does; `after` changes what came out, `before` the messages."""

    def __init__(self, after: Callable[[str], str] = str, before: Callable[[Any], Any] = list) -> None:
        self.after, self.before = after, before
        self.calls = 0

    def render_messages(self, messages: Any, params: Any) -> tuple[Any, dict[str, str]]:
        self.calls += 1
        text = tokenizer().apply_chat_template(self.before(messages), tokenize=False, **params)
        return messages, {"prompt": self.after(text)}

    def prompt(self, messages: Any, params: Any) -> str:
        return self.render_messages(messages, params)[1]["prompt"]


@pytest.mark.parametrize("params", [{"add_generation_prompt": True}, {"add_generation_prompt": False}])
def test_the_next_chats_have_the_renderers_prompts(params: dict[str, Any]) -> None:
    renderer = Renderer()
    template = watched(renderer, CHAT, params)
    assert template is not None
    for chat in (
        CHAT,
        [{"role": "user", "content": "  {{ a }} {% if %} <eos>\u00e9\U0001f600 "}],
        [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}] * 3,
    ):
        assert template.render(chat) == renderer.prompt(chat, params)
    assert template.render(CHAT[:1]) != template.render(CHAT), "the control"


def test_a_template_of_ones_own_is_the_one_that_is_called() -> None:
    params = {"chat_template": "{{ messages[0]['content'] }}!{{ mood }}", "mood": "glad"}
    template = watched(Renderer(), CHAT, params)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x!glad"


@pytest.mark.parametrize("chat", [[{"role": "assistant", "content": "x"}], [{"role": "user", "content": ""}]])
def test_messages_that_may_be_parsed_otherwise_take_the_long_way(chat: Any) -> None:
    template = watched(Renderer(), CHAT, {})
    assert template is not None
    assert template.render(chat) is None


@pytest.mark.parametrize(
    "renderer",
    [
        Renderer(after=lambda text: text + " "),
        Renderer(before=lambda messages: [{**each, "content": each["content"] * 2} for each in messages]),
        Renderer(after=lambda text: text[: len(jinja2.Template("twice").render())] + text[5:]),
    ],
    ids=["changed afterwards", "changed before", "two calls"],
)
def test_what_is_not_one_call_with_these_messages_has_no_short_way(renderer: Renderer) -> None:
    assert watched(renderer, CHAT, {}) is None


def test_a_template_that_remembers_has_no_short_way() -> None:
    """What a template gives the second time must be what it gave the first."""
    numbers = iter(range(9))
    params = {"chat_template": "{{ next() }}", "next": lambda: next(numbers)}
    assert watched(Renderer(), CHAT, params) is None


def test_other_threads_calls_are_not_ours_and_the_watch_ends() -> None:
    before = jinja2.Template.render

    def elsewhere(text: str) -> str:
        thread = threading.Thread(target=jinja2.Template("x").render)
        thread.start()
        thread.join()
        return text

    assert watched(Renderer(after=elsewhere), CHAT, {}) is not None
    assert jinja2.Template.render is before
    with pytest.raises(jinja2.TemplateError):
        watched(Renderer(), CHAT, {"chat_template": "{% broken"})
    assert jinja2.Template.render is before
