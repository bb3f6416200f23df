# SPDX-License-Identifier: Apache-2.0
"""A collector of traces: OTLP over gRPC, in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service_grpc

from tests.support.patience import HUNG

TREE = {
    "POST /v1/completions": "(remote)",
    "request": "POST /v1/completions",
    "handover.prefill": "request",
    "prefill": "handover.prefill",
    "publish": "prefill",
    "decode": "request",
    "generate": "decode",
    "load": "generate",
}
"""Name → parent of every span of a request that was handed over."""


@dataclass(frozen=True)
class Seen:
    """One span, as it arrived."""

    name: str
    trace: str
    span: str
    parent: str
    service: str
    attributes: dict[str, Any]
    start: int
    end: int
    failed: bool


class Collector(service_grpc.TraceServiceServicer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        self.url = ""
        self._spans: list[Seen] = []
        self._lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        """Called by exporters."""
        with self._lock:
            for resource in request.resource_spans:
                name = _attributes(resource.resource.attributes).get("service.name", "")
                for scope in resource.scope_spans:
                    self._spans += [_seen(span, name) for span in scope.spans]
        return service.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        """What has arrived."""
        with self._lock:
            return list(self._spans)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._spans.clear()

    def wait_for(self, *names: str, trace: str = "") -> list[Seen]:
        """The spans (of one trace) once all of these names are among them."""
        end = time.monotonic() + HUNG
        while True:
            found = [span for span in self.spans if trace in ("", span.trace)]
            missing = set(names) - {span.name for span in found}
            if not missing:
                return found
            assert time.monotonic() < end, f"no spans {missing} among {sorted({s.name for s in found})}"
            time.sleep(0.05)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value") or "string_value") for pair in pairs}


def _seen(span: Any, name: str) -> Seen:
    return Seen(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        name,
        _attributes(span.attributes),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port of the loopback."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0)


def parents(spans: list[Seen]) -> dict[str, str]:
    """Name → name of the parent, or "(remote)" for one that is not among them, or "" for none."""
    by_id = {span.span: span.name for span in spans}
    return {span.name: by_id.get(span.parent, "(remote)") if span.parent else "" for span in spans}
