# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry traces: one trace from the HTTP request through prefill, publish, load and decode. Off by default.

    POST /v1/...                       router, server        the HTTP request; continues the client's own `traceparent`
      request                          router                one engine request (several, for n > 1)
        handover.prefill               router, client        from dispatch to the boundary, or to its failure
          prefill                      prefill worker        from Add to Published
            load                       prefill worker        a checkpoint that its prompt starts from
            publish                    prefill worker        from the slowest rank's first byte to the commit
        decode                         router, client        one decode worker's part; another one for each resumption
          generate                     decode worker         from Add to the last token
            load                       decode worker         from the look-up of the record to every rank's report

The context travels in `Add.traceparent` (W3C Trace Context). Spans leave in the background over OTLP/gRPC; what cannot
be delivered is dropped: a collector that is away costs no request anything. With tracing off everything here does
nothing, and OpenTelemetry is not imported.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Literal

from deltaserve.config import TraceConfig

log = logging.getLogger(__name__)

Kind = Literal["internal", "server", "client"]
FLUSH_SECONDS = 1.0
"""How long the end of a process may wait for the collector."""


class Span:
    """A span that does nothing: what everything gets while tracing is off."""

    @property
    def traceparent(self) -> str:
        """W3C `traceparent` for a remote child; empty: there is no trace."""
        return ""

    def child(
        self, name: str, kind: Kind = "internal", start: float | None = None, **attributes: Any
    ) -> Span:
        """Begin a span below this one, now or at `start` (seconds since the epoch)."""
        return self

    def set(self, **attributes: Any) -> None:
        """Add attributes, named without the prefix `deltaserve.`; None is left out."""

    def event(self, name: str, **attributes: Any) -> None:
        """Note something that has just happened."""

    def end(self, error: str = "") -> None:
        """End it; only the first call counts. `error`: why it failed."""


NO_SPAN = Span()


class _Recording(Span):
    """A span of OpenTelemetry."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer, self._span = tracer, span
        self._ended = False

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def child(
        self, name: str, kind: Kind = "internal", start: float | None = None, **attributes: Any
    ) -> Span:
        from opentelemetry.trace import set_span_in_context

        return _begin(self._tracer, name, set_span_in_context(self._span), kind, start, attributes)

    def set(self, **attributes: Any) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Any) -> None:
        self._span.add_event(name, _named(attributes))

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if self._ended:
            return
        self._ended = True
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _State:
    tracer: Any = None
    provider: Any = None


def configure(config: TraceConfig, service: str, instance: str = "", exporter: Any = None) -> None:
    """Switch tracing on for this process, if `config` names a collector (or a test gives an `exporter`).

    `service` and `instance` become `service.name` and `service.instance.id`. Raises ValueError for an endpoint that is
    none, ImportError when OpenTelemetry's packages are missing.
    """
    if not config.endpoint and exporter is None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from deltaserve import __version__
    from deltaserve.telemetry.span_ids import SystemIds

    if exporter is None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        secure = config.endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=config.endpoint, insecure=not secure, timeout=5)
    resource = Resource.create(
        {"service.name": service, "service.instance.id": instance or service, "service.version": __version__}
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.ratio)), resource=resource, id_generator=SystemIds()
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    _State.provider, _State.tracer = provider, provider.get_tracer("deltaserve", __version__)
    log.info("traces go to %s", config.endpoint or "an exporter of the caller's")


def shut_down() -> None:
    """Send what is left, for at most FLUSH_SECONDS, and switch tracing off. Never raises."""
    provider, _State.provider, _State.tracer = _State.provider, None, None
    if provider is not None:
        try:
            provider.force_flush(int(FLUSH_SECONDS * 1000))
        except Exception as error:
            log.warning("the last spans are lost: %s", error)


def flush() -> None:
    """Send what has ended so far; for tests."""
    if _State.provider is not None:
        _State.provider.force_flush(30_000)


def enabled() -> bool:
    """Whether spans are recorded."""
    return _State.tracer is not None


def begin(name: str, traceparent: str = "", kind: Kind = "internal", **attributes: Any) -> Span:
    """Begin a span: below the remote one that `traceparent` names, or a trace of its own. NO_SPAN while off.

    A `traceparent` that means nothing begins a new trace.
    """
    tracer = _State.tracer
    if tracer is None:
        return NO_SPAN
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}) if traceparent else None
    return _begin(tracer, name, context, kind, None, attributes)


def _begin(
    tracer: Any, name: str, context: Any, kind: Kind, start: float | None, attributes: dict[str, Any]
) -> Span:
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    span = tracer.start_span(
        name,
        # Whatever context the running task may have is no parent of ours: parents are given.
        context=Context() if context is None else context,
        kind=SpanKind[kind.upper()],
        attributes=_named(attributes),
        start_time=None if start is None else int(min(start, time.time()) * 1e9),
    )
    return _Recording(tracer, span)


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes under this project's prefix; those of OpenTelemetry's own conventions are given as `http_...`."""
    named = {}
    for name, value in attributes.items():
        if value is None:
            continue
        key = _CONVENTIONS.get(name, f"deltaserve.{name}")
        named[key] = value if isinstance(value, bool | int | float | str) else str(value)
    return named


_CONVENTIONS = {
    "http_method": "http.request.method",
    "http_status": "http.response.status_code",
    "url_path": "url.path",
}
