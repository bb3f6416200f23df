# SPDX-License-Identifier: Apache-2.0
"""`x-deltaserve-route`: which workers a request went to, and why. docs/placement.md has the format.

The head of a stream is held back until its first event, because a request is placed only when vLLM begins to stream it;
nothing comes later for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextvars import ContextVar

from starlette.types import Message, Send

from router.trace import Trace

HEADER = b"x-deltaserve-route"
LISTED = 4
"""Different routes that are named; a request for more answers than that says how many there are besides."""

ROUTES: ContextVar[list[Trace] | None] = ContextVar("ROUTES", default=None)
"""Where the dispatcher leaves the traces of what the running HTTP request asks for."""


def value(traces: Iterable[Trace]) -> bytes:
    """The header's value; empty without requests."""
    routes = list(dict.fromkeys(map(_one, traces)))
    more = [f"and {len(routes) - LISTED} more"] if len(routes) > LISTED else []
    return ", ".join(routes[:LISTED] + more).encode("ascii", "replace")


@functools.lru_cache(maxsize=256)  # policies have few words
def _printable(words: str) -> str:
    return "".join(character for character in words if character.isprintable() and character not in '"\\')


def _one(trace: Trace) -> str:
    why = _printable(trace.why)
    return f'{trace.route}; why="{why}"' if why else trace.route


def naming_routes(send: Send) -> Send:
    """A `send` that puts the header into the answer to whatever is asked for from now on in this context."""
    traces: list[Trace] = []
    ROUTES.set(traces)
    held: Message | None = None

    async def named(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start":
            held = message
            return
        if held is not None:
            start, held = held, None
            if route := value(traces):
                start = {**start, "headers": [*start.get("headers", ()), (HEADER, route)]}
            await send(start)
        await send(message)

    return named
