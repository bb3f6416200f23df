# SPDX-License-Identifier: Apache-2.0
"""What an orchestrator asks a worker, over HTTP on its metrics port.

    GET /alive    200 while the event loop goes round; 503: restart this process (an engine that dies ends it anyway)
    GET /ready    200 while the worker is in the register and takes new requests; 503: it loads, drains or leaves
    GET /metrics  Prometheus (every other path too)

The port opens when the engine has been loaded: before that, neither. The two answers are apart on purpose: a worker
that drains is alive, and restarting it would lose what it is finishing; one that is cut off from etcd goes on serving,
and counts as ready. The answers come from threads of this server, so that a loop that hangs cannot answer for itself.

Plain HTTP also where gRPC is encrypted: nothing here is secret, and a probe has no certificate.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, make_wsgi_app

LOOP_SECONDS = 3.0
"""How long the event loop has to go round once. Less than a probe's own patience, so that the answer arrives."""


class Health:
    """Alive and ready, as seen from the process's other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ready = False
        """Set when the worker has joined, cleared when it begins to leave."""
        self._loop = loop

    def alive(self) -> bool:
        """Whether the event loop goes round; takes at most `LOOP_SECONDS`."""
        turned = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # the loop has been closed
            return False
        return turned.wait(LOOP_SECONDS)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Probes come every few seconds; they are no news."""


def application(health: Health) -> Callable[..., Iterable[bytes]]:
    """The WSGI application."""
    metrics = make_wsgi_app(REGISTRY)
    questions: dict[str, Callable[[], bool]] = {"/alive": health.alive, "/ready": lambda: health.ready}

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        question = questions.get(environ["PATH_INFO"])
        if question is None:
            return metrics(environ, start_response)
        yes = question()
        start_response("200 OK" if yes else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [b"yes\n" if yes else b"no\n"]

    return answer


def serve(host: str, port: int, health: Health) -> Callable[[], None]:
    """Answer on threads until the result is called. Raises OSError when the port cannot be bound."""
    kind = _Server6 if ":" in host else _Server
    server = make_server(host, port, application(health), kind, _Quiet)
    threading.Thread(target=server.serve_forever, name="probes", daemon=True).start()

    def close() -> None:
        server.shutdown()
        server.server_close()

    return close
