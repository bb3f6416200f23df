# SPDX-License-Identifier: Apache-2.0
"""The worker's gRPC service over a host that only remembers what it was asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from deltaserve.engine import service as service_module
from deltaserve.engine.role import Job, Refused, Role
from deltaserve.engine.service import WorkerService
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerStub, add_WorkerServicer_to_server


class FakeHost:
    """Remembers; refuses requests whose prompt starts with 13."""

    def __init__(self) -> None:
        self.added: list[Any] = []
        self.aborted: list[str] = []
        self.histories: list[list[int]] = []
        scheduler = SimpleNamespace(get_request_counts=lambda: (1, 2), get_kv_cache_usage=lambda: 0.5)
        self.core = SimpleNamespace(scheduler=scheduler)

    def add(self, request: Any, on_error: Callable[[str], None], history: Sequence[int] = ()) -> None:
        if request.prompt_token_ids[0] == 13:
            on_error("ValueError: unlucky")
        else:
            self.added.append(request)
            self.histories.append(list(history))

    def abort(self, keys: list[str]) -> None:
        self.aborted += keys


class PlainRole(Role):
    """Passes requests on; refuses prompts that start with 99."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[int, str]] = []
        self.released: list[str] = []

    async def prepare(self, job: Job) -> Any:
        if job.add.prompt[0] == 99:
            raise Refused("not this one")
        return codec.decode_add(job.add, job.key)

    def on_output(self, job: Job, output: Any) -> None:
        pass

    def on_end(self, job: Job, reason: str) -> None:
        self.ended.append((job.add.id, reason))

    async def release(self, boundaries: list[str]) -> None:
        self.released += boundaries

    async def on_lease(self, lease: int) -> None:
        pass

    async def unread(self, segments: Collection[str]) -> int:
        return 0

    async def close(self) -> None:
        pass


class Rig:
    """A served WorkerService and a router's stream to it."""

    def __init__(self, service: WorkerService, stub: Any) -> None:
        self.service, self.stub = service, stub
        self.host, self.role = FakeHost(), PlainRole()

    def attach(self) -> None:
        self.service.attach(self.host, self.role, pb.WorkerDescription(worker_id="w", role="decode"))  # type: ignore[arg-type]

    async def added(self, count: int) -> None:
        """Wait until the host holds `count` requests."""
        await until(lambda: len(self.host.added) >= count)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    service = WorkerService()
    server = grpc.aio.server(options=codec.SERVER_OPTIONS)
    add_WorkerServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=codec.CHANNEL_OPTIONS) as channel:
            yield Rig(service, WorkerStub(channel))
    finally:
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came")


def add(leg: int, prompt: list[int]) -> pb.ToWorker:
    sampling = codec.encode_sampling(SamplingParams(max_tokens=4))
    return pb.ToWorker(
        add=pb.Add(id=leg, request_id=f"r{leg}", prompt=prompt, sampling=sampling, arrival=time.time())
    )


async def next_step(call: Any) -> pb.Step:
    """The next step; status messages are passed over."""
    while True:
        message = await asyncio.wait_for(call.read(), 30)
        if message.WhichOneof("body") == "step":
            return message.step


async def test_a_busy_worker_says_how_full_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "STATUS_SECONDS", 0.2)
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        await call.write(add(1, [5]))
        await r.added(1)
        kinds = set()
        for _ in range(40):  # a step every 20 ms: the stream is never silent for as long as a status waits
            r.service.on_step(
                [EngineCoreOutputs(outputs=[EngineCoreOutput(r.host.added[0].request_id, [7])])]
            )
            await asyncio.sleep(0.02)
            kinds.add((await asyncio.wait_for(call.read(), 30)).WhichOneof("body"))
        assert kinds == {"step", "status"}
        call.cancel()


async def test_a_router_is_told_of_the_work_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others alone: its own it counts itself. What a vanished router had is aborted, and counts no more."""
    monkeypatch.setattr(service_module, "STATUS_SECONDS", 0.05)

    async def others(call: Any, wanted: int) -> None:
        async with asyncio.timeout(30):
            while (await call.read()).status.others != wanted:
                pass

    async with rig() as r:
        r.attach()
        one, other = r.stub.Engine(), r.stub.Engine()
        for call, legs in ((one, (1, 2)), (other, (1,))):  # the same ids, on two streams
            for leg in legs:
                message = add(leg, [5])
                message.add.work = 100 * leg
                await call.write(message)
        await r.added(3)
        assert len({request.request_id for request in r.host.added}) == 3
        await others(one, 100)
        await others(other, 300)
        one.cancel()
        await others(other, 0)
        await until(lambda: len(r.host.aborted) == 2)  # and nothing of the other router's
        other.cancel()


async def test_calls_before_the_engine_is_ready_are_unavailable() -> None:
    async with rig() as r:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await r.stub.Describe(pb.DescribeRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        r.attach()
        assert (await r.stub.Describe(pb.DescribeRequest())).worker_id == "w"


async def test_one_engine_step_is_one_message_with_every_requests_tokens() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        for leg in (1, 2, 3):
            await call.write(add(leg, [leg]))
        await r.added(3)
        outputs = [EngineCoreOutput(request.request_id, [50 + i]) for i, request in enumerate(r.host.added)]
        outputs[2].finish_reason = FinishReason.STOP
        r.service.on_step([EngineCoreOutputs(outputs=outputs)])
        step = await next_step(call)
        assert sorted(step.ids) == [1, 2, 3]
        assert sorted(step.tokens) == [50, 51, 52]
        assert sorted(step.finish) == [0, 0, 1]
        assert r.service.job_count == 2
        assert [reason for _, reason in r.role.ended] == ["finished"]
        call.cancel()


async def test_refusals_end_one_request_with_an_error() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        for leg, first in ((1, 99), (2, 13), (3, 5)):
            await call.write(add(leg, [first]))
        refused = [await next_step(call) for _ in range(2)]
        assert sorted(step.ids[0] for step in refused) == [1, 2]
        assert {step.finish[0] for step in refused} == {1 + int(FinishReason.ERROR)}
        await r.added(1)
        assert r.service.job_count == 1
        call.cancel()


async def test_logits_that_are_no_numbers_end_one_request_with_an_error() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        for leg in (1, 2):
            await call.write(add(leg, [leg]))
        await r.added(2)
        outputs = [EngineCoreOutput(request.request_id, [7]) for request in r.host.added]
        outputs[0].num_nans_in_logits = 3
        bad = r.host.added[0].request_id
        r.service.on_step([EngineCoreOutputs(outputs=outputs)])
        ended, went_on = await next_step(call), await next_step(call)
        assert list(ended.finish) == [1 + int(FinishReason.ERROR)]
        assert (list(ended.tokens), list(went_on.tokens)) == ([], [7]), (
            "the token that was sampled is not sent"
        )
        assert r.host.aborted == [bad]
        # As an abort: ranks may have written, and the role waits for their reports.
        assert r.role.ended == [(1, "aborted")]
        assert r.service.job_count == 1
        call.cancel()


async def test_an_abort_reaches_the_engine_and_ends_the_job() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        await call.write(add(1, [5]))
        await r.added(1)
        await call.write(pb.ToWorker(abort=pb.Abort(ids=[1, 77])))
        await until(lambda: r.role.ended == [(1, "aborted")])
        assert r.host.aborted == [r.host.added[0].request_id]
        assert r.service.job_count == 0
        call.cancel()


async def test_a_bundle_is_read_in_its_order_and_an_abort_finds_what_came_with_it() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        abort = pb.ToWorker(abort=pb.Abort(ids=[2]))
        release = pb.ToWorker(release=pb.Release(boundaries=["x"]))
        messages = [add(1, [5]), add(2, [6]), abort, add(3, [7]), release]
        await call.write(pb.ToWorker(bundle=pb.Bundle(messages=messages)))
        await r.added(2)
        await until(lambda: r.role.released == ["x"])
        assert [request.prompt_token_ids for request in r.host.added] == [[5], [7]]
        assert r.role.ended == [(2, "aborted")]
        assert r.service.job_count == 2
        call.cancel()


async def test_a_lost_router_loses_its_requests_and_boundaries_only() -> None:
    async with rig() as r:
        r.attach()
        lost, kept = r.stub.Engine(), r.stub.Engine()
        await lost.write(add(1, [5]))
        await r.added(1)
        await kept.write(add(1, [6]))
        await r.added(2)
        next(iter(r.service._jobs.values())).stream.boundaries.add("b1")
        lost.cancel()
        await until(lambda: r.service.job_count == 1)
        assert r.host.aborted == [r.host.added[0].request_id]
        await until(lambda: r.role.released == ["b1"])
        r.service.on_step([EngineCoreOutputs(outputs=[EngineCoreOutput(r.host.added[1].request_id, [8])])])
        assert list((await next_step(kept)).tokens) == [8]
        kept.cancel()


async def test_release_is_passed_on() -> None:
    async with rig() as r:
        r.attach()
        call = r.stub.Engine()
        await call.write(pb.ToWorker(release=pb.Release(boundaries=["x", "y"])))
        await until(lambda: r.role.released == ["x", "y"])
        call.cancel()
