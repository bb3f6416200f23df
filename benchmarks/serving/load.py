# SPDX-License-Identifier: Apache-2.0
"""An open loop: every request goes out at its time, whatever has become of those before it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.serving.client import RequestFailed


@dataclass
class Sent:
    """What became of one request; seconds after the row's begin."""

    at: float
    """When it was to go out: what waiting is counted from, so that a late client counts too."""
    answer: int
    """Tokens asked for."""
    lag: float = 0.0
    """How much later it did go out."""
    events: list[float] = field(default_factory=list)
    """When tokens came."""
    prefilled: float | None = None
    """When the prefill had answered, where the client hears of it."""
    request_id: str = ""
    error: str = ""
    """Why it failed; empty: it did not."""


@dataclass
class Load:
    """One row's requests, and what the client took for itself."""

    sent: list[Sent]
    begin: float
    """On `time.monotonic`."""
    seconds: float
    """From the first request to the last answer, or to the end of patience."""
    client_cpu: float
    """Seconds of CPU time of this process meanwhile."""


Ask = Callable[[Sent, float], Awaitable[None]]
"""Send one request and fill in its `Sent`; the float is the row's begin on `time.monotonic`."""


async def run(requests: Sequence[tuple[Sent, Ask]], patience: float) -> Load:
    """Send everything at its time; what has no answer `patience` seconds after the last one went out has failed."""
    with _no_collector():
        cpu, begin = time.process_time(), time.monotonic() + 0.1
        tasks: set[asyncio.Task[None]] = set()
        for sent, ask in sorted(requests, key=lambda request: request[0].at):
            await asyncio.sleep(begin + sent.at - time.monotonic())
            sent.lag = time.monotonic() - begin - sent.at
            tasks.add(asyncio.create_task(_one(sent, ask, begin)))
        _, late = await asyncio.wait(tasks, timeout=patience)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        took = time.monotonic() - begin
        return Load([sent for sent, _ in requests], begin, took, time.process_time() - cpu)


async def _one(sent: Sent, ask: Ask, begin: float) -> None:
    try:
        await ask(sent, begin)
    except (RequestFailed, OSError, ValueError, KeyError) as error:
        sent.error = f"{type(error).__name__}: {error}"
    except asyncio.CancelledError:
        sent.error = "no answer in time"
        raise


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Prompts are millions of objects; a collection that walks them stops the client for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
