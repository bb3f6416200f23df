# SPDX-License-Identifier: Apache-2.0
"""vLLM's generators of answers, over made-up outputs: where router/faces/chunks.py and whole.py learn their forms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from router.faces.chunks import ID, MODEL

Events = Callable[[AsyncIterator[Any]], AsyncIterator[str]]
Whole = Callable[[AsyncIterator[Any]], Awaitable[Any]]


def chat_events(handler: Any, usage: bool) -> Events:
    """The events of a streamed chat. `handler`: vLLM's."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": ""}], "stream": True, **_options(usage)}
    )

    def generate(outputs: AsyncIterator[Any]) -> AsyncIterator[str]:
        return handler.chat_completion_stream_generator(
            request,
            outputs,
            ID,
            MODEL,
            [],
            handler.renderer.tokenizer,
            RequestResponseMetadata(request_id=ID),
        )

    return generate


def completion_events(handler: Any, usage: bool) -> Events:
    """The events of a streamed completion. `handler`: vLLM's."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate(
        {"prompt": "x", "stream": True, "max_tokens": 2, **_options(usage)}
    )

    async def numbered(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for output in outputs:
            yield 0, output

    def generate(outputs: AsyncIterator[Any]) -> AsyncIterator[str]:
        return handler.completion_stream_generator(
            request,
            [{"type": "token", "prompt_token_ids": [3], "prompt": ""}],
            numbered(outputs),
            ID,
            1,
            MODEL,
            num_prompts=1,
            tokenizer=handler.renderer.tokenizer,
            request_metadata=RequestResponseMetadata(request_id=ID),
        )

    return generate


def _options(usage: bool) -> dict[str, Any]:
    return {"stream_options": {"include_usage": True}} if usage else {}


def chat_whole(handler: Any) -> Whole:
    """The answer to a chat that is not streamed. `handler`: vLLM's."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}]})

    def generate(outputs: AsyncIterator[Any]) -> Awaitable[Any]:
        made: Awaitable[Any] = handler.chat_completion_full_generator(
            request,
            outputs,
            ID,
            MODEL,
            [],
            handler.renderer.tokenizer,
            RequestResponseMetadata(request_id=ID),
        )
        return made

    return generate


def completion_whole(handler: Any) -> Whole:
    """The answer to a completion that is not streamed. `handler`: vLLM's."""
    from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    request = CompletionRequest.model_validate({"prompt": "x", "max_tokens": 2})

    async def generate(outputs: AsyncIterator[Any]) -> Any:
        return handler.request_output_to_completion_response(
            [output async for output in outputs],
            request,
            ID,
            1,
            MODEL,
            handler.renderer.tokenizer,
            RequestResponseMetadata(request_id=ID),
        )

    return generate
