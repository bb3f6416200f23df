# SPDX-License-Identifier: Apache-2.0
"""Around every HTTP request: its id, its span, and its line in a JSON log.

X-Request-Id    the client's, when it is printable and short, else one that is made here; the answer carries it too,
                and the response's `id` is made from it (`chatcmpl-<it>`, `cmpl-<it>`)
traceparent     the client's trace goes on; without one a request for tokens begins its own
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp as App
from starlette.types import Message, Receive, Scope, Send

from deltaserve.telemetry import tracing
from deltaserve.telemetry.logs import REQUEST_ID
from deltaserve.telemetry.tracing import NO_SPAN
from router.dispatcher import Dispatcher
from router.spans import HTTP_SPAN

log = logging.getLogger(__name__)

HEADER = b"x-request-id"
KEY = "deltaserve.request_id"
"""Where the ASGI scope keeps a request's id."""
_SENSIBLE = re.compile(rb"[\w.:-]{1,128}", re.ASCII)
_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}
_QUIET = ("/health", "/metrics", "/ui")
"""Paths that somebody asks for every second: no span, no line."""


class Observed:
    """See the module's description. Wraps the outermost application."""

    def __init__(self, app: App, dispatcher: Dispatcher) -> None:
        self._app = app
        self._lines = dispatcher.config.log.format == "json"
        dispatcher.metrics.watch(dispatcher.roster, dispatcher.policy.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path.startswith(_QUIET):
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        request_id = given.decode() if given and _SENSIBLE.fullmatch(given) else uuid.uuid4().hex
        scope[KEY] = request_id
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (HEADER, request_id.encode())]}
            await send(message)

        span = NO_SPAN
        if tracing.enabled():
            traceparent = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
            span = tracing.begin(
                f"{scope['method']} {path}",
                traceparent.decode("ascii", "replace"),
                "server",
                http_method=scope["method"],
                url_path=path,
                request_id=request_id,
            )
        token = HTTP_SPAN.set(span)
        named = REQUEST_ID.set(_PREFIX.get(path, "") + request_id)
        began = time.monotonic()
        try:
            await self._app(scope, receive, noting)
        finally:
            if self._lines:
                took = time.monotonic() - began
                log.info("%s %s %d after %.3f s", scope["method"], path, status, took)
            REQUEST_ID.reset(named)
            HTTP_SPAN.reset(token)
            span.set(http_status=status or None)
            span.end(f"status {status}" if status >= 500 else "")


def name_request(scope: Scope, body: bytes) -> None:
    """Give the request's id to vLLM, which makes the response's from it; one that the body names stays in force."""
    request_id = scope.get(KEY)
    if request_id is None or b'"request_id"' in body:
        return
    others = [(name, value) for name, value in scope["headers"] if name != HEADER]
    scope["headers"] = [*others, (HEADER, request_id.encode())]
