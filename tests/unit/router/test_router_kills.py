# SPDX-License-Identifier: Apache-2.0
"""Workers die by the hundred, at random points of random requests: every stream is exact. And workers that drain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from tests.doubles.worker import WorkerDouble, expected_tokens
from tests.unit.router.harness import Cluster, cluster, until

PROMPT = list(range(100, 150))
TOKENS = 24
KINDS: tuple[dict[str, Any], ...] = ({}, {"seed": 3, "temperature": 0.9}, {"logprobs": 2}, {"min_tokens": 20})


async def storm(c: Cluster, kills: int, noise: random.Random) -> int:
    """Kill so many workers, each in the middle of four streams; returns how many streams were not as they must be."""
    for double in c.doubles:
        double.knobs.step_seconds = 0.002
    wrong = 0
    for number in range(kills):
        prompts = [[noise.randrange(3, 900) for _ in range(noise.randrange(1, 60))] for _ in KINDS]
        names = [
            c.add(prompt, max_tokens=TOKENS, **kind) for prompt, kind in zip(prompts, KINDS, strict=True)
        ]
        watched, point = noise.choice(names), noise.randrange(TOKENS)
        await until(lambda watched=watched, point=point: len(c.outputs[watched]) >= point)  # type: ignore[misc]
        victim: WorkerDouble = noise.choice(c.role("prefill" if number % 4 == 3 else "decode"))
        port = victim.port
        await victim.die()
        await victim.start(port)
        for name, prompt in zip(names, prompts, strict=True):
            wrong += await c.finish(name) != (expected_tokens(prompt, TOKENS), FinishReason.LENGTH)
    return wrong


@pytest.mark.scenario
async def test_a_hundred_and_twenty_kills() -> None:
    async with cluster(prefill=2, decode=3, resume_wait=60.0, worker_wait=60.0) as c:
        assert await storm(c, 120, random.Random(11)) == 0
        resumed = c.metric("resume_seconds_count")
        assert resumed > 60, "the control: streams were hit in their middle"
        assert c.metric("decode_retries_total", reason="decode_failed") >= resumed
        await c.everything_returned()


@pytest.mark.parametrize("kept", [slice(0, -1), slice(1, None), slice(0, 0)])
async def test_the_storm_finds_a_history_that_is_not_the_clients(
    kept: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a router that forgets a token of what it has delivered, or all of them."""
    whole = codec.encode_add

    def forgetful(*arguments: Any, history: Sequence[int] = (), **fields: Any) -> Any:
        return whole(*arguments, history=history[kept], **fields)

    monkeypatch.setattr(codec, "encode_add", forgetful)
    async with cluster(prefill=2, decode=3, resume_wait=60.0, worker_wait=60.0) as c:
        assert await storm(c, 12, random.Random(11)) > 0


# ---- a worker that hangs


async def test_a_worker_that_was_late_gets_nothing_new_until_it_makes_progress() -> None:
    async with cluster(decode=2, token_timeout=0.3, first_token_timeout=0.3) as c:
        for double in c.role("decode"):
            double.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20)
        await until(lambda: len(c.outputs[name]) >= 2)
        hung = next(double for double in c.role("decode") if double.held)
        hung.knobs.mute_steps = True
        assert await c.finish(name) == (expected_tokens(PROMPT, 20), FinishReason.LENGTH)
        seen = len(hung.adds)
        for _ in range(4):  # the worker that hangs is the one with the least to do
            assert await c.run(PROMPT) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert len(hung.adds) == seen
        states = {w["id"]: w["state"] for w in c.dispatcher.roster.report()["roles"]["decode"]["workers"]}
        assert states[hung.worker_id] == "stalled"
        for running in (
            1,
            0,
        ):  # it says how many requests it runs: none is left of those that were taken from it
            for stream in hung._streams:
                stream.out.put_nowait(pb.FromWorker(status=pb.WorkerLoad(running=running)))
            link = c.dispatcher.roster._links[hung.worker_id]
            await until(lambda link=link, running=running: link.load.running == running)  # type: ignore[misc]
            assert link.ready == (running == 0)
        hung.knobs.mute_steps = False
        names = [c.add(PROMPT) for _ in range(4)]
        for name in names:
            await c.finish(name)
        assert len(hung.adds) > seen
        await c.everything_returned()


# ---- drain


async def drain(c: Cluster, worker: WorkerDouble) -> None:
    """Mark a worker as draining, and wait until the router knows."""
    members = [replace(d.member, draining=d is worker) for d in c.doubles]
    await c.membership.set(members)
    await until(
        lambda: worker.worker_id not in {link.worker_id for link in c.dispatcher.roster.ready(worker.role)}
    )


async def test_a_draining_publisher_gets_its_boundaries_back_when_they_have_been_read() -> None:
    async with cluster(prefill=2) as c:
        c.decode.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=100)
        await until(lambda: len(c.outputs[name]) > 1)
        publisher = next(double for double in c.role("prefill") if double.boundaries)
        assert publisher.released == [], "the control: nobody asks for it yet"
        await drain(c, publisher)
        await until(lambda: not publisher.boundaries)
        assert c.outputs[name][-1].finish_reason is None, "the stream goes on"
        assert await c.finish(name) == (expected_tokens(PROMPT, 100), FinishReason.LENGTH)
        assert len(publisher.released) == 1
        await c.everything_returned()


async def test_an_unread_boundary_of_a_draining_publisher_stays_until_it_is_read() -> None:
    async with cluster() as c:
        c.decode.knobs.mute_steps = True
        name = c.add(PROMPT)
        await until(lambda: c.decode.held == 1)
        await drain(c, c.prefill)
        assert c.prefill.boundaries, "it has not been read"
        c.decode.knobs.mute_steps = False
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert c.trace(name)["from_store"] == len(PROMPT) - 1
        await c.everything_returned()


async def test_a_request_is_not_sent_to_a_worker_that_began_to_drain_during_its_prefill() -> None:
    async with cluster(decode=2) as c:
        c.prefill.knobs.publish_seconds = 0.3
        name = c.add(PROMPT, max_tokens=100)
        await until(lambda: c.prefill.held == 1)
        (add,) = c.prefill.adds
        reader = next(d for d in c.role("decode") if d.worker_id in add.publish.preferred_segment)
        other = next(d for d in c.role("decode") if d is not reader)
        other.knobs.step_seconds = 0.02
        await drain(c, reader)
        await until(lambda: len(c.outputs[name]) > 1)
        assert (reader.adds, [a.load.boundary for a in other.adds]) == ([], [f"p0/{add.id}"])
        # It lies in the draining worker's memory, which is waited for, so it goes as soon as it has been read.
        await until(lambda: not c.prefill.boundaries)
        assert c.outputs[name][-1].finish_reason is None
        assert await c.finish(name) == (expected_tokens(PROMPT, 100), FinishReason.LENGTH)


async def test_what_a_drained_worker_could_not_finish_goes_on_elsewhere() -> None:
    async with cluster(decode=2) as c:
        for double in c.role("decode"):
            double.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=60)
        await until(lambda: len(c.outputs[name]) > 1)
        victim = next(double for double in c.role("decode") if double.held)
        await drain(c, victim)
        await victim.stop()
        assert await c.finish(name) == (expected_tokens(PROMPT, 60), FinishReason.LENGTH)
        trace = c.trace(name)
        assert (trace["failure"], trace["resumes"]) == ("drained", 1)
        assert c.metric("decode_retries_total", reason="drained") == 1
        await c.everything_returned()
