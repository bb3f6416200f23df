# SPDX-License-Identifier: Apache-2.0
"""An answer's head and the first piece of its body are one write; and who is told that a client has left."""

from __future__ import annotations

import asyncio

from router.http_protocol import HeadWithBody, Leaving


class _Written:
    """A transport that notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append(b"closed")


async def test_an_answers_head_goes_out_with_its_first_piece() -> None:
    transport, loop = _Written(), asyncio.get_running_loop()
    with_body = HeadWithBody(transport, loop)  # type: ignore[arg-type]
    for piece in (b"head ", b"one", b"two"):
        with_body.write(piece)
    await asyncio.sleep(0)
    with_body.close()
    assert transport.done == [b"head one", b"two", b"closed"]


async def test_a_head_without_a_body_is_not_kept() -> None:
    transport, loop = _Written(), asyncio.get_running_loop()
    alone = HeadWithBody(transport, loop)  # type: ignore[arg-type]
    alone.write(b"head")
    assert transport.done == [], "the control"
    await asyncio.sleep(0)
    assert transport.done == [b"head"]
    alone.write(b"late")
    assert transport.done == [b"head", b"late"]
    closed = HeadWithBody(transport, loop)  # type: ignore[arg-type]
    closed.write(b"second")
    closed.close()
    await asyncio.sleep(0)
    assert transport.done[2:] == [b"second", b"closed"]


def test_who_asks_is_told_when_the_client_leaves_and_at_once_when_it_has_left() -> None:
    told: list[str] = []
    leaving = Leaving()
    leaving.then(lambda: told.append("then"))
    assert told == [], "the control"
    leaving.left()
    assert told == ["then"]
    leaving.then(lambda: told.append("late"))
    assert told == ["then", "late"]


def test_who_has_ended_is_not_told() -> None:
    told: list[str] = []
    leaving = Leaving()
    leaving.then(lambda: told.append("then"))
    leaving.forget()
    leaving.left()
    assert told == []
