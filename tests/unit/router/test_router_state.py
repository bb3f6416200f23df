# SPDX-License-Identifier: Apache-2.0
"""What the status page calls a fault: loads after which a worker computed the prompt, and what the log says."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from router.dispatcher import Dispatcher
from router.ui.state import Snapshots
from tests.unit.router.harness import Cluster, cluster, until

PROMPT = list(range(50))


@pytest.fixture
def pages() -> Iterator[list[Snapshots]]:
    """Pages that a test makes; their log handlers go with it."""
    made: list[Snapshots] = []
    yield made
    for page in made:
        for name in ("router", "deltaserve"):
            logging.getLogger(name).removeHandler(page.fault_log)


def loads(dispatcher: Dispatcher, pages: list[Snapshots]) -> list[tuple[str, str]]:
    """Request and words of every failed load that a new page shows."""
    pages.append(Snapshots(dispatcher))
    faults: list[dict[str, Any]] = pages[-1].now()["faults"]
    return [(fault["request"], fault["text"]) for fault in faults if fault["source"] == "load"]


async def failed_load(c: Cluster, kind: str) -> str:
    """A request whose boundary could not be restored; its response's id."""
    c.decode.knobs.load_failure = kind
    name = c.add(PROMPT)
    await c.finish(name)
    c.decode.knobs.load_failure = ""
    return name.removesuffix("-0")


async def test_a_failed_load_is_a_fault_and_one_that_worked_is_none(pages: list[Snapshots]) -> None:
    async with cluster() as c:
        await c.run(PROMPT)
        assert loads(c.dispatcher, pages) == []
        name = await failed_load(c, "digest")
        assert loads(c.dispatcher, pages) == [(name, "d0 recomputed the prompt: digest")]
        assert c.trace(name)["load_failure"] == c.trace(name)["detail"] == "d0 recomputed the prompt: digest"


async def test_a_failed_load_is_a_fault_whatever_went_wrong_before(pages: list[Snapshots]) -> None:
    """`detail` keeps the first thing that went wrong, so it cannot say that a load failed later."""
    async with cluster() as c:
        c.decode.knobs.step_seconds = 0.02
        port = c.decode.port
        c.dispatcher.config.resume_wait = 60.0
        name = c.add(PROMPT, max_tokens=40)
        await until(lambda: bool(c.outputs[name]))
        await c.decode.die()
        c.decode.knobs.load_failure = "missing"
        await c.decode.start(port)
        await c.finish(name)
        trace = c.trace(name)
        assert trace["failure"] == "decode_failed"
        assert "recomputed" not in trace["detail"]
        assert loads(c.dispatcher, pages) == [(name.removesuffix("-0"), "d0 recomputed the prompt: missing")]


async def test_words_alone_are_no_failed_load(pages: list[Snapshots]) -> None:
    """The control: a page that looked for the words in `detail` would show this request."""
    async with cluster() as c:
        name = c.add(PROMPT)
        await c.finish(name)
        trace = c.dispatcher.traces.recent(1)[0]
        trace.failure, trace.detail = "decode_failed", "d0: said that it recomputed the prompt: no"
        assert loads(c.dispatcher, pages) == []
