# SPDX-License-Identifier: Apache-2.0
"""The header that says where a request went, and why."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import pytest

from router.route_header import HEADER, ROUTES, naming_routes, value
from router.trace import Trace
from tests.unit.router.harness import cluster

PROMPT = list(range(100, 150))


def trace(route: str, why: str = "") -> Trace:
    return Trace("cmpl-1", 5, "auto", 0.0, route=route, why=why)


@pytest.mark.parametrize(
    ("traces", "wanted"),
    [
        ([], b""),
        ([trace("local policy d0")], b"local policy d0"),
        (
            [trace("handover p0 d0", "least outstanding work")],
            b'handover p0 d0; why="least outstanding work"',
        ),
        ([trace("local a d0"), trace("local a d0"), trace("local a d1")], b"local a d0, local a d1"),
        (
            [trace(f"local a d{i}") for i in range(9)],
            b"local a d0, local a d1, local a d2, local a d3, and 5 more",
        ),
        ([trace("local a d0", 'a"b\\c\r\nx: y\u2026')], b'local a d0; why="abcx: y?"'),
    ],
)
def test_the_value(traces: list[Trace], wanted: bytes) -> None:
    assert value(traces) == wanted


async def answered(*bodies: bytes, ask: Any = None) -> list[MutableMapping[str, Any]]:
    """What reaches the client of an answer of these pieces; `ask` is called before the first of them."""
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    named = naming_routes(send)
    await named({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
    if ask is not None:
        ask()
    for body in bodies:
        await named({"type": "http.response.body", "body": body, "more_body": body is not bodies[-1]})
    return sent


async def test_a_streams_head_waits_for_the_first_piece_and_has_the_route() -> None:
    async with cluster(policy="least", placement="auto", handover_min_tokens=20) as c:
        sent = await answered(b"1", b"2", ask=lambda: c.add(PROMPT))
        assert [message["type"].rpartition(".")[2] for message in sent] == ["start", "body", "body"]
        assert sent[0]["headers"] == [(b"a", b"b"), (HEADER, b'handover p0 d0; why="least outstanding work"')]
        sent = await answered(b"1", ask=lambda: c.add(PROMPT[:5]))
        assert sent[0]["headers"][1] == (
            HEADER,
            b'local short_prompt d0; why="5 tokens are fewer than 20"',
        )


async def test_an_answer_that_nothing_was_placed_for_has_none() -> None:
    sent = await answered(b"1")
    assert sent[0]["headers"] == [(b"a", b"b")]


async def test_each_answer_has_its_own() -> None:
    """The control: what another request left in this context does not show."""
    async with cluster() as c:
        await answered(b"1", ask=lambda: c.add(PROMPT))
        assert ROUTES.get()
        assert (await answered(b"1"))[0]["headers"] == [(b"a", b"b")]
