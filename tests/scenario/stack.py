# SPDX-License-Identifier: Apache-2.0
"""A whole cluster in one process: router's dispatcher, workers' services and roles over gRPC, connector halves on every
rank, with doubles only where the outside begins: engine without weights, store, ledger and register in memory.

Answers are compared with `ToyModel.answer`, which depends on every byte of the state. `gauges` counts everything that a
request owns anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import REGISTRY, CollectorRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason

from decode_worker.role import DecodeRole
from deltaserve.config import RouterConfig, StoreConfig, WorkerConfig
from deltaserve.engine.role import Role
from deltaserve.engine.service import WorkerService
from deltaserve.membership import Member
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.codec import SERVER_OPTIONS
from deltaserve.wire.worker_pb2_grpc import add_WorkerServicer_to_server
from prefill_worker.role import PrefillRole
from router.dispatcher import Dispatcher
from router.metrics import Metrics
from statestore import sweeping
from statestore.connector.describe import geometry_of
from statestore.connector.events import listen
from statestore.geometry import Geometry
from tests.doubles.engine import MODEL_DIGEST, EngineDouble
from tests.doubles.ledger import LedgerDouble
from tests.doubles.membership import MembershipDouble, Register
from tests.doubles.pool import PoolDouble, Store
from tests.doubles.toy_model import State, ToyModel
from tests.support.core_requests import core_request

SECONDS = 30.0
LEASE = 0.2
"""Seconds of a lease in the sweepers' eyes; a dead owner is swept after twice that."""

CHECKPOINTS: dict[str, Any] = {
    "checkpoint_tokens": 32,
    "checkpoint_min_tokens": 32,
    "checkpoint_bytes": 1 << 20,
}
"""Options of workers that keep checkpoints of short prompts."""

MakePool = Callable[..., Any]
"""`make_pool(store configuration, lend)` makes a pool."""

_NO_CHECKPOINTS: dict[str, Any] = {"checkpoint_bytes": 0}
"""What belongs to requests alone can be counted only where nothing is kept for others."""

_names = itertools.count(1)


class _Reach(Register):
    """One worker's way to the shared register; `away` cuts this worker off alone."""

    def __init__(self, shared: Register) -> None:
        super().__init__()
        self._shared = shared
        self.members = shared.members

    def require(self) -> None:
        super().require()
        self._shared.require()


class Worker:
    """One worker: engine, service, role. `config` are fields of WorkerConfig, `engine` arguments of EngineDouble."""

    def __init__(self, stack: Stack, role: Any, engine: dict[str, Any], **config: Any) -> None:
        self.stack = stack
        store = {"timeout": 5.0, "segment_bytes": 256 << 20, **config.pop("store", {})}
        values = {"tp": 8, "max_num_batched_tokens": 64, "load_timeout": 5.0, **_NO_CHECKPOINTS, **config}
        self.config = WorkerConfig(role=role, store=StoreConfig(**store), **values)
        self.worker_id = f"{role}-{next(_names)}"
        self.service = WorkerService()
        self.states: dict[str, State] = {}
        """By external name: the state after the step that ended the prompt."""
        self.engine = EngineDouble(
            self.config,
            self.worker_id,
            stack.store,
            model=stack.model,
            on_step=self.service.on_step,
            make_pool=None if stack.make_pool is None else functools.partial(stack.make_pool, lend=True),
            **engine,
        )
        self.engine.on_computed = self._keep_states
        self.geometry = geometry_of(self.engine.vllm_config, self.engine.kv_cache_config, MODEL_DIGEST)
        self.published_geometry: Geometry = self.geometry
        self.register = _Reach(stack.register)
        self.ledger = LedgerDouble(self.register, stack.records)
        self.pool: Any = (
            PoolDouble(stack.store, 0)
            if stack.make_pool is None
            else stack.make_pool(self.config.store, False)
        )
        self.membership = MembershipDouble(stack.register)
        self.role: Role | None = None
        self.alive = False
        self.tamper: Callable[[str, int], None] = lambda request_id, length: None
        """Called with the engine's name and the length of every prompt that has just been computed, before a rank
        can publish it."""
        self._server: Any = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def pools(self) -> list[Any]:
        """Every pool of this worker: of its ranks, and its service's own."""
        return [*self.engine.pools, self.pool]

    async def start(self) -> Worker:
        """Serve and join."""
        listen(self.worker_id, self.service.on_event)
        self.role = self._make_role()
        # A task of its own, so that the role's end does not wait for it.
        self._sweeper = asyncio.create_task(sweeping.sweep_forever(self.ledger, self.pool, LEASE))
        self.service.attach(self.engine, self.role, self._description())  # type: ignore[arg-type]
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        add_WorkerServicer_to_server(self.service, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.membership.on_lease = self.role.on_lease
        member = Member(
            self.worker_id,
            self.config.role,
            f"127.0.0.1:{port}",
            MODEL_DIGEST,
            self.geometry.fingerprint(),
            0,
        )
        joined = await self.membership.join(member)
        await self.role.on_lease(joined.lease)
        self.alive = True
        return self

    def _make_role(self) -> Role:
        forget = self.service.forget
        if self.config.role == "prefill":
            return PrefillRole(
                self.config, self.worker_id, self.published_geometry, self.ledger, self.pool, forget
            )
        return DecodeRole(self.config, self.worker_id, self.geometry, self.ledger, self.pool, forget)

    def _description(self) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            worker_id=self.worker_id,
            role=self.config.role,
            model_digest=MODEL_DIGEST,
            max_model_len=4096,
            geometry=self.geometry.to_json(),
            segment=",".join(pool.segment_name for pool in self.engine.pools),
            dcp=self.geometry.dcp,
            interleave=self.geometry.interleave,
            early=self.config.role == "decode",
        )

    async def forget(self) -> None:
        """Empty the engine's own prefix cache, as soon as nothing is pinned."""
        async with asyncio.timeout(SECONDS):
            while True:
                call = self.engine.call(lambda engine: engine.scheduler.reset_prefix_cache())
                if await asyncio.wrap_future(call):
                    return
                await asyncio.sleep(0.01)

    async def kill(self) -> None:
        """What is left of a process that was killed: broken streams, a lease that ends, memory that is gone."""
        self.alive = False
        self.register.away = True
        self.engine.hold()
        assert self.role is not None
        assert self._sweeper is not None
        for task in (self._sweeper, *self.role._tasks):
            task.cancel()
        for pool in self.pools:
            pool.close()
        await self._server.stop(0)
        await self.stack.register.expire(self.worker_id)
        listen(self.worker_id, None)
        await asyncio.to_thread(self.engine.stop)

    async def kill_while(self, barrier: Barrier) -> None:
        """`kill` while threads of it wait at a barrier; they go on when nothing of the worker is left."""
        self.register.away = True
        for pool in self.pools:
            pool.close()
        barrier.open()
        await self.kill()

    async def stop(self) -> None:
        """End politely."""
        if not self.alive:
            return
        self.alive = False
        assert self.role is not None
        assert self._sweeper is not None
        self._sweeper.cancel()
        self.engine.go()
        await self.membership.leave()
        await self.service.close()
        await self.role.close()
        await self._server.stop(0)
        await asyncio.to_thread(self.engine.stop)
        for pool in self.pools:
            pool.close()
        listen(self.worker_id, None)

    def _keep_states(self, scheduled: Any) -> None:
        """Keep the state of every request whose whole prompt has been computed."""
        for request_id in scheduled.num_scheduled_tokens:
            request = self.engine.scheduler.requests[request_id]
            if request.num_computed_tokens == request.num_prompt_tokens:
                self.tamper(request_id, request.num_prompt_tokens)
                # A copy, taken at once: this is the engine's thread, and the jobs are the event loop's.
                jobs = self.service._jobs.copy().values()
                name = next((job.add.request_id for job in jobs if job.key == request_id), request_id)
                self.states[name] = self.engine.read_state(
                    self.engine.tables(request_id), request.num_prompt_tokens
                )


@dataclass
class Ask:
    """One request of a test."""

    name: str
    prompt: list[int]
    count: int
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def finish(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Stack:
    """The cluster. Made by `running`."""

    def __init__(self, heads: int = 8, make_pool: MakePool | None = None, **router: Any) -> None:
        self.model = ToyModel(heads)
        self.make_pool = make_pool
        self.store = Store()
        self.register = Register()
        self.records: dict[str, str] = {}
        self.workers: list[Worker] = []
        config = {
            "placement": "handover",
            "worker_wait": 1.0,
            "request_timeout": 60.0,
            "max_model_len": 4096,
            **router,
        }
        self.dispatcher = Dispatcher(
            RouterConfig(**config), MembershipDouble(self.register), Metrics(CollectorRegistry())
        )
        self._asks: dict[str, Ask] = {}
        self._random = random.Random(5)

    # ---- workers

    async def add(self, role: str, engine: dict[str, Any] | None = None, **config: Any) -> Worker:
        """Start a worker and wait until the router can use it."""
        worker = Worker(self, role, engine or {}, **config)
        return await self.start(worker)

    async def start(self, worker: Worker) -> Worker:
        """Start a worker that has been made."""
        self.workers.append(worker)
        await worker.start()
        await until(lambda: worker.worker_id in self._ready())
        return worker

    async def remove(self, worker: Worker) -> None:
        """End a worker politely."""
        await worker.stop()
        self.workers.remove(worker)
        await until(lambda: worker.worker_id not in self._ready())

    def _ready(self) -> set[str]:
        roster = self.dispatcher.roster
        return {link.worker_id for role in ("prefill", "decode") for link in roster.ready(role)}  # type: ignore[arg-type]

    def of(self, role: str) -> list[Worker]:
        """Living workers of a role."""
        return [worker for worker in self.workers if worker.config.role == role and worker.alive]

    @property
    def prefill(self) -> Worker:
        return self.of("prefill")[0]

    @property
    def decode(self) -> Worker:
        return self.of("decode")[0]

    # ---- requests

    def prompt(self, length: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self._random.randrange(3, 997) for _ in range(length)]

    def ask(self, prompt: list[int], count: int = 4, **params: Any) -> Ask:
        """Send a request for `count` greedy tokens."""
        made = Ask(f"cmpl-s{next(_names)}-0", prompt, count)
        self._asks[made.name] = made
        params = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, **params}
        self.dispatcher.add(core_request(made.name, prompt, SamplingParams(**params), external=made.name))
        return made

    async def end(self, ask: Ask, seconds: float = SECONDS) -> Ask:
        """Wait for a request's end."""
        await asyncio.wait_for(ask.ended.wait(), seconds)
        return ask

    async def run(self, prompt: list[int], count: int = 4) -> Ask:
        """`ask` and `end`."""
        return await self.end(self.ask(prompt, count))

    def is_right(self, ask: Ask) -> bool:
        """Whether the answer is the one that a single engine gives."""
        return ask.tokens == self.model.answer(ask.prompt, ask.count)

    def trace(self, ask: Ask) -> dict[str, Any]:
        """The router's trace of a request."""
        found = self.dispatcher.traces.find(ask.name.removesuffix("-0"))
        assert found is not None
        return found

    async def read(self) -> None:
        """Collect outputs, for ever."""
        while True:
            for output in (await self.dispatcher.outputs()).outputs:
                ask = self._asks[output.request_id]
                ask.outputs.append(output)
                if output.finish_reason is not None:
                    ask.ended.set()

    # ---- what requests own

    def gauges(self) -> dict[str, int]:
        """Everything that a request may own, counted where it lies."""
        found = {
            "flights": self.dispatcher.in_flight,
            "records": len(self.records),
            "objects": len(self.store.objects),
            "bytes": self.store.used,
        }
        links = self.dispatcher.roster._links.values()
        found["legs"] = sum(len(link.legs) + len(link.early) for link in links)
        found["outstanding"] = sum(link.outstanding for link in links)
        for worker in self.workers:
            if not worker.alive:
                continue
            name, scheduler = worker.worker_id, worker.engine.scheduler
            pool = scheduler.kv_cache_manager.block_pool
            found[f"{name} blocks"] = pool.get_num_free_blocks()
            found[f"{name} pins"] = sum(block.ref_cnt for block in pool.blocks if not block.is_null)
            found[f"{name} requests"] = len(scheduler.requests) + sum(scheduler.get_request_counts())
            connector = scheduler.get_kv_connector()
            assert connector is not None
            found[f"{name} gates"] = len(connector.gate)  # type: ignore[attr-defined]
            found[f"{name} pushes"] = int(connector.has_pending_push_work())
            found[f"{name} jobs"] = worker.service.job_count
            found[f"{name} staging"] = sum(p.staging_free for p in worker.engine.pools)
        return found

    async def reset_links(self) -> None:
        """Break every stream between router and workers, and wait until they stand again."""
        links = list(self.dispatcher.roster._links.values())
        sessions = [link.session for link in links]
        for link in links:
            link._call.cancel()
        await until(
            lambda: all(link.up and link.session > s for link, s in zip(links, sessions, strict=True))
        )

    def abort(self, asks: list[Ask]) -> None:
        """Their clients have gone."""
        self.dispatcher.abort([ask.name for ask in asks])

    async def back_to(self, baseline: dict[str, int], seconds: float = SECONDS) -> None:
        """Wait until every gauge is at its baseline. Raises AssertionError naming those that are not."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: self.gauges() == baseline, seconds)
        now = self.gauges()
        off = {k: (baseline.get(k), now.get(k)) for k in baseline | now if baseline.get(k) != now.get(k)}
        assert not off, f"not back at the baseline after {seconds:g} s (was, is): {off}"


async def until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Return once `condition()` holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in many places
            await asyncio.sleep(0.002)


class Barrier:
    """Stops threads that come to it while it is closed, and tells that they have come."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting = 0

    def __call__(self) -> None:
        self.waiting += 1
        assert self._open.wait(SECONDS), "a barrier was never opened"

    def open(self) -> None:
        """Let everybody through, for good."""
        self._open.set()


def failures(stage: str, kind: str) -> float:
    """How many publishes or loads have failed for this reason in this process."""
    labels = {"stage": stage, "kind": kind}
    return REGISTRY.get_sample_value("deltaserve_boundary_failures_total", labels) or 0.0


@contextlib.asynccontextmanager
async def running(heads: int = 8, make_pool: MakePool | None = None, **router: Any) -> AsyncIterator[Stack]:
    """A cluster without workers; whatever is added ends with it. `make_pool`: a store that is not a double."""
    stack = Stack(heads, make_pool, **router)
    stack.dispatcher.start()
    reader = asyncio.create_task(stack.read())
    try:
        yield stack
        broken = [worker.engine.failure for worker in stack.workers if worker.engine.failure is not None]
        assert not broken, f"an engine thread has failed: {broken}"
    finally:
        reader.cancel()
        await stack.dispatcher.close()
        for worker in list(stack.workers):
            await worker.stop()
