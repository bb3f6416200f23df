# SPDX-License-Identifier: Apache-2.0
"""The outermost ASGI application: what must be decided before vLLM's own application sees a request.

    GET /health, GET /deltaserve/requests/{id}     answered here
    GET /ui ...                                    the status page (router/ui/)
    a path that is not served                      404
    a body longer than max_body_bytes              413 (and what the client still sends is read, up to a bound)
    a body that takes too long                     408
    kv_transfer_params that mean nothing here      400
    an API key that opens nothing                  401
    limits reached, or a deadline that cannot be met   429 with Retry-After (docs/overload.md)
    no decode worker for worker_wait seconds       503 with Retry-After, also if the last one goes later
    a stream that ends with an error               the error is its last event, without a [DONE]

Everything else is vLLM's. Errors have the shape of OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, TypeVar
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send

from router.admission import PROMPT_SEEN, Door, Key, KeyRing, Permit, Refused
from router.admission.keys import ANONYMOUS
from router.dispatcher import MAX_FLIGHTS, Dispatcher
from router.errors import error_body
from router.http_protocol import WHOLE
from router.observe import name_request
from router.placement import ANSWER_TOKENS, InvalidPlacement, parse_override
from router.processes.merge import whole_health
from router.processes.place import Place
from router.processes.siblings import Siblings
from router.route_header import naming_routes
from router.ui import StatusPage

T = TypeVar("T", int, float)

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Paths whose POST needs a decode worker."""
_READ = ("GET", "HEAD", "OPTIONS")
_WRITE = ("POST", "OPTIONS")
SERVED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(GENERATING, _WRITE),
    **dict.fromkeys(("/v1/messages/count_tokens", "/tokenize", "/detokenize"), _WRITE),
    **dict.fromkeys(("/v1/models", "/version", "/metrics", "/docs", "/redoc", "/openapi.json"), _READ),
}
"""What this server offers, with methods; vLLM's other paths steer an engine, and there is none here."""
OPEN = frozenset({"/metrics", "/version"})
"""What needs no API key, beside /health: probes and Prometheus have none."""
_RESPONSE = re.compile(r"^/v1/responses/[^/]+(/cancel)?$")
_TRACE = "/deltaserve/requests/"
_UNKNOWN_KEY = "this API key opens nothing; send a known one as `Authorization: Bearer KEY`"
_NO_DECODE_WORKER = "no decode worker is reachable; GET /health says what is missing"

MAX_PROMPTS = 128
"""Prompts in one request; each is a request of its own to the workers, and all of them hold one place at the door."""
_MANY_PROMPTS = re.compile(rb'"prompt"\s*:\s*\[\s*["\[]')
DRAIN_BODIES = 4
"""A refused body is read on for so many times the limit, so that the client comes to read the answer."""
DRAIN_SECONDS = 5.0


class _TooLong(Exception):
    """The body is longer than it may be."""


class _Gone(Exception):
    """The client left while it was sending."""


async def answer(
    send: Send, status: int, content: Any, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Send one JSON response."""
    body = json.dumps(content).encode()
    base = ((b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": body})


def _no_done_after_error(send: Send) -> Send:
    """Hold back the `[DONE]` that vLLM's streams send after an error event: a client must not take it for success."""
    failed = False

    async def guarded(message: Message) -> None:
        nonlocal failed
        body = message.get("body", b"")
        if body.startswith(b'data: {"error"'):
            failed = True
        elif failed and body == b"data: [DONE]\n\n":
            message = {**message, "body": b""}
        await send(message)

    return guarded


def _noting_first_byte(send: Send, permit: Permit) -> Send:
    """Tell the permit when the answer begins; only a stream's first byte is its first token."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body"):
            permit.first_byte()
        await send(message)

    return noting


def _no() -> bool:
    return False


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _credential(scope: Scope) -> bytes:
    """The API key as OpenAI's clients send it, or as Anthropic's do."""
    return _header(scope, b"authorization") or _header(scope, b"x-api-key")


def _number(name: bytes, text: bytes, kind: type[T]) -> T | None:
    """A header that is a number; None when it is empty. Raises Refused when it is something else."""
    if not text:
        return None
    try:
        return kind(text)
    except ValueError:
        raise Refused(400, f"{name.decode()}: {text[:40]!r} is no number") from None


def serves(path: str) -> bool:
    """Whether a path, or a template of paths, is let through to vLLM's application."""
    return path in SERVED or _RESPONSE.match(path) is not None


class Gateway:
    """See the module's description."""

    def __init__(
        self,
        app: App,
        dispatcher: Dispatcher,
        place: Place | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """`place` and `siblings`: among several processes, which share limits and answer for each other."""
        self._app = app
        self._dispatcher = dispatcher
        self._config = config = dispatcher.config
        self._siblings = siblings
        if place is not None:
            self._keys = place.keys
        else:
            self._keys = KeyRing.read(config.api_keys) if config.api_keys else KeyRing()
        self.door = Door(
            lambda: math.ceil(config.slots_per_seq * dispatcher.decode_slots),
            config.max_queued,
            config.ttft_slo,
            max(0.1, config.worker_wait),
            share=place.seat if place is not None else None,
        )
        self._under_way = 0
        self._page = StatusPage(dispatcher, siblings)
        if siblings is not None:
            siblings.answers["health"] = lambda _: self._own_health()
            siblings.answers["trace"] = dispatcher.traces.find
        dispatcher.roster.on_change = self.door.pump
        dispatcher.metrics.queued.set_function(lambda: self.door.queued)
        dispatcher.metrics.inside.set_function(lambda: self.door.inside)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # there is no WebSocket here, so none that would pass the keys by
            await send({"type": "websocket.close", "code": 1008})
            return
        path, method = scope["path"], scope["method"]
        key = self._keys.find(_credential(scope)) if self._keys else ANONYMOUS
        if path == "/health" and method in ("GET", "HEAD"):
            await self._health(send)
        elif self._page.serves(path):
            await self._page(send, method, path, key is not None)
        elif key is None and path not in OPEN:
            await self._refuse(send, 401, _UNKNOWN_KEY)
        elif path == "/metrics" and self._siblings is not None and method in _READ:
            await self._metrics(send, self._siblings)
        elif path.startswith(_TRACE) and method == "GET":
            await self._trace(send, unquote(path[len(_TRACE) :]))
        elif not serves(path):
            await self._refuse(send, 404, f"there is no {path} here; GET /openapi.json lists what there is")
        elif path in SERVED and method not in SERVED[path]:
            await self._refuse(send, 405, f"{path} takes {' or '.join(SERVED[path])}, not {method}")
        elif method == "POST" and key is not None:
            self._under_way += 1
            try:
                await self._post(scope, receive, send, key)
            finally:
                self._under_way -= 1
        else:
            await self._app(scope, receive, send)

    @property
    def in_flight(self) -> int:
        """Requests that this router would break off if it stopped now; 0: it may stop.

        HTTP requests from their head to the end of their answer, those that wait at the door among them; or engine
        requests where these are more: several answers to one request, answers in the background, a face with a port of
        its own.
        """
        return max(self._under_way, self._dispatcher.in_flight)

    # ---- answered here

    async def _health(self, send: Send) -> None:
        content = self._own_health()
        if self._siblings is not None:
            others = await self._siblings.ask("health")
            content = whole_health(content, others, self._siblings.processes)
        await answer(send, 503 if content["status"] == "unavailable" else 200, content)

    def _own_health(self) -> dict[str, Any]:
        report = self._dispatcher.roster.report()
        return {
            "status": report["status"],
            "model": self._config.model_name,
            "placement": self._config.placement,
            "in_flight": self.in_flight,
            "queued": self.door.queued,
            **report,
        }

    @staticmethod
    async def _metrics(send: Send, siblings: Siblings) -> None:
        body = await siblings.metrics()
        headers = [
            (b"content-type", CONTENT_TYPE_LATEST.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _trace(self, send: Send, request_id: str) -> None:
        trace = self._dispatcher.traces.find(request_id)
        if trace is None and self._siblings is not None:
            trace = next(iter(await self._siblings.ask("trace", request_id)), None)
        if trace is None:
            await self._refuse(send, 404, f"no recent request has the id {request_id!r}")
        else:
            await answer(send, 200, trace)

    async def _refuse(
        self,
        send: Send,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: int = 0,
        close: bool = False,
    ) -> None:
        self._dispatcher.metrics.refused.labels(str(status)).inc()
        headers: list[tuple[bytes, bytes]] = []
        if retry_after:
            headers.append((b"retry-after", str(retry_after).encode()))
        if close:
            headers.append((b"connection", b"close"))
        await answer(send, status, error_body(status, message, param), tuple(headers))

    # ---- requests with a body

    async def _post(self, scope: Scope, receive: Receive, send: Send, key: Key) -> None:
        limit = self._config.max_body_bytes
        try:
            if scope.get(WHOLE, _no)():  # nothing to wait for
                body = await self._body(scope, receive, limit)
            else:
                async with asyncio.timeout(self._config.client_timeout):
                    body = await self._body(scope, receive, limit)
        except _TooLong:
            await self._drain(receive, DRAIN_BODIES * limit)
            message = f"the body is longer than {limit} bytes (--max-body-bytes)"
            await self._refuse(send, 413, message, close=True)
            return
        except _Gone:
            return
        except TimeoutError:
            message = f"the body did not arrive within {self._config.client_timeout:g} s (--client-timeout)"
            await self._refuse(send, 408, message, close=True)
            return
        name_request(scope, body)
        if b"kv_transfer_params" in body:
            try:
                _check_override(body)
            except InvalidPlacement as error:
                await self._refuse(send, 400, str(error), param="kv_transfer_params")
                return
        if _MANY_PROMPTS.search(body) and (number := _prompts(body)) > MAX_PROMPTS:
            message = f"prompt: {number} prompts in one request, at most {MAX_PROMPTS} are accepted"
            await self._refuse(send, 400, message, param="prompt")
            return
        if scope["path"] in GENERATING:
            if not await self._dispatcher.roster.wait_decode(self._config.worker_wait):
                await self._refuse(send, 503, _NO_DECODE_WORKER, retry_after=1)
                return
            if self._dispatcher.in_flight >= MAX_FLIGHTS:
                await self._refuse(send, 503, f"{MAX_FLIGHTS} requests are in flight", retry_after=1)
                return
        sent = False

        async def replay() -> Message:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        if b'"stream"' in body:
            send = _no_done_after_error(send)
        if scope["path"] not in GENERATING:
            await self._app(scope, replay, send)
            return
        try:
            permit = await self._enter(scope, body, key)
        except Refused as refused:
            await self._refuse(send, refused.status, str(refused), retry_after=refused.retry_after)
            return
        try:
            PROMPT_SEEN.set(lambda tokens: self.door.pace.seen(len(body), tokens))
            send = self._unavailable_without_workers(naming_routes(send))
            await self._app(scope, replay, _noting_first_byte(send, permit) if b'"stream"' in body else send)
        finally:
            permit.leave()

    async def _enter(self, scope: Scope, body: bytes, key: Key) -> Permit:
        """A slot for this request. Raises Refused, also for headers that say nothing sensible."""
        cost = len(body) / self.door.pace.bytes_per_token + ANSWER_TOKENS
        priority = deadline = None
        for name, value in scope["headers"]:
            if name == b"x-priority":
                priority = _number(name, value, int)
            elif name == b"x-ttft-deadline-ms":
                deadline = _number(name, value, float)
        if deadline is not None and not 0 < deadline < 1e9:
            raise Refused(400, "x-ttft-deadline-ms: must be milliseconds, more than 0")
        return await self.door.enter(key, cost, priority, None if deadline is None else deadline / 1000)

    def _unavailable_without_workers(self, send: Send) -> Send:
        """Turn vLLM's 500 into 503 when what failed is that no decode worker is left: a client may try again then."""
        replaced = False

        async def guarded(message: Message) -> None:
            nonlocal replaced
            if (
                message["type"] == "http.response.start"
                and message["status"] == 500
                and not self._dispatcher.roster.ready("decode")
            ):
                replaced = True
                await self._refuse(send, 503, _NO_DECODE_WORKER, retry_after=1)
            if not replaced:
                await send(message)

        return guarded

    @staticmethod
    async def _body(scope: Scope, receive: Receive, limit: int) -> bytes:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise _TooLong
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _TooLong
            chunks.append(chunk)
            if not message.get("more_body"):
                return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @staticmethod
    async def _drain(receive: Receive, limit: int) -> None:
        size = 0
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while size <= limit:
                    message = await receive()
                    size += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body"):
                        return
        except TimeoutError:
            return


def _prompts(body: bytes) -> int:
    """Prompts that a request lists; bad JSON is vLLM's to refuse."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    prompt = document.get("prompt") if isinstance(document, dict) else None
    return len(prompt) if isinstance(prompt, list) else 0


def _check_override(body: bytes) -> None:
    """Raise InvalidPlacement when a request's kv_transfer_params are no placement; bad JSON is vLLM's to refuse."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    parse_override(document.get("kv_transfer_params"))
    extra = document.get("vllm_xargs")
    if isinstance(extra, dict) and "kv_transfer_params" in extra:
        raise InvalidPlacement("vllm_xargs: kv_transfer_params is not accepted there")
