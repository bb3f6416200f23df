# SPDX-License-Identifier: Apache-2.0
"""Face one's short way: plain completions and chats without what they do not use.

Happy path: a body that holds none but well-known fields ─▶ vLLM's own handler validates it, renders, tokenizes and
makes the sampling parameters ─▶ where it would start its generator of outputs, the request goes to the dispatcher with
a LeanStream as its sink ─▶ the stream's events, in vLLM's form. A plain request that is not streamed takes vLLM's
handler whole. What is left out: FastAPI's routing and middleware, AsyncLLM's queues and tasks, a pydantic object a
token.

Anything else, and anything that goes wrong before the first output: vLLM's application gets the same body, and says
what it has to say.

Decisions. The handlers are vLLM's, with three names replaced on the two instances: `engine_client`, whose `generate`
is where a request leaves vLLM's hands, and the two generators of events. Outside of a lean request the replaced names
do what they did. So no rule of vLLM's is written down here again, but one: which fields a plain body may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope, Send

from router.faces.chunks import ID, MODEL, Form, learn
from router.faces.lean_stream import LeanStream

if TYPE_CHECKING:
    from router.faces.switch import Switch

log = logging.getLogger(__name__)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_SAMPLING = {
    "model",
    "stream",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "user",
    "priority",
    "kv_transfer_params",
    "cache_salt",
    "request_id",
}
PLAIN: dict[str, frozenset[str]] = {
    CHAT: frozenset({*_SAMPLING, "messages", "max_completion_tokens", "chat_template_kwargs"}),
    COMPLETION: frozenset({*_SAMPLING, "prompt"}),
}
"""Fields that a plain body may have, by path; beside them `n` of 1 and `stream_options` with `include_usage` alone."""
_OTHER_HEADERS = frozenset({b"origin", b"endpoint-load-metrics-format"})
"""Headers that vLLM's application answers with headers."""
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_JSON = b"application/json"

_lean: ContextVar[_Lean | None] = ContextVar("lean", default=None)


class _Lean:
    """A lean request on its way through vLLM's handler; what the replaced names leave there for each other."""

    __slots__ = ("form", "model", "response_id", "stream", "usage")

    def __init__(self, usage: bool) -> None:
        self.usage = usage
        self.stream: LeanStream | None = None
        self.form: Form | None = None
        self.response_id = self.model = ""


class LeanApp:
    """ASGI: lean where it can be, `app` (vLLM's) otherwise. `prepare` must have run."""

    def __init__(self, app: Any, llm: Any, switch: Switch) -> None:
        """`app`: vLLM's application; `llm`: vLLM's AsyncLLM."""
        self._app = app
        self._llm = llm
        self._switch = switch
        self._handlers: dict[str, Any] = {}
        self._tasks: Any = None

    async def prepare(self) -> None:
        """Take vLLM's handlers and learn the form of their events. Raises FormChanged."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        self._tasks = await self._llm.get_supported_tasks()
        chat, completion = self._app.state.openai_serving_chat, self._app.state.openai_serving_completion
        if chat is not None and chat.parser_cls is None:  # tools and reasoning take the whole way
            forms = {usage: await learn(_chat_events(chat, usage), usage) for usage in (False, True)}
            self._replace(chat, "chat_completion_stream_generator", forms)
            self._handlers[CHAT] = (ChatCompletionRequest, chat.create_chat_completion)
        if completion is not None:
            forms = {
                usage: await learn(_completion_events(completion, usage), usage) for usage in (False, True)
            }
            self._replace(completion, "completion_stream_generator", forms)
            self._handlers[COMPLETION] = (CompletionRequest, completion.create_completion)

    def _replace(self, handler: Any, name: str, forms: dict[bool, Form]) -> None:
        original = getattr(handler, name)
        parameters = list(inspect.signature(original).parameters)

        def generator(*args: Any, **kwargs: Any) -> Any:
            lean = _lean.get()
            if lean is None or lean.stream is None:
                return original(*args, **kwargs)
            names = dict(zip(parameters, args, strict=False)) | kwargs
            lean.form, lean.response_id, lean.model = (
                forms[lean.usage],
                names["request_id"],
                names["model_name"],
            )
            return None

        handler.engine_client = _Client(handler.engine_client, self._begin)
        setattr(handler, name, generator)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._handlers:
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        document = None if message.get("more_body") else plain(scope, body)
        if document is None or not await self._serve(scope, document, receive, send):
            await self._app(scope, again(message, receive), send)

    async def _serve(self, scope: Scope, document: dict[str, Any], receive: Receive, send: Send) -> bool:
        """Answer; False when vLLM's application shall, nothing has been sent then."""
        from starlette.requests import Request

        model, create = self._handlers[scope["path"]]
        try:
            request = model.model_validate(document)
        except Exception:  # it will be refused, with the words that vLLM has for it
            return False
        options = document.get("stream_options")
        scope["app"] = self._app
        raw = Request(scope, receive)
        if not request.stream:
            return await self._whole(create, request, raw, receive, send)
        lean = _Lean(bool(options and options.get("include_usage")))
        token = _lean.set(lean)
        try:
            await create(request, raw)
        except Exception:
            return self._undo(lean)
        finally:
            _lean.reset(token)
        if lean.stream is None or lean.form is None:  # an ErrorResponse, most likely
            return self._undo(lean)
        await self._stream(lean.stream, lean.form, lean.response_id, lean.model, receive, send)
        return True

    def _undo(self, lean: _Lean) -> bool:
        if lean.stream is not None:
            self._switch.abort([lean.stream.request.request_id])
        return False

    async def _stream(
        self, stream: LeanStream, form: Form, response_id: str, model: str, receive: Receive, send: Send
    ) -> None:
        leaving = asyncio.ensure_future(receive())
        leaving.add_done_callback(functools.partial(_left, stream))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await stream.events(form, response_id, model, send)
        finally:
            leaving.cancel()
            if not stream.ended:
                self._switch.abort([stream.request.request_id])

    async def _whole(self, create: Any, request: Any, raw: Any, receive: Receive, send: Send) -> bool:
        """A request that is not streamed: vLLM's handler, whole; it ends when the client leaves."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        answering = asyncio.ensure_future(create(request, raw))
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                return True
            failed = answering.exception()
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await answering
        if failed is not None:
            await self._excuse(failed, raw, receive, send)
            return True
        result = answering.result()
        status = result.error.code if isinstance(result, ErrorResponse) else 200
        data = result.model_dump_json().encode()
        headers = [(b"content-length", str(len(data)).encode()), (b"content-type", _JSON)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})
        return True

    async def _excuse(self, error: BaseException, raw: Any, receive: Receive, send: Send) -> None:
        """Answer an exception of a handler as vLLM's application does."""
        handlers = self._app.exception_handlers
        handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
        if handler is None:
            raise error
        answer = handler(raw, error)
        if inspect.isawaitable(answer):
            answer = await answer
        await answer(raw.scope, receive, send)

    def _begin(self, prompt: Any, params: Any, request_id: str, **options: Any) -> None:
        """Where vLLM's handler would start its generator of outputs: dispatch. Raises what vLLM raises there."""
        lean = _lean.get()
        assert lean is not None
        reasoning = {name: options.pop(name, None) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
        request = self._llm.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=self._tasks, **options
        )
        for name, value in reasoning.items():
            if value is not None:
                setattr(request, name, value)
        self._llm.input_processor.assign_request_id(request)
        stream = LeanStream(request, self._llm.renderer.tokenizer, self._stopped)
        self._switch.add(request, stream)
        lean.stream = stream

    def _stopped(self, request_id: str) -> None:
        self._switch.abort([request_id], stopped=True)


class _Client:
    """vLLM's AsyncLLM, but that a lean request begins elsewhere."""

    def __init__(self, client: Any, begin: Callable[..., None]) -> None:
        self._client = client
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if _lean.get() is None:
            return self._client.generate(*args, **kwargs)
        self._begin(*args, **kwargs)
        return _nothing()


async def _nothing() -> AsyncIterator[Any]:
    """Outputs that nobody reads: the replaced generator of events does not ask for them."""
    return
    yield


def plain(scope: Scope, body: bytes) -> dict[str, Any] | None:
    """A request's body, when the short way does for it; None otherwise, also when it is no JSON object."""
    kind = b""
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value
        elif name in _OTHER_HEADERS:
            return None
    if kind.partition(b";")[0].strip().lower() != _JSON:
        return None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    number, options = document.pop("n", 1), document.get("stream_options")
    if number not in (1, None) or isinstance(number, bool):
        return None
    if options is not None and (not isinstance(options, dict) or options.keys() - {"include_usage"}):
        return None
    fields = PLAIN[scope["path"]]
    if any(name not in fields and name != "stream_options" for name in document):
        return None
    if scope["path"] == COMPLETION and not _one_prompt(document.get("prompt")):
        return None
    return document


def _one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
    )


def _left(stream: LeanStream, receiving: asyncio.Future[Message]) -> None:
    if not receiving.cancelled() and (
        receiving.exception() is not None or receiving.result()["type"] == "http.disconnect"
    ):
        stream.leave()


def again(first: Message, receive: Receive) -> Receive:
    """`receive`, after the message that has been read already."""
    pending = [first]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _chat_events(handler: Any, usage: bool) -> Callable[[AsyncIterator[Any]], AsyncIterator[str]]:
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


def _completion_events(handler: Any, usage: bool) -> Callable[[AsyncIterator[Any]], AsyncIterator[str]]:
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
