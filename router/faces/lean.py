# SPDX-License-Identifier: Apache-2.0
"""Face one's short way: plain completions and chats without what they do not use.

Happy path: a body that holds none but well-known fields ─▶ vLLM's own handler validates it, renders, tokenizes and
makes the sampling parameters ─▶ where it would start its generator of outputs, the request goes to the dispatcher with
a LeanStream as its sink ─▶ the stream's events, in vLLM's form. What is left out: FastAPI's routing and middleware,
AsyncLLM's queues and tasks, a pydantic object a token.

Requests that differ in a short prompt alone need the handler once (shapes.py): the next ones are rendered and
dispatched without it, streamed or not. A plain request that is not streamed and whose shape is not known takes the
handler whole.

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
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from router.faces import forms
from router.faces.chunks import Form, learn
from router.faces.lean_stream import FAILED, LeanStream
from router.faces.shapes import Shape, Shapes
from router.faces.whole import WholeForm, learn_whole
from router.http_protocol import LEAVING, PUSH, Leaving

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

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
_NAMES = {CHAT: ("chatcmpl-", ""), COMPLETION: ("cmpl-", "-0")}
"""What vLLM puts before a request's id for the response's, and behind that for the engine's."""
_REQUEST_ID = b"x-request-id"

_lean: ContextVar[_Lean | None] = ContextVar("lean", default=None)


class _Lean:
    """A lean request on its way through vLLM's handler; what the replaced names leave there for each other."""

    __slots__ = (
        "arguments",
        "core",
        "external_id",
        "form",
        "model",
        "push",
        "response_id",
        "stream",
        "usage",
        "whole",
    )

    def __init__(self, usage: bool, push: Callable[[bytes], bool] | None) -> None:
        self.usage, self.push = usage, push
        self.stream: LeanStream | None = None
        self.form: Form | None = None
        self.response_id = self.model = ""
        self.core: EngineCoreRequest | None = None
        """What vLLM has made of it."""
        self.external_id = ""
        """vLLM's name for it."""
        self.whole = False
        """It is not streamed, and vLLM's handler answers it."""
        self.arguments: tuple[Any, ...] = ()
        """What its prompt was rendered with; empty: otherwise than expected."""


@dataclass(frozen=True)
class _Handler:
    """vLLM's handler of one path, and the forms of its answers."""

    model: Any
    """The pydantic model of its requests."""
    create: Callable[..., Any]
    forms: dict[bool, Form]
    """By whether the usage is asked for."""
    whole: WholeForm
    model_name: str


class LeanApp:
    """ASGI: lean where it can be, `app` (vLLM's) otherwise. `prepare` must have run."""

    def __init__(self, app: Any, llm: Any, switch: Switch) -> None:
        """`app`: vLLM's application; `llm`: vLLM's AsyncLLM."""
        self._app = app
        self._llm = llm
        self._switch = switch
        self._handlers: dict[str, _Handler] = {}
        self._tasks: Any = None
        self._shapes = Shapes(llm.renderer, llm.model_config.max_model_len)

    async def prepare(self) -> None:
        """Take vLLM's handlers and learn the form of their events. Raises FormChanged."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        self._tasks = await self._llm.get_supported_tasks()
        self._note_arguments("render_chat_async")
        self._note_arguments("render_cmpl_async")
        chat, completion = self._app.state.openai_serving_chat, self._app.state.openai_serving_completion
        if chat is not None and chat.parser_cls is None:  # tools and reasoning take the whole way
            events = {usage: await learn(forms.chat_events(chat, usage), usage) for usage in (False, True)}
            whole = await learn_whole(forms.chat_whole(chat))
            self._replace(chat, "chat_completion_stream_generator", events)
            self._handlers[CHAT] = _Handler(
                ChatCompletionRequest, chat.create_chat_completion, events, whole, chat.models.model_name()
            )
        if completion is not None:
            events = {
                usage: await learn(forms.completion_events(completion, usage), usage)
                for usage in (False, True)
            }
            whole = await learn_whole(forms.completion_whole(completion))
            self._replace(completion, "completion_stream_generator", events)
            self._handlers[COMPLETION] = _Handler(
                CompletionRequest, completion.create_completion, events, whole, completion.models.model_name()
            )

    def _note_arguments(self, name: str) -> None:
        """Have the renderer's function `name` leave with a lean request what it was called with."""
        renderer = self._llm.renderer
        original = getattr(renderer, name)

        def noting(prompts: Any, *args: Any, **kwargs: Any) -> Any:
            lean = _lean.get()
            if lean is not None:
                alike = len(prompts) == 1 and not any(kwargs.values())  # extras of one request alone
                lean.arguments = args if alike else ()
            return original(prompts, *args, **kwargs)

        setattr(renderer, name, noting)

    def _replace(self, handler: Any, name: str, events: dict[bool, Form]) -> None:
        original = getattr(handler, name)
        parameters = list(inspect.signature(original).parameters)

        def generator(*args: Any, **kwargs: Any) -> Any:
            lean = _lean.get()
            if lean is None or lean.stream is None:
                return original(*args, **kwargs)
            names = dict(zip(parameters, args, strict=False)) | kwargs
            lean.form, lean.response_id, lean.model = (
                events[lean.usage],
                names["request_id"],
                names["model_name"],
            )
            return None

        handler.engine_client = _Client(handler.engine_client, self._core, self._begin)
        setattr(handler, name, generator)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._handlers:
            await self._app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        document = None if message.get("more_body") else plain(scope, body)
        if document is None or not await self._serve(scope, document, len(body), receive, send):
            await self._app(scope, again(message, receive), send)

    async def _serve(
        self, scope: Scope, document: dict[str, Any], nbytes: int, receive: Receive, send: Send
    ) -> bool:
        """Answer; False when vLLM's application shall, nothing has been sent then."""
        handler = self._handlers[scope["path"]]
        options = document.get("stream_options")
        usage = bool(options and options.get("include_usage"))
        key = self._shapes.key(scope, document, nbytes)
        if key and (shape := self._shapes.find(key)) is not None:
            tokens = self._shapes.render(document, shape.arguments, shape.room, shape.template)
            if tokens is not None:
                return await self._known(handler, shape, tokens, usage, scope, receive, send)
        try:
            request = handler.model.model_validate(document)
        except Exception:  # it will be refused, with the words that vLLM has for it
            return False
        scope["app"] = self._app
        raw = Request(scope, receive)
        lean = _Lean(usage, scope.get(PUSH))
        if not request.stream:
            return await self._whole(handler.create, request, raw, receive, send, lean, key, document)
        token = _lean.set(lean)
        try:
            await handler.create(request, raw)
        except Exception:
            return self._undo(lean)
        finally:
            _lean.reset(token)
        if lean.stream is None or lean.form is None:  # an ErrorResponse, most likely
            return self._undo(lean)
        self._note(key, document, scope, lean)
        await self._stream(lean.stream, lean.form, lean.response_id, lean.model, scope, receive, send)
        return True

    async def _known(
        self,
        handler: _Handler,
        shape: Shape,
        tokens: list[int],
        usage: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> bool:
        """A request of a shape that is known; False as in `_serve`."""
        before, behind = _NAMES[scope["path"]]
        response_id = before + (_request_id(scope) or uuid.uuid4().hex)
        request = shape.ask(tokens, response_id + behind)
        push = scope.get(PUSH) if shape.streamed else None
        stream = LeanStream(request, self._llm.renderer.tokenizer, self._stopped, push)
        try:
            self._switch.add(request, stream)
        except Exception:  # too many requests: vLLM has words for it
            return False
        if shape.streamed:
            form, model = handler.forms[usage], handler.model_name
            await self._stream(stream, form, response_id, model, scope, receive, send)
        else:
            await self._answer(stream, handler, response_id, scope, receive, send)
        return True

    def _note(self, key: str, document: dict[str, Any], scope: Scope, lean: _Lean) -> None:
        """Note a request's shape, when it has one and went through vLLM's handler as expected."""
        before, behind = _NAMES[scope["path"]]
        named = lean.external_id == f"{before}{_request_id(scope)}{behind}"
        if key and lean.core is not None and lean.arguments and named:
            self._shapes.note(key, document, lean.core, lean.arguments)

    def _undo(self, lean: _Lean) -> bool:
        if lean.stream is not None:
            self._switch.abort([lean.stream.request.request_id])
        return False

    async def _stream(
        self,
        stream: LeanStream,
        form: Form,
        response_id: str,
        model: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        forget = _leaving(stream, scope, receive)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await stream.events(form, response_id, model, send)
        finally:
            forget()
            if not stream.ended:
                self._switch.abort([stream.request.request_id])

    async def _answer(
        self,
        stream: LeanStream,
        handler: _Handler,
        response_id: str,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        """The answer that is not streamed."""
        forget = _leaving(stream, scope, receive)
        created = int(time.time())
        try:
            await stream.end()
        finally:
            forget()
            if not stream.ended:
                self._switch.abort([stream.request.request_id])
        if not stream.ended:
            return
        if stream.failed:
            from vllm.exceptions import GenerationError

            scope["app"] = self._app
            await self._excuse(GenerationError(FAILED), Request(scope, receive), receive, send)
            return
        await _json(send, 200, stream.whole(handler.whole, response_id, handler.model_name, created))

    async def _whole(
        self,
        create: Any,
        request: Any,
        raw: Any,
        receive: Receive,
        send: Send,
        lean: _Lean,
        key: str,
        document: dict[str, Any],
    ) -> bool:
        """A request that is not streamed: vLLM's handler, whole; it ends when the client leaves."""
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse

        lean.whole = True
        token = _lean.set(lean)
        answering = asyncio.ensure_future(create(request, raw))
        _lean.reset(token)
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
        if isinstance(result, ErrorResponse):
            await _json(send, result.error.code, result.model_dump_json().encode())
            return True
        self._note(key, document, raw.scope, lean)
        await _json(send, 200, result.model_dump_json().encode())
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

    def _core(self, lean: _Lean, prompt: Any, params: Any, request_id: str, **options: Any) -> None:
        """Where vLLM's handler would start its generator of outputs: make the engine-core request."""
        reasoning = {name: options.pop(name, None) for name in ("reasoning_ended", "reasoning_parser_kwargs")}
        request = self._llm.input_processor.process_inputs(
            request_id, prompt, params, supported_tasks=self._tasks, **options
        )
        for name, value in reasoning.items():
            if value is not None:
                setattr(request, name, value)
        self._llm.input_processor.assign_request_id(request)
        lean.core, lean.external_id = request, request_id

    def _begin(self, lean: _Lean) -> None:
        """Dispatch it. Raises what vLLM raises there."""
        assert lean.core is not None
        stream = LeanStream(lean.core, self._llm.renderer.tokenizer, self._stopped, lean.push)
        self._switch.add(lean.core, stream)
        lean.stream = stream

    def _stopped(self, request_id: str) -> None:
        self._switch.abort([request_id], stopped=True)


class _Client:
    """vLLM's AsyncLLM, but that a lean request begins elsewhere."""

    def __init__(self, client: Any, core: Callable[..., None], begin: Callable[[_Lean], None]) -> None:
        self._client = client
        self._core, self._begin = core, begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        lean = _lean.get()
        if lean is None:
            return self._client.generate(*args, **kwargs)
        if lean.whole:
            with contextlib.suppress(Exception):  # the client says it, where its outputs are asked for
                self._core(lean, *args, **kwargs)
            return self._client.generate(*args, **kwargs)
        self._core(lean, *args, **kwargs)
        self._begin(lean)
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


def _request_id(scope: Scope) -> str:
    """The id that the response's is made from; empty: one is made up for it."""
    return next((value.decode() for name, value in scope["headers"] if name == _REQUEST_ID), "")


async def _json(send: Send, status: int, data: bytes) -> None:
    headers = [(b"content-length", str(len(data)).encode()), (b"content-type", _JSON)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def _leaving(stream: LeanStream, scope: Scope, receive: Receive) -> Callable[[], object]:
    """Have the stream told when its client leaves; returns what forgets that."""
    connection: Leaving | None = scope.get(LEAVING)
    if connection is not None:
        connection.then(stream.leave)
        return connection.forget
    leaving = asyncio.ensure_future(receive())
    leaving.add_done_callback(functools.partial(_left, stream))
    return leaving.cancel


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
