# SPDX-License-Identifier: Apache-2.0
"""A model's chat template, called as vLLM calls it, without the layers around that call.

Between a chat's messages and Jinja vLLM and transformers parse the messages, look for the template, its language and
its arguments, and borrow a tokenizer: three quarters of the time, for what is the same for every request of a shape. So
once, while a shape is noted, Jinja's `render` is watched: which template vLLM's renderer calls, with what beside the
messages, and that its prompt is what came back. The next chats of that shape go to the same template with the same
arguments.

That holds for messages which reach the template as the client wrote them, so only for such: a role and a text that is
not empty, and no role that the watched chat did not have. Whatever else happened between the two (several calls, other
messages, a prompt that was changed afterwards) means that there is no short way, and none is taken.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jinja2


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template and what it gets beside the messages."""

    template: jinja2.Template
    names: dict[str, Any]
    """What the template sees beside the messages: Jinja's own names and the arguments."""
    own: dict[str, Any]
    """The first of these; a plain dict, because Jinja walks through them for each prompt."""
    roles: frozenset[str]
    """Those of the chat that was watched."""

    def render(self, messages: list[dict[str, str]]) -> str | None:
        """The prompt; None: these messages may reach the template otherwise than they are. Raises what it raises."""
        roles = self.roles
        for message in messages:
            if message["role"] not in roles or not message["content"]:
                return None
        template, environment = self.template, self.template.environment
        context = environment.context_class(
            environment,
            {**self.names, "messages": messages},
            template.name,
            template.blocks,
            globals=self.own,
        )
        return environment.concat(template.root_render_func(context))


def watched(renderer: Any, messages: list[dict[str, str]], params: Any) -> ChatTemplate | None:
    """What `renderer` (vLLM's) calls for a chat of texts; None when it is not what the module's description says.

    Raises what the renderer raises.
    """
    calls: list[tuple[jinja2.Template, tuple[Any, ...], dict[str, Any], str]] = []
    with _watching(calls):
        _, prompt = renderer.render_messages(messages, params)
    if len(calls) != 1 or prompt.keys() != {"prompt"}:
        return None
    template, positional, arguments, text = calls[0]
    if (
        template.environment.is_async
        or positional
        or arguments.get("messages") != messages
        or text != prompt["prompt"]
    ):
        return None
    rest = {name: value for name, value in arguments.items() if name != "messages"}
    own = dict(template.globals)
    made = ChatTemplate(template, own | rest, own, frozenset(message["role"] for message in messages))
    return made if made.render(messages) == text else None


@contextlib.contextmanager
def _watching(calls: list[Any]) -> Iterator[None]:
    """Note the calls of Jinja's `render` that this thread makes; others may make theirs meanwhile."""
    original, mine = jinja2.Template.render, threading.get_ident()

    def render(self: jinja2.Template, *args: Any, **kwargs: Any) -> str:
        text = original(self, *args, **kwargs)
        if threading.get_ident() == mine:
            calls.append((self, args, kwargs, text))
        return text

    jinja2.Template.render = render  # type: ignore[method-assign]
    try:
        yield
    finally:
        jinja2.Template.render = original  # type: ignore[method-assign]
