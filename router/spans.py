# SPDX-License-Identifier: Apache-2.0
"""The router's spans of one engine request; deltaserve/telemetry/tracing.py has the picture of the whole trace.

A leg is one worker's part of a request: `handover.prefill` or `decode`. A worker that is lost ends its leg with an
error, and the one that goes on has a leg of its own, so a resumption is visible as such.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from deltaserve.telemetry import tracing
from deltaserve.telemetry.tracing import NO_SPAN, Span
from router.trace import Trace

HTTP_SPAN: ContextVar[Span] = ContextVar("deltaserve_http_span", default=NO_SPAN)
"""The HTTP request that the running task answers."""

_LEGS = {"prefill": "handover.prefill", "decode": "decode"}


class RequestSpans:
    """Spans of a request that is not traced: nothing."""

    def leg(self, stage: str, worker_id: str) -> str:
        """The request goes to a worker; returns the `traceparent` for it."""
        return ""

    def early(self, worker_id: str) -> str:
        """A worker reads for the request before it goes there; returns the `traceparent` for it."""
        return ""

    def adopt(self) -> None:
        """It has gone to that worker."""

    def drop_early(self) -> None:
        """It will not go there. Without an early read nothing happens."""

    def leave(self, error: str = "") -> None:
        """It has left that worker. Without a leg nothing happens."""

    def end(self, trace: Trace) -> None:
        """It is over."""


NO_SPANS = RequestSpans()


class _Recording(RequestSpans):
    """Spans of one that is."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._leg: Span | None = None
        self._early: Span | None = None

    def leg(self, stage: str, worker_id: str) -> str:
        self.leave()
        self._leg = self._span.child(_LEGS[stage], "client", worker_id=worker_id)
        return self._leg.traceparent

    def early(self, worker_id: str) -> str:
        self.drop_early()
        self._early = self._span.child(_LEGS["decode"], "client", worker_id=worker_id, early=True)
        return self._early.traceparent

    def adopt(self) -> None:
        self.leave()
        self._leg, self._early = self._early, None

    def drop_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            early.end("nothing came of it")

    def leave(self, error: str = "") -> None:
        leg, self._leg = self._leg, None
        if leg is not None:
            leg.end(error)

    def end(self, trace: Trace) -> None:
        failed = trace.status == "error"
        self.drop_early()
        self.leave(trace.detail if failed else "")
        self._span.set(
            route=trace.route,
            why=trace.why or None,
            status=trace.status,
            finish_reason=trace.finish_reason,
            failure=trace.failure or None,
            from_store=trace.from_store,
            local=trace.local,
            recomputed=trace.recomputed,
            boundary=trace.boundary or None,
            boundary_bytes=trace.boundary_bytes,
            output_tokens=trace.output_tokens,
            resumes=trace.resumes,
            ttft=trace.first_token_after,
        )
        self._span.end(f"{trace.failure}: {trace.detail}" if failed else "")


def begin(trace: Trace) -> RequestSpans:
    """The spans of a request that has just come, below the HTTP request of the running task."""
    if not tracing.enabled():
        return NO_SPANS
    parent = HTTP_SPAN.get()
    attributes: dict[str, Any] = {"request_id": trace.request_id, "prompt_tokens": trace.prompt_tokens}
    if parent is NO_SPAN:
        return _Recording(tracing.begin("request", **attributes))
    return _Recording(parent.child("request", **attributes))
