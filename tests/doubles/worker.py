# SPDX-License-Identifier: Apache-2.0
"""A worker without an engine: the Worker service of worker.proto for either role, with deterministic tokens.

It keeps the books that a real worker keeps (requests held, boundaries published and not yet released), so that a test
can ask whether everything went back to where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists

from deltaserve.config import Role
from deltaserve.membership import Member
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

_serial = count(1)


def expected_tokens(prompt: Sequence[int], number: int, vocabulary: int = 1000) -> list[int]:
    """What the double answers to `prompt`: `number` token ids in [3, vocabulary)."""
    seed = sum(prompt) * 31 + len(prompt)
    return [3 + (seed + 7 * i) % (vocabulary - 3) for i in range(number)]


@dataclass
class Knobs:
    """What the double shall do wrong, and how fast it is. Changes take effect at once."""

    step_seconds: float = 0.001
    publish_seconds: float = 0.0
    publish_error: str = ""
    publish_kind: str = ""
    mute_publish: bool = False
    """True: a publish never ends."""
    mute_steps: bool = False
    """True: no engine step is made."""
    refuse: bool = False
    """True: every Add ends with FinishReason.ERROR."""
    load_failure: str = ""
    cached_tokens: int = 0
    store_tokens: int = 0
    """Of the prompt, "found" in this worker's own prefix cache."""
    stop_after: int = 0
    """> 0: FinishReason.STOP after so many tokens, before max_tokens."""


@dataclass
class _Running:
    add: pb.Add
    params: SamplingParams
    tokens: list[int]
    made: int = 0


@dataclass
class _Stream:
    out: asyncio.Queue[pb.FromWorker] = field(default_factory=asyncio.Queue)
    running: dict[int, _Running] = field(default_factory=dict)
    boundaries: set[str] = field(default_factory=set)
    publishing: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    work: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerDouble(WorkerServicer):
    """`start` gives it a port; `stop` ends it politely, `die` breaks every stream at once."""

    def __init__(
        self, role: Role, worker_id: str = "", model_digest: str = "digest", vocabulary: int = 1000
    ) -> None:
        self.role: Role = role
        self.worker_id = worker_id or f"{role}-double{next(_serial)}"
        self.model_digest = model_digest
        self.vocabulary = vocabulary
        self.knobs = Knobs()
        self.port = 0
        self.adds: list[pb.Add] = []
        self.aborted: list[int] = []
        self.released: list[str] = []
        self.steps_sent = 0
        self.bundles = True
        self.messages = 0
        """That came, bundles as one."""
        self._streams: list[_Stream] = []
        self._server: Any = None

    @property
    def member(self) -> Member:
        """Its record in the register."""
        return Member(self.worker_id, self.role, f"127.0.0.1:{self.port}", self.model_digest, "geometry", 1)

    @property
    def held(self) -> int:
        """Requests that it holds now."""
        return sum(len(stream.running) + len(stream.publishing) for stream in self._streams)

    @property
    def boundaries(self) -> set[str]:
        """Boundaries published and not released."""
        return set().union(*(stream.boundaries for stream in self._streams))

    async def start(self, port: int = 0) -> WorkerDouble:
        """Serve on a loopback port."""
        self._server = grpc.aio.server(options=codec.SERVER_OPTIONS)
        add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def die(self) -> None:
        """Break every stream now, as a killed process would."""
        await self._server.stop(0)

    stop = die

    # ---- gRPC

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            worker_id=self.worker_id,
            role=self.role,
            model_digest=self.model_digest,
            max_model_len=16384,
            state_bytes=1_500_000,
            token_bytes=4_600,
            segment=f"segment-of-{self.worker_id}",
            bundles=self.bundles,
        )

    async def Engine(
        self, requests: AsyncIterator[pb.ToWorker], context: Any
    ) -> AsyncIterator[pb.FromWorker]:
        stream = _Stream()
        self._streams.append(stream)
        tasks = [asyncio.create_task(self._read(stream, requests)), asyncio.create_task(self._engine(stream))]
        try:
            while True:
                yield await stream.out.get()
        finally:
            for task in (*tasks, *stream.publishing.values()):
                task.cancel()
            self._streams.remove(stream)

    async def _read(self, stream: _Stream, requests: AsyncIterator[pb.ToWorker]) -> None:
        async for some in requests:
            self.messages += 1
            for message in codec.unbundled(some):
                self._take(stream, message)

    def _take(self, stream: _Stream, message: pb.ToWorker) -> None:
        kind = message.WhichOneof("body")
        if kind == "add":
            self._add(stream, message.add)
        elif kind == "abort":
            for leg in message.abort.ids:
                self.aborted.append(leg)
                stream.running.pop(leg, None)
                task = stream.publishing.pop(leg, None)
                if task is not None and not self.knobs.mute_publish:
                    pass  # the write is under way: it ends, and the boundary is reported
                elif task is not None:
                    task.cancel()
        elif kind == "release":
            self.released.extend(message.release.boundaries)
            stream.boundaries.difference_update(message.release.boundaries)

    def _add(self, stream: _Stream, add: pb.Add) -> None:
        self.adds.append(add)
        if self.knobs.refuse:
            stream.out.put_nowait(pb.FromWorker(step=codec.encode_error(add.id)))
        elif add.WhichOneof("handoff") == "publish":
            stream.publishing[add.id] = asyncio.create_task(self._publish(stream, add))
        else:
            params = codec.decode_sampling(add.sampling)
            limit = params.max_tokens or 16
            tokens = expected_tokens(add.prompt, limit, self.vocabulary)
            stream.running[add.id] = _Running(add, params, tokens, len(add.history))
            stream.work.set()

    async def _publish(self, stream: _Stream, add: pb.Add) -> None:
        if self.knobs.mute_publish:
            await asyncio.Event().wait()
        await asyncio.sleep(self.knobs.publish_seconds)
        published = pb.Published(id=add.id, error=self.knobs.publish_error, kind=self.knobs.publish_kind)
        if not published.error:
            published.committed = True
            published.boundary = f"{self.worker_id}/{add.id}"
            published.length = len(add.prompt) - 1
            published.bytes = 1000 * published.length
            published.cached_tokens = self.knobs.cached_tokens
            published.store_tokens = self.knobs.store_tokens
            stream.boundaries.add(published.boundary)
        stream.publishing.pop(add.id, None)
        stream.out.put_nowait(pb.FromWorker(published=published))

    async def _engine(self, stream: _Stream) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not stream.running:
                stream.work.clear()
                await stream.work.wait()
                due = loop.time()
            due += self.knobs.step_seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            if self.knobs.mute_steps:
                continue
            outputs = []
            for leg, running in list(stream.running.items()):
                if running.made == len(running.add.history) and running.add.WhichOneof("handoff") == "load":
                    self._loaded(stream, running.add)
                outputs.append((leg, self._output(running)))
                if outputs[-1][1].finish_reason is not None:
                    del stream.running[leg]
            if outputs:
                self.steps_sent += 1
                stream.out.put_nowait(pb.FromWorker(step=codec.encode_step(outputs)))

    def _loaded(self, stream: _Stream, add: pb.Add) -> None:
        from_store = 0 if self.knobs.load_failure else len(add.prompt) - 1
        loaded = pb.Loaded(id=add.id, from_store=from_store, failure=self.knobs.load_failure)
        stream.out.put_nowait(pb.FromWorker(loaded=loaded))

    def _output(self, running: _Running) -> EngineCoreOutput:
        token = running.tokens[running.made]
        first = running.made == len(running.add.history)
        running.made += 1
        output = EngineCoreOutput("", [token])
        if self.knobs.stop_after and running.made >= self.knobs.stop_after:
            output.finish_reason = FinishReason.STOP
        elif running.made >= len(running.tokens):
            output.finish_reason = FinishReason.LENGTH
        if first:
            prompt = len(running.add.prompt)
            cached = prompt - 1 if running.add.WhichOneof("handoff") == "load" else self.knobs.cached_tokens
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=prompt,
                num_computed_tokens=prompt - cached,
                num_cached_tokens=cached,
                num_local_cached_tokens=self.knobs.cached_tokens,
            )
        number = running.params.logprobs
        if number is not None:
            ids = [token] + [3 + (token + j) % (self.vocabulary - 3) for j in range(1, number + 1)]
            values = np.linspace(-0.1, -5.0, number + 1, dtype=np.float32)
            output.new_logprobs = LogprobsLists(np.array([ids]), values[None], np.array([1]))
        return output


@contextlib.asynccontextmanager
async def workers(*doubles: WorkerDouble) -> AsyncIterator[tuple[WorkerDouble, ...]]:
    """Start doubles, and end those that still run."""
    for double in doubles:
        await double.start()
    try:
        yield doubles
    finally:
        for double in doubles:
            await double.stop()
