# SPDX-License-Identifier: Apache-2.0
"""Hands each request's outputs back to the face that brought it.

The dispatcher has one stream of outputs. vLLM's AsyncLLM reads it (through `outputs`), and gets what belongs to nobody
else; a face that wants its own outputs gives a sink with its request. A sink is called on the event loop, must not
block, and sees every output of its request in order, up to the one with a finish reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest

log = logging.getLogger(__name__)


class Core(Protocol):
    """What a face needs of the dispatcher."""

    def add(self, request: EngineCoreRequest) -> None: ...
    def abort(self, request_ids: Iterable[str], stopped: bool = False) -> None: ...
    async def outputs(self) -> EngineCoreOutputs: ...


class Sink(Protocol):
    """Takes the outputs of one request, or of many."""

    def take(self, output: EngineCoreOutput) -> None:
        """One output of a request that was added with this sink. Must not raise."""


class Switch:
    """Belongs to one event loop. `outputs` has one reader, for as long as any face is served."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sinks: dict[str, Sink] = {}

    def add(self, request: EngineCoreRequest, sink: Sink | None = None) -> None:
        """Dispatch a request; its outputs go to `sink`, or come out of `outputs`. Raises what the dispatcher raises."""
        if sink is None:
            self._core.add(request)
            return
        self._sinks[request.request_id] = sink
        try:
            self._core.add(request)
        except BaseException:
            del self._sinks[request.request_id]
            raise

    def abort(self, request_ids: Iterable[str], stopped: bool = False) -> None:
        """As the dispatcher's `abort`; sinks hear no more of these requests."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._sinks.pop(request_id, None)
        self._core.abort(request_ids, stopped)

    async def outputs(self) -> EngineCoreOutputs:
        """The next outputs of requests that have no sink."""
        sinks = self._sinks
        while True:
            batch = await self._core.outputs()
            if not sinks:
                return batch
            rest = []
            for output in batch.outputs:
                sink = sinks.get(output.request_id)
                if sink is None:
                    rest.append(output)
                    continue
                if output.finish_reason is not None:
                    del sinks[output.request_id]
                try:
                    sink.take(output)
                except Exception:  # one face's mistake ends neither the others' requests nor this task
                    log.exception("request %s: its outputs could not be taken", output.request_id)
            if rest:
                batch.outputs = rest
                return batch
            await asyncio.sleep(0)  # many steps may be ready, and writers want their turn between them
