# SPDX-License-Identifier: Apache-2.0
"""A dispatcher over worker doubles, and a reader of its outputs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from deltaserve.config import RouterConfig
from router.dispatcher import Dispatcher
from router.metrics import Metrics
from tests.doubles.static_membership import StaticMembership
from tests.doubles.worker import WorkerDouble
from tests.support.core_requests import core_request

_names = itertools.count(1)
SECONDS = 30.0


class Cluster:
    """Doubles, a register of them, a dispatcher and what it has delivered."""

    def __init__(
        self, doubles: list[WorkerDouble], membership: StaticMembership, dispatcher: Dispatcher
    ) -> None:
        self.doubles = doubles
        self.membership = membership
        self.dispatcher = dispatcher
        self.batches = 0
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._finished: dict[str, asyncio.Event] = {}

    def role(self, role: str) -> list[WorkerDouble]:
        """The doubles of one role."""
        return [double for double in self.doubles if double.role == role]

    @property
    def prefill(self) -> WorkerDouble:
        """The first prefill double."""
        return self.role("prefill")[0]

    @property
    def decode(self) -> WorkerDouble:
        """The first decode double."""
        return self.role("decode")[0]

    async def read(self) -> None:
        """Collect outputs, for ever."""
        while True:
            batch = await self.dispatcher.outputs()
            self.batches += 1
            for output in batch.outputs:
                self.outputs[output.request_id].append(output)
                if output.finish_reason is not None:
                    self._finished[output.request_id].set()

    def add(self, prompt: list[int], **params: Any) -> str:
        """Send a request; returns its name."""
        name = f"cmpl-t{next(_names)}-0"
        self.outputs[name] = []
        self._finished[name] = asyncio.Event()
        params.setdefault("max_tokens", 6)
        self.dispatcher.add(core_request(name, prompt, SamplingParams(**params), external=name))
        return name

    async def finish(self, name: str) -> tuple[list[int], FinishReason | None]:
        """Wait for a request's end: its tokens and how it ended."""
        await asyncio.wait_for(self._finished[name].wait(), SECONDS)
        outputs = self.outputs[name]
        return [token for output in outputs for token in output.new_token_ids], outputs[-1].finish_reason

    async def run(self, prompt: list[int], **params: Any) -> tuple[list[int], FinishReason | None]:
        """`add` and `finish`."""
        return await self.finish(self.add(prompt, **params))

    def trace(self, name: str) -> dict[str, Any]:
        """A request's trace."""
        trace = self.dispatcher.traces.find(name.removesuffix("-0"))
        assert trace is not None
        return trace

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value, 0 when it has none yet."""
        return self.dispatcher.metrics.registry.get_sample_value(f"deltaserve_router_{name}", labels) or 0.0

    async def everything_returned(self, seconds: float = SECONDS) -> None:
        """Return once nothing of any request is left anywhere. Raises TimeoutError."""

        def clean() -> bool:
            links = self.dispatcher.roster._links.values()
            return (
                self.dispatcher.in_flight == 0
                and all(link.outstanding == 0 and not link.legs for link in links)
                and not any(double.held or double.boundaries for double in self.doubles)
            )

        await until(clean, seconds)


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Return once `condition()` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in many places
            await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def cluster(prefill: int = 1, decode: int = 1, **config: Any) -> AsyncIterator[Cluster]:
    """A cluster whose workers are connected."""
    doubles = [WorkerDouble("prefill", f"p{i}") for i in range(prefill)]
    doubles += [WorkerDouble("decode", f"d{i}") for i in range(decode)]
    for double in doubles:
        await double.start()
    membership = StaticMembership([double.member for double in doubles])
    config = {"placement": "handover", "worker_wait": 0.3, **config}
    dispatcher = Dispatcher(RouterConfig(**config), membership, Metrics(CollectorRegistry()))
    dispatcher.start()
    made = Cluster(doubles, membership, dispatcher)
    reader = asyncio.create_task(made.read())
    try:
        await until(
            lambda: (
                len(dispatcher.roster.ready("prefill")) == prefill
                and len(dispatcher.roster.ready("decode")) == decode
            )
        )
        yield made
    finally:
        reader.cancel()
        await dispatcher.close()
        for double in doubles:
            await double.stop()
