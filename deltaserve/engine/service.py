# SPDX-License-Identifier: Apache-2.0
"""The worker's gRPC service: streams of routers on one side, the engine host on the other.

Happy path: a router opens `Engine`, sends `Add`s; each becomes a `Job`, the role turns it into an engine request, the
engine's steps come back and leave as one `Step` message a stream and engine step.

Crash path: a stream that ends, however it does, aborts its jobs and releases the boundaries that its jobs published; a
request that the engine refuses ends with finish reason ERROR and a log line; an engine that dies ends the process,
because a worker without an engine must not stay in the register.

Decisions: the outgoing queue of a stream is bounded; a router that does not read loses its stream, not the worker its
memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from itertools import count
from typing import Any

import grpc

from deltaserve.doctor.capabilities import Capability, as_json
from deltaserve.engine.host import EngineHost
from deltaserve.engine.role import Job, Refused, Role
from deltaserve.telemetry import WORKER, about, tracing
from deltaserve.telemetry.logs import client_id
from deltaserve.telemetry.progress import Board
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerServicer

log = logging.getLogger(__name__)

OUTGOING = 4096
"""Messages that may wait for one router; at one a step this is over 20 s of a fast engine."""
STATUS_SECONDS = 1.0


class RouterStream:
    """One router's stream: its jobs by the router's ids, and its outgoing messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: dict[int, Job] = {}
        self.boundaries: set[str] = set()
        self.queue: asyncio.Queue[pb.FromWorker | None] = asyncio.Queue(OUTGOING)
        self.closed = False

    def send(self, message: pb.FromWorker) -> None:
        """Queue a message; a full queue closes the stream."""
        if self.closed:
            return
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            log.error("stream %s: the router does not read; closing it", self.name)
            self.closed = True
            self.queue.get_nowait()
            self.queue.put_nowait(None)


class WorkerService(WorkerServicer):
    """See the module's description. `attach` completes it once the engine is ready."""

    def __init__(self) -> None:
        self._streams: set[RouterStream] = set()
        self._jobs: dict[str, Job] = {}
        self._names = count(1)
        self._host: EngineHost | None = None
        self._role: Role | None = None
        self._description = pb.WorkerDescription()
        self._loop = asyncio.get_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._board = Board()

    def attach(self, host: EngineHost, role: Role, description: pb.WorkerDescription) -> None:
        """Give the service its engine; before this, calls are answered UNAVAILABLE."""
        self._host, self._role, self._description = host, role, description
        role.call, role.withdraw = lambda function: host.call(function), self._withdraw
        WORKER.describe(description.role, description.worker_id)
        WORKER.watch(
            lambda: host.core.scheduler.get_request_counts(),
            lambda: host.core.scheduler.get_kv_cache_usage(),
            lambda: len(self._jobs),
            lambda: self.queued_tokens,
            lambda: len(self._streams),
        )

    @property
    def job_count(self) -> int:
        """Jobs held now."""
        return len(self._jobs)

    @property
    def held(self) -> int:
        """Jobs, and boundaries published here that routers have not released."""
        return len(self._jobs) + sum(len(stream.boundaries) for stream in self._streams)

    @property
    def routers(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of jobs that have not had their first output."""
        return sum(len(job.add.prompt) for job in self._jobs.values() if not (job.ended or job.answered))

    # ---- from the engine thread

    def on_step(self, batches: list[Any]) -> None:
        """Called on the engine thread with vLLM's EngineCoreOutputs; hands over to the event loop."""
        self._loop.call_soon_threadsafe(self._deliver, batches)

    def on_event(self, name: str, key: str, *args: Any) -> None:
        """A connector half's event for job `key`, from the engine thread: calls role.on_<name>(job, *args)."""
        self._loop.call_soon_threadsafe(self._event, name, key, args)

    def _event(self, name: str, key: str, args: tuple[Any, ...]) -> None:
        job = self._jobs.get(key)
        if job is not None and self._role is not None:
            with about(client_id(job.add.request_id)):  # also what the role begins beside the requests
                getattr(self._role, f"on_{name}")(job, *args)

    def _deliver(self, batches: list[Any]) -> None:
        assert self._role is not None
        per_stream: dict[RouterStream, list[tuple[int, Any]]] = {}
        tokens = 0
        for batch in batches:
            for output in batch.outputs:
                job = self._jobs.get(output.request_id)
                if job is None or job.ended:
                    continue
                if output.num_nans_in_logits and not job.silent:
                    self._not_numbers(job, output.num_nans_in_logits)
                    continue
                self._role.on_output(job, output)
                job.answered = True
                if not job.silent:
                    tokens += len(output.new_token_ids)
                    per_stream.setdefault(job.stream, []).append((job.add.id, output))
                if output.finish_reason is not None:
                    self._end(job, "finished")
        WORKER.stepped(tokens)
        for stream, outputs in per_stream.items():
            stream.send(pb.FromWorker(step=codec.encode_step(outputs)))

    def _not_numbers(self, job: Job, count: int) -> None:
        """End a job whose logits are not numbers: sampling gives some token even so, and the client would not know.

        vLLM counts them when VLLM_COMPUTE_NANS_IN_LOGITS is set (deltaserve.engine.arguments); with drafts it counts
        the first position of the batch's first requests only. The job ends as an aborted one does: its ranks may have
        written, and still report. A publish goes on, because its state is looked at number by number.
        """
        assert self._host is not None
        WORKER.not_finite()
        log.error(
            "request %s: %d of its logits are not numbers: a kernel or its state is damaged",
            job.add.request_id,
            count,
        )
        self._host.abort([job.key])
        job.stream.send(pb.FromWorker(step=codec.encode_error(job.add.id)))
        self._end(job, "aborted")

    # ---- the life of a job

    def _begin(self, stream: RouterStream, add: pb.Add) -> Job:
        """A job that the next message may abort already."""
        job = Job(key=f"{stream.name}-{add.id}", add=add, stream=stream)
        stream.jobs[add.id] = job
        self._jobs[job.key] = job
        self._observe(job)
        return job

    async def _start(self, job: Job) -> None:
        assert self._host is not None
        assert self._role is not None
        if job.ended:  # its abort was in the same bundle
            return
        add = job.add
        with about(client_id(add.request_id)):
            try:
                request = await self._role.prepare(job)
            except Refused as error:
                self.fail(job, str(error))
                return
            except Exception as error:
                log.exception("request %s could not be prepared", add.request_id)
                self.fail(job, f"{type(error).__name__}: {error}")
                return
        if job.ended:  # aborted while it was being prepared
            return
        self._host.add(request, self._refusal(job), job.add.history)

    def _observe(self, job: Job) -> None:
        """Begin what is seen of a job from outside: its span, and its handoff if it has one."""
        add, handoff = job.add, job.add.WhichOneof("handoff")
        name = client_id(add.request_id)
        if handoff == "publish":
            job.progress = self._board.begin(name, "publish", len(add.prompt) - 1)
        elif handoff == "load":
            job.progress = self._board.begin(name, "load", len(add.prompt) - 1, add.load.boundary)
        if tracing.enabled():
            job.span = tracing.begin(
                "prefill" if handoff == "publish" else "generate",
                add.traceparent,
                "server",
                request_id=name,
                worker_id=self._description.worker_id,
                prompt_tokens=len(add.prompt),
                resumed_after=len(add.history) or None,
            )

    def _refusal(self, job: Job) -> Callable[[str], None]:
        """What the engine thread calls when vLLM refuses the job."""

        def refuse(reason: str) -> None:
            self._loop.call_soon_threadsafe(self.fail, job, reason)

        return refuse

    def fail(self, job: Job, reason: str) -> None:
        """End a job that cannot run: finish reason ERROR to the router, the reason to the log and the role."""
        if job.ended:
            return
        log.warning("request %s refused: %s", job.add.request_id, reason)
        if not job.silent:
            job.stream.send(pb.FromWorker(step=codec.encode_error(job.add.id)))
        self._end(job, reason)

    def _end(self, job: Job, reason: str) -> None:
        if job.ended:
            return
        job.ended = True
        job.stream.jobs.pop(job.add.id, None)
        assert self._role is not None
        with about(client_id(job.add.request_id)):
            self._role.on_end(job, reason)
        error = "" if reason == "finished" else reason
        if not job.silent or error:  # a publish goes on when the engine has finished; its role ends the span
            job.span.end(error)
        if error and job.progress is not None:
            job.progress.end(error if reason == "aborted" else "refused")
        if not job.state.get("keep"):
            self.forget(job)

    def forget(self, job: Job) -> None:
        """Drop the job's name; a role that set state["keep"] (events still to come) calls it when they have come."""
        self._jobs.pop(job.key, None)

    def _abort(self, stream: RouterStream, ids: list[int]) -> None:
        assert self._host is not None
        jobs = [job for i in ids if (job := stream.jobs.get(i)) is not None]
        if jobs:
            self._host.abort([job.key for job in jobs])
        for job in jobs:
            self._end(job, "aborted")

    def _withdraw(self, job: Job) -> None:
        """See `Role.withdraw`."""
        assert self._host is not None
        self._host.abort([job.key])
        self._end(job, "aborted")

    # ---- gRPC

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        if self._host is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is still starting")
        assert self._role is not None
        described = pb.WorkerDescription()
        described.CopyFrom(self._description)
        configured = [Capability(**item) for item in json.loads(described.capabilities or "[]")]
        described.capabilities = as_json(self._role.capabilities(configured))
        return described

    async def Engine(
        self, requests: AsyncIterator[pb.ToWorker], context: Any
    ) -> AsyncIterator[pb.FromWorker]:
        if self._host is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is still starting")
        stream = RouterStream(f"s{next(self._names)}")
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(stream, requests))
        due = self._loop.time() + STATUS_SECONDS
        try:
            while not stream.closed:
                left = due - self._loop.time()
                if left <= 0:
                    # Also while steps flow: they say nothing about what waits, or how full the cache is.
                    due = self._loop.time() + STATUS_SECONDS
                    yield pb.FromWorker(status=self._status(stream))
                    continue
                try:
                    message = await asyncio.wait_for(stream.queue.get(), left)
                except TimeoutError:
                    continue
                if message is None:
                    break
                yield message
        finally:
            reader.cancel()
            self._drop(stream)

    async def _read(self, stream: RouterStream, requests: AsyncIterator[pb.ToWorker]) -> None:
        try:
            async for some in requests:
                for message in codec.unbundled(some):
                    self._take(stream, message)
        finally:
            # Half-closed by the router, or broken: either way nothing more will come.
            stream.closed = True
            if not stream.queue.full():
                stream.queue.put_nowait(None)

    def _take(self, stream: RouterStream, message: pb.ToWorker) -> None:
        kind = message.WhichOneof("body")
        if kind == "add":
            self._spawn(self._start(self._begin(stream, message.add)))
        elif kind == "abort":
            self._abort(stream, list(message.abort.ids))
        elif kind == "confirm":
            leg = message.confirm.id
            if (job := stream.jobs.get(leg)) is not None:
                assert self._role is not None
                self._role.on_confirmed(job)
            else:
                # It has ended, and the router hears what it said before this; or it was never here.
                stream.send(pb.FromWorker(loaded=pb.Loaded(id=leg, failure="unknown", withdrawn=True)))
        elif kind == "release":
            boundaries = list(message.release.boundaries)
            stream.boundaries.difference_update(boundaries)
            self._spawn(self._role_release(boundaries))

    async def _role_release(self, boundaries: list[str]) -> None:
        assert self._role is not None
        await self._role.release(boundaries)

    def _drop(self, stream: RouterStream) -> None:
        stream.closed = True
        self._streams.discard(stream)
        self._abort(stream, list(stream.jobs))
        if stream.boundaries:
            self._spawn(self._role_release(list(stream.boundaries)))
            stream.boundaries.clear()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _status(self, stream: RouterStream) -> pb.WorkerLoad:
        """The load as one router is told it, which counts its own requests itself."""
        assert self._host is not None
        scheduler = self._host.core.scheduler
        running, waiting = scheduler.get_request_counts()
        return pb.WorkerLoad(
            running=running,
            waiting=waiting,
            kv_usage=scheduler.get_kv_cache_usage(),
            queued_tokens=self.queued_tokens,
            handoffs=self._board.messages(),
            others=sum(
                job.add.work for other in self._streams if other is not stream for job in other.jobs.values()
            ),
        )

    async def close(self) -> None:
        """End every stream and its jobs."""
        for stream in list(self._streams):
            self._drop(stream)
            if not stream.queue.full():
                stream.queue.put_nowait(None)
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=2)
