# SPDX-License-Identifier: Apache-2.0
"""What vLLM has made of a plain request, kept for the next one that differs from it in nothing but its prompt.

Sampling parameters, and how a prompt is rendered and tokenized, follow from a request's other fields alone. So the
first request of a *shape* (path, and all fields but the prompt, to the letter) goes through vLLM's handler, and what
came out of it is noted. The next ones of that shape are rendered with the arguments that the handler gave, and take the
rest from the note.

A shape is only noted when what follows from it is sure: `max_tokens` is given and was not cut short, nothing else that
is the request's own (an id, a cache salt, a placement, a header that vLLM reads) is there, and rendering the first
request again as the next ones will be gives the handler's token ids. A prompt of a noted shape that is long, has
anything but texts in it, would leave too little room for `max_tokens`, or cannot be rendered, goes to the handler as if
the shape were unknown: whatever is refused is refused by vLLM.

A chat's template is called directly where that is sure to be what vLLM does (templates.py).

Decisions. Short prompts are rendered on the event loop: handing one to a thread and back costs more than rendering it.
The tokenizer is a copy of its own, because vLLM's sets truncation on the one that it shares between requests.
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from router.faces.templates import ChatTemplate, watched

if TYPE_CHECKING:
    from starlette.types import Scope
    from vllm.v1.engine import EngineCoreRequest

log = logging.getLogger(__name__)

SHORT_BODY = 4096
"""Bytes of a body whose prompt is rendered on the event loop; that takes at most a millisecond."""
CAPACITY = 512
LONGEST_KEY = 1024
_NOT_SHARED = frozenset({"request_id", "cache_salt", "kv_transfer_params"})
_READ_BY_VLLM = (b"x-session-id", b"x-vllm-", b"x-data-parallel-rank")
_ROLES = frozenset({"system", "user", "assistant"})
_MESSAGE = {"role", "content"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What requests of one shape have in common."""

    request: EngineCoreRequest
    """Of the first one; its prompt, ids and time are replaced."""
    arguments: tuple[Any, ...]
    """Those that vLLM's renderer got after the prompt: (chat_params, tok_params) or (tok_params,)."""
    room: int
    """Longest prompt, in tokens, that leaves room for all of `max_tokens`."""
    streamed: bool
    template: ChatTemplate | None = None
    """The short way to a chat's prompt."""

    def ask(self, tokens: list[int], external_id: str) -> EngineCoreRequest:
        """The engine-core request for a prompt."""
        return msgspec.structs.replace(
            self.request,
            request_id=f"{external_id}-{os.urandom(4).hex()}",
            external_req_id=external_id,
            prompt_token_ids=tokens,
            arrival_time=time.time(),
        )


class Shapes:
    """The last `CAPACITY` shapes. Belongs to one event loop."""

    def __init__(self, renderer: Any, max_model_len: int) -> None:
        """`renderer`: vLLM's."""
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._known: OrderedDict[str, Shape] = OrderedDict()
        self._tokenizer = _own(renderer.tokenizer)

    @staticmethod
    def key(scope: Scope, document: dict[str, Any], nbytes: int) -> str:
        """The name of a request's shape; empty: it has none, or its prompt is not one that is rendered here."""
        if nbytes > SHORT_BODY or not _NOT_SHARED.isdisjoint(document):
            return ""
        for name, _ in scope["headers"]:
            if name.startswith(_READ_BY_VLLM):
                return ""
        chat = "messages" in document
        if not (_texts(document["messages"]) if chat else _prompt(document.get("prompt"))):
            return ""
        rest = {name: value for name, value in document.items() if name not in ("messages", "prompt")}
        key = f"{'chat' if chat else type(document['prompt']).__name__} {rest!r}"
        return key if len(key) <= LONGEST_KEY else ""

    def find(self, key: str) -> Shape | None:
        """The shape that was noted under `key`."""
        shape = self._known.get(key)
        if shape is not None:
            self._known.move_to_end(key)
        return shape

    def render(
        self,
        document: dict[str, Any],
        arguments: tuple[Any, ...],
        room: int,
        template: ChatTemplate | None = None,
    ) -> list[int] | None:
        """The prompt's token ids; None: vLLM's handler shall see it, because it is too long or cannot be rendered."""
        try:
            if "messages" in document:
                chat_params, tok_params = arguments
                text = template.render(document["messages"]) if template is not None else None
                if text is None:
                    _, prompt = self._renderer.render_messages(document["messages"], chat_params)
                else:
                    prompt = {"prompt": text}
                tokens = self._tokenize(prompt, tok_params)
            else:
                (tok_params,) = arguments
                text = document["prompt"]
                if isinstance(text, str):
                    tokens = self._tokenize({"prompt": text}, tok_params)
                else:
                    self._renderer.validate_token_ids(text)
                    tokens = text
        except Exception:  # vLLM says what is wrong with it
            return None
        return tokens if 0 < len(tokens) <= room else None

    def note(
        self, key: str, document: dict[str, Any], request: EngineCoreRequest, arguments: tuple[Any, ...]
    ) -> None:
        """Note what vLLM's handler has made of a request, if it is sure to hold for the next one of its shape.

        `request` must not be changed afterwards.
        """
        params = request.sampling_params
        wanted = document.get("max_completion_tokens", document.get("max_tokens"))
        if (
            params is None
            or type(wanted) is not int
            or params.max_tokens != wanted
            or params.extra_args
            or request.lora_request is not None
            or request.trace_headers is not None
            or request.data_parallel_rank is not None
            or request.session_id is not None
            or request.mm_features
            or request.cache_salt
            or not _plain_tokens(arguments[-1])
        ):
            return
        room = self._max_model_len - wanted
        if self.render(document, arguments, room) != request.prompt_token_ids:
            log.warning(
                "a prompt that is rendered again has other tokens; requests like it take the long way"
            )
            return
        template = None
        if "messages" in document:
            template = watched(self._renderer, document["messages"], arguments[0])
        kept = msgspec.structs.replace(request, prompt_token_ids=None)
        self._known[key] = Shape(kept, arguments, room, bool(document.get("stream")), template)
        if len(self._known) > CAPACITY:
            self._known.popitem(last=False)

    def _tokenize(self, prompt: dict[str, Any], tok_params: Any) -> list[int]:
        text = prompt.get("prompt")
        if self._tokenizer is not None and isinstance(text, str) and prompt.keys() == {"prompt"}:
            ids: list[int] = self._tokenizer.encode(
                text, add_special_tokens=tok_params.add_special_tokens
            ).ids
            return ids
        found: list[int] = self._renderer.tokenize_prompt(prompt, tok_params)["prompt_token_ids"]
        return found


def _own(tokenizer: Any) -> Any:
    """A copy of a tokenizer's Rust part without truncation and padding; None when it has no such part."""
    import tokenizers

    backend = getattr(tokenizer, "_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        return None
    made = tokenizers.Tokenizer.from_str(backend.to_str())
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    return made


def _plain_tokens(params: Any) -> bool:
    """Whether tokenizing does nothing to a text but encode it; what would be truncated has no room in any case."""
    return not (params.do_lower_case or params.pad_prompt_tokens or params.truncate_prompt_tokens is not None)


def _texts(messages: Any) -> bool:
    """Whether a chat is made of texts alone."""
    return (
        type(messages) is list
        and bool(messages)
        and all(
            type(each) is dict
            and each.keys() == _MESSAGE
            and type(each["content"]) is str
            and type(each["role"]) is str
            and each["role"] in _ROLES
            for each in messages
        )
    )


def _prompt(prompt: Any) -> bool:
    return (type(prompt) is str or type(prompt) is list) and bool(prompt)
