# SPDX-License-Identifier: Apache-2.0
"""The engine for gRPC clients (deltaserve/wire/api.proto): unary and streaming, health, reflection.

    GenerateRequest ─▶ the JSON of a completion or a chat ─▶ the gateway, in this process ─▶ its events ─▶ GenerateReply

Decisions. It is a translation and no second server: keys, limits, deadlines, validation, placement, resumption and
errors are those of HTTP, because it is the same application that is called. HTTP's status becomes a gRPC code:

    400, 404, 413, 422   INVALID_ARGUMENT        429   RESOURCE_EXHAUSTED, with `retry-after` in the trailing metadata
    401                  UNAUTHENTICATED         503   UNAVAILABLE
    408                  DEADLINE_EXCEEDED       else  INTERNAL, also for an error event in a stream

A call that is cancelled, or whose deadline passes, looks to the application like a client that has gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from starlette.types import ASGIApp as App

from deltaserve.wire import api_pb2 as api
from deltaserve.wire.api_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

log = logging.getLogger(__name__)

SERVICE = api.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WATCH_SECONDS = 0.5
STOP_SECONDS = 2.0
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.INVALID_ARGUMENT,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_FORWARDED = ("authorization", "x-api-key", "x-priority", "x-ttft-deadline-ms", "traceparent", "tracestate")


class Refusal(Exception):
    """An answer that is none; `code` and `retry_after` are gRPC's and HTTP's."""

    def __init__(self, code: grpc.StatusCode, message: str, retry_after: str = "") -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


def body_of(request: api.GenerateRequest, model: str) -> tuple[str, dict[str, Any]]:
    """Path and body of the HTTP request that means the same. Raises Refusal when there is no input."""
    kind = request.WhichOneof("input")
    body: dict[str, Any] = {
        "model": request.model or model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    for field, value in request.sampling.ListFields():
        body[field.name] = list(value) if field.name in ("stop", "stop_token_ids") else value
    if kind == "chat":
        body["messages"] = [{"role": each.role, "content": each.content} for each in request.chat.messages]
        return "/v1/chat/completions", body
    if kind == "tokens":
        body["prompt"] = list(request.tokens.ids)
    elif kind == "prompt":
        body["prompt"] = request.prompt
    else:
        raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "input: give one of prompt, tokens and chat")
    return "/v1/completions", body


class _Call:
    """One HTTP request to the application, without HTTP."""

    def __init__(self, path: str, body: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
        self._data = json.dumps(body).encode()
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "grpc",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": None,
            "server": None,
            "state": {},
        }
        self._gone = asyncio.Event()
        self._sent = False
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._data, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            if message.get("body"):
                await self._parts.put(message["body"])
            if not message.get("more_body"):
                await self._parts.put(None)

    async def _run(self, app: App) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                self._parts.put_nowait(None)

    async def events(self, app: App) -> AsyncGenerator[dict[str, Any], None]:
        """The events of the stream, as JSON. Raises Refusal."""
        running = asyncio.create_task(self._run(app))
        try:
            rest = b""
            while (part := await self._parts.get()) is not None:
                *whole, rest = (rest + part).split(b"\n\n")
                if self._status != 200:
                    continue
                for text in whole:
                    data = text.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise Refusal(
                            CODES.get(event["error"].get("code"), grpc.StatusCode.INTERNAL),
                            event["error"]["message"],
                        )
                    yield event
            if self._status != 200:
                raise self._refusal(rest)
            raise Refusal(grpc.StatusCode.INTERNAL, "the answer ended without its end")
        finally:
            self._gone.set()
            if not running.done():
                running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _refusal(self, body: bytes) -> Refusal:
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"status {self._status}"
        retry_after = self._headers.get(b"retry-after", b"").decode()
        return Refusal(CODES.get(self._status, grpc.StatusCode.INTERNAL), message, retry_after)


def replies(event: dict[str, Any]) -> api.GenerateReply:
    """An event of a completion or a chat as a message."""
    reply = api.GenerateReply(request_id=event.get("id", ""))
    for choice in event["choices"]:
        reply.text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        reply.token_ids.extend(choice.get("token_ids") or ())
        reply.finish_reason = choice.get("finish_reason") or ""
        stop = choice.get("stop_reason")
        if isinstance(stop, str):
            reply.stop_string = stop
        elif isinstance(stop, int):
            reply.stop_token_id = stop
    if event.get("usage"):
        usage = event["usage"]
        reply.usage.prompt_tokens = usage["prompt_tokens"]
        reply.usage.completion_tokens = usage["completion_tokens"]
        reply.usage.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return reply


class Inference(InferenceServicer):
    """The service."""

    def __init__(self, app: App, model: str) -> None:
        """`app`: the gateway; `model`: the name under which it serves."""
        self._app, self._model = app, model

    async def Generate(self, request: api.GenerateRequest, context: Any) -> api.GenerateReply:
        whole = api.GenerateReply()
        async for reply in self._replies(request, context):
            text = whole.text + reply.text
            whole.MergeFrom(reply)  # token ids are appended, what is set replaces
            whole.text = text
        return whole

    async def GenerateStream(
        self, request: api.GenerateRequest, context: Any
    ) -> AsyncIterator[api.GenerateReply]:
        async for reply in self._replies(request, context):
            yield reply

    async def _replies(self, request: api.GenerateRequest, context: Any) -> AsyncIterator[api.GenerateReply]:
        metadata = dict(context.invocation_metadata() or ())
        headers = [(name.encode(), str(metadata[name]).encode()) for name in _FORWARDED if name in metadata]
        try:
            path, body = body_of(request, self._model)
            if request.request_id:
                headers.append((b"x-request-id", request.request_id.encode()))
            last: api.GenerateReply | None = None
            async with contextlib.aclosing(_Call(path, body, headers).events(self._app)) as events:
                async for event in events:
                    reply = replies(event)
                    if (
                        last is not None
                    ):  # usage comes in an event of its own, and belongs to the last message
                        last.usage.CopyFrom(reply.usage)
                    elif reply.finish_reason:
                        last = reply
                    elif reply.text or reply.token_ids:
                        yield reply
            if last is not None:
                yield last
        except Refusal as refusal:
            if refusal.retry_after:
                context.set_trailing_metadata((("retry-after", refusal.retry_after),))
            await context.abort(refusal.code, str(refusal))


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1: SERVING while `serving()`."""

    def __init__(self, serving: Callable[[], bool]) -> None:
        self._serving = serving

    def _status(self) -> health_pb2.HealthCheckResponse:
        kinds = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(
            status=kinds.Value("SERVING") if self._serving() else kinds.Value("NOT_SERVING")
        )

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service}")
        return self._status()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            status = self._status()
            if status != last:
                last = status
                yield status
            await asyncio.sleep(WATCH_SECONDS)


class GrpcServer:
    """The port. `start` and `close` frame its life."""

    def __init__(self, app: App, model: str, serving: Callable[[], bool], shared: bool = False) -> None:
        """`shared`: several processes listen on the port."""
        self.port = 0
        self._server: Any = grpc.aio.server(options=[("grpc.so_reuseport", int(shared))])
        add_InferenceServicer_to_server(Inference(app, model), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(Health(serving), self._server)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int, credentials: Any = None) -> None:
        """Listen. Raises OSError when the port cannot be bound."""
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        try:
            self.port = (
                self._server.add_insecure_port(address)
                if credentials is None
                else self._server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise OSError(f"{address} cannot be bound") from error
        await self._server.start()

    async def close(self) -> None:
        """End what is in flight after a moment. Never raises."""
        await self._server.stop(STOP_SECONDS)
