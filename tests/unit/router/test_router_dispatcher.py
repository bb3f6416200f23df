# SPDX-License-Identifier: Apache-2.0
"""The dispatcher over worker doubles: routes, failures at each stage, and that everything returns to where it was."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from deltaserve.wire import codec
from router import dispatcher as dispatcher_module
from router import outbox as outbox_module
from router.dispatcher import Overloaded
from tests.doubles.worker import WorkerDouble, expected_tokens
from tests.support.patience import HUNG
from tests.unit.router.harness import cluster, until

PROMPT = list(range(100, 150))


async def test_a_prompt_is_handed_over_and_everything_released() -> None:
    async with cluster() as c:
        c.prefill.knobs.cached_tokens = 16
        name = c.add(PROMPT)
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        (publish,), (load,) = c.prefill.adds, c.decode.adds
        assert publish.publish.preferred_segment == "segment-of-d0"
        assert (load.load.boundary, load.load.recompute) == (f"p0/{publish.id}", True)
        assert list(publish.prompt) == list(load.prompt) == PROMPT
        trace = c.trace(name)
        assert trace["route"] == "handover p0 d0"
        assert (trace["prompt_tokens"], trace["from_store"], trace["recomputed"], trace["local"]) == (
            50,
            49,
            1,
            0,
        )
        assert (trace["boundary_length"], trace["boundary_bytes"]) == (49, 49_000)
        assert (trace["status"], trace["finish_reason"], trace["failure"]) == ("finished", "length", "")
        await until(lambda: c.prefill.released == [load.load.boundary])
        await c.everything_returned()
        assert c.metric("handovers_total") == c.metric("boundary_releases_total") == 1


async def test_cached_tokens_are_those_of_the_prefill_side() -> None:
    """The client's cached_tokens are what nobody computed: not what came from the store, which was computed for it."""
    async with cluster() as c:
        c.prefill.knobs.cached_tokens = 16
        name = c.add(PROMPT)
        await c.finish(name)
        stats = c.outputs[name][0].prefill_stats
        assert (stats.num_cached_tokens, stats.num_computed_tokens) == (16, 34)
        # A load that failed was no help: the decode worker's own count stands (here 49, so that the two differ).
        c.decode.knobs.load_failure = "digest"
        name = c.add(PROMPT)
        await c.finish(name)
        assert c.outputs[name][0].prefill_stats.num_cached_tokens == 49
        assert c.trace(name)["failure"] == "digest"
        assert (c.trace(name)["from_store"], c.trace(name)["recomputed"]) == (0, 50)
        assert c.metric("load_failures_total", failure="digest") == 1


@pytest.mark.parametrize(
    ("prompt", "params", "config", "reason"),
    [
        ([7], {}, {}, "single_token"),
        (PROMPT, {"prompt_logprobs": 1}, {}, "prompt_logprobs"),
        (PROMPT, {}, {"placement": "local"}, "policy"),
        (PROMPT, {}, {"placement": "auto", "handover_min_tokens": 51}, "short_prompt"),
        (PROMPT, {"extra_args": {"kv_transfer_params": {"placement": "local"}}}, {}, "policy"),
    ],
)
async def test_prompts_that_stay_local(prompt: list[int], params: dict, config: dict, reason: str) -> None:
    async with cluster(**config) as c:
        name = c.add(prompt, **params)
        assert await c.finish(name) == (expected_tokens(prompt, 6), FinishReason.LENGTH)
        assert c.prefill.adds == []
        assert c.decode.adds[0].WhichOneof("handoff") is None
        assert c.trace(name)["route"] == f"local {reason} d0"
        assert c.metric("local_prefill_total", reason=reason) == 1
        await c.everything_returned()


async def test_the_length_limit_and_an_override_hand_over() -> None:
    async with cluster(placement="auto", handover_min_tokens=50) as c:
        await c.run(PROMPT)
        await c.run(PROMPT[:2], extra_args={"kv_transfer_params": {"placement": "handover"}})
        assert len(c.prefill.adds) == 2


async def test_nothing_that_a_client_put_into_kv_transfer_params_reaches_a_worker() -> None:
    async with cluster() as c:
        hostile = {"boundary": "somebody else's", "do_remote_prefill": True}
        await c.run(PROMPT, extra_args={"kv_transfer_params": hostile, "mine": 1})
        await c.run(PROMPT, extra_args={"kv_transfer_params": "text"})
        params = [codec.decode_sampling(add.sampling) for add in (*c.prefill.adds, *c.decode.adds)]
        assert [p.extra_args for p in params] == [{"mine": 1}, None, {"mine": 1}, None]


async def test_no_prefill_worker() -> None:
    async with cluster(prefill=0) as c:
        name = c.add(PROMPT)
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert c.trace(name)["route"] == "local no_prefill_worker d0"


async def test_workers_of_different_models_are_never_paired() -> None:
    async with cluster() as c:
        other = await WorkerDouble("decode", "other", model_digest="another").start()
        await c.membership.set([c.prefill.member, other.member])
        await until(lambda: [link.worker_id for link in c.dispatcher.roster.ready("decode")] == ["other"])
        name = c.add(PROMPT)
        await c.finish(name)
        assert c.trace(name)["route"] == "local no_prefill_worker other"
        await other.stop()


async def test_a_worker_that_is_not_who_the_register_says_is_not_used() -> None:
    async with cluster() as c:
        member = replace(c.decode.member, worker_id="impostor")
        await c.membership.set([c.decode.member, member])
        await until(lambda: "impostor" in c.dispatcher.roster._links)
        await until(lambda: "answers" in c.dispatcher.roster._links["impostor"].error)
        assert [link.worker_id for link in c.dispatcher.roster.ready("decode")] == ["d0"]


async def test_a_publish_that_fails_is_prefilled_locally() -> None:
    async with cluster() as c:
        c.prefill.knobs.publish_error = "the store is full"
        name = c.add(PROMPT)
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        trace = c.trace(name)
        assert (trace["route"], trace["failure"]) == ("local prefill_failed d0", "prefill_failed")
        assert trace["detail"] == "the store is full"
        await c.everything_returned()


async def test_a_prefill_worker_that_refuses_is_a_failed_prefill() -> None:
    async with cluster() as c:
        c.prefill.knobs.refuse = True
        name = c.add(PROMPT)
        assert (await c.finish(name))[1] is FinishReason.LENGTH
        assert c.trace(name)["route"] == "local prefill_failed d0"


async def test_prefill_workers_that_keep_failing_are_left_out_for_a_while() -> None:
    async with cluster() as c:
        c.prefill.knobs.publish_error = "the store is away"
        for _ in range(6):
            name = c.add(PROMPT)
            await c.finish(name)
        assert len(c.prefill.adds) == 3
        assert c.trace(name)["route"] == "local prefill_failed d0"
        assert c.metric("local_prefill_total", reason="prefill_failed") == 6


async def test_a_full_store_is_told_apart_and_leaves_nobody_out() -> None:
    async with cluster() as c:
        c.prefill.knobs.publish_error, c.prefill.knobs.publish_kind = "no room", "store_full"
        for _ in range(6):
            name = c.add(PROMPT)
            await c.finish(name)
        assert len(c.prefill.adds) == 6, "it answers at once, and may have room the next time"
        assert c.trace(name)["route"] == "local store_full d0"
        assert c.metric("local_prefill_total", reason="store_full") == 6


async def test_tokens_restored_from_checkpoints_count_as_cached() -> None:
    async with cluster() as c:
        c.prefill.knobs.cached_tokens, c.prefill.knobs.store_tokens = 16, 20
        name = c.add(PROMPT)
        await c.finish(name)
        stats = c.outputs[name][0].prefill_stats
        assert (stats.num_cached_tokens, stats.num_computed_tokens) == (36, 14)
        trace = c.trace(name)
        assert (trace["prefill_cached"], trace["prefill_restored"], trace["from_store"]) == (16, 20, 49)


async def test_a_late_prefill_is_aborted_and_its_boundary_released() -> None:
    async with cluster(prefill_timeout=0.05) as c:
        c.prefill.knobs.publish_seconds = 0.3
        name = c.add(PROMPT)
        assert (await c.finish(name))[1] is FinishReason.LENGTH
        assert c.trace(name)["route"] == "local prefill_timeout d0"
        assert c.prefill.aborted == [c.prefill.adds[0].id]
        await until(lambda: c.metric("orphan_boundaries_total") == 1)
        await until(lambda: len(c.prefill.released) == 1)
        await c.everything_returned()


async def test_prefill_dies_before_it_publishes() -> None:
    async with cluster() as c:
        c.prefill.knobs.mute_publish = True
        name = c.add(PROMPT)
        await until(lambda: c.prefill.held == 1)
        await c.prefill.die()
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert c.trace(name)["route"] == "local prefill_failed d0"
        assert c.metric("links_lost_total", role="prefill") == 1
        await c.everything_returned()


async def test_prefill_dies_after_it_published() -> None:
    async with cluster() as c:
        c.decode.knobs.step_seconds = 0.05
        name = c.add(PROMPT)
        await until(lambda: len(c.outputs[name]) == 1)
        await c.prefill.die()
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        await until(lambda: not c.dispatcher.roster.ready("prefill"))
        assert c.metric("boundary_releases_total") == 0  # nobody is there to take it
        await c.everything_returned()


async def test_decode_dies_before_the_first_token() -> None:
    async with cluster(decode=2) as c:
        for double in c.role("decode"):
            double.knobs.mute_steps = True
        name = c.add(PROMPT)
        await until(lambda: any(double.held for double in c.role("decode")))
        first, second = sorted(c.role("decode"), key=lambda double: -double.held)
        second.knobs.mute_steps = False
        await first.die()
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert c.trace(name)["route"] == f"handover p0 {second.worker_id}"
        assert c.trace(name)["attempts"] == 2
        assert len(c.prefill.adds) == 2  # the boundary's bytes went with the worker
        assert c.metric("decode_retries_total", reason="decode_failed") == 1
        await c.everything_returned()


async def test_decode_and_prefill_both_die_before_the_first_token() -> None:
    async with cluster(decode=2) as c:
        for double in c.role("decode"):
            double.knobs.mute_steps = True
        name = c.add(PROMPT)
        await until(lambda: any(double.held for double in c.role("decode")))
        first, second = sorted(c.role("decode"), key=lambda double: -double.held)
        second.knobs.mute_steps = False
        await c.prefill.die()
        await until(lambda: not c.dispatcher.roster.ready("prefill"))
        await first.die()
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert second.adds[0].WhichOneof("handoff") is None
        await c.everything_returned()


async def test_decode_dies_mid_stream_and_another_goes_on() -> None:
    async with cluster(decode=2) as c:
        for double in c.role("decode"):
            double.knobs.step_seconds = 0.02
        names = [c.add(PROMPT, max_tokens=20) for _ in range(2)]
        await until(lambda: all(len(c.outputs[name]) >= 2 for name in names))
        victim, other = c.role("decode")
        assert (victim.held, other.held) == (1, 1)
        await victim.die()
        for name in names:
            assert await c.finish(name) == (expected_tokens(PROMPT, 20), FinishReason.LENGTH)
        traces = [c.trace(name) for name in names]
        assert sorted(trace["resumes"] for trace in traces) == [0, 1]
        moved = max(traces, key=lambda trace: trace["resumes"])
        assert (moved["status"], moved["failure"]) == ("finished", "decode_failed")
        assert moved["longest_pause"] > 0
        assert moved["output_tokens"] == 20
        resumed = other.adds[-1]
        assert list(resumed.history) == expected_tokens(PROMPT, 20)[: len(resumed.history)]
        assert len(resumed.history) >= 2
        assert c.metric("resume_seconds_count") == 1
        await until(lambda: len(c.prefill.released) == 3)
        await c.everything_returned()


async def test_a_silent_worker_is_left_and_what_it_says_later_is_dropped() -> None:
    async with cluster(decode=2, token_timeout=0.3, first_token_timeout=0.3) as c:
        for double in c.role("decode"):
            double.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20)
        await until(lambda: len(c.outputs[name]) >= 2)
        victim = next(double for double in c.role("decode") if double.held)
        victim.knobs.mute_steps = True
        assert await c.finish(name) == (expected_tokens(PROMPT, 20), FinishReason.LENGTH)
        victim.knobs.mute_steps = False
        assert c.trace(name)["failure"] == "decode_late"
        assert len(victim.aborted) == 1
        await c.everything_returned()


async def test_a_silent_worker_keeps_its_requests_when_nobody_else_is_there() -> None:
    async with cluster(token_timeout=0.1, first_token_timeout=0.1) as c:
        c.decode.knobs.mute_steps = True
        name = c.add(PROMPT)
        await until(lambda: c.decode.held == 1)
        await asyncio.sleep(1.2)
        c.decode.knobs.mute_steps = False
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        assert c.trace(name)["attempts"] == 1


async def test_a_stream_waits_for_the_only_worker_to_come_back() -> None:
    async with cluster(resume_wait=8.0) as c:
        c.decode.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20, prompt_logprobs=0)
        await until(lambda: len(c.outputs[name]) >= 2)
        port = c.decode.port
        await c.decode.die()
        await until(lambda: not c.dispatcher.roster.ready("decode"))
        assert c.trace(name)["route"] == "waiting for a decode worker"
        await c.decode.start(port)
        assert await c.finish(name) == (expected_tokens(PROMPT, 20), FinishReason.LENGTH)
        assert [bool(add.history) for add in c.decode.adds] == [False, True]
        # The log-probs of the prompt were delivered before, so the second worker is not asked for them.
        assert codec.decode_sampling(c.decode.adds[1].sampling).prompt_logprobs is None
        await c.everything_returned()


async def test_nobody_comes_back() -> None:
    async with cluster(resume_wait=0.2) as c:
        c.decode.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20)
        await until(lambda: len(c.outputs[name]) >= 2)
        await c.decode.die()
        tokens, reason = await c.finish(name)
        assert reason is FinishReason.ERROR
        assert tokens == expected_tokens(PROMPT, 20)[: len(tokens)]
        assert c.trace(name)["failure"] == "no_decode_worker"
        await c.everything_returned()


async def test_workers_that_keep_failing_end_a_stream() -> None:
    async with cluster(decode=5, token_timeout=0.2, first_token_timeout=0.2) as c:
        for double in c.role("decode"):
            double.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20)
        await until(lambda: len(c.outputs[name]) >= 2)
        for double in c.role("decode"):
            double.knobs.mute_steps = True
        tokens, reason = await c.finish(name)
        assert (tokens, reason) == (expected_tokens(PROMPT, 20)[: len(tokens)], FinishReason.ERROR)
        assert sum(bool(double.adds) for double in c.role("decode")) == 3
        await c.everything_returned()


async def test_a_decode_worker_that_refuses_is_not_asked_twice() -> None:
    async with cluster(decode=2) as c:
        c.role("decode")[0].knobs.refuse = True
        name = c.add(PROMPT)
        assert (await c.finish(name))[1] is FinishReason.LENGTH
        assert c.trace(name)["route"] == "handover p0 d1"
        c.role("decode")[1].knobs.refuse = True
        name = c.add(PROMPT)
        assert await c.finish(name) == ([], FinishReason.ERROR)
        assert c.trace(name)["failure"] == "decode_refused"
        await until(lambda: len(c.prefill.released) == 2)
        await c.everything_returned()


async def test_no_decode_worker_ends_the_request_after_the_wait() -> None:
    async with cluster(decode=0, worker_wait=0.2) as c:
        began = asyncio.get_running_loop().time()
        name = c.add(PROMPT)
        assert await c.finish(name) == ([], FinishReason.ERROR)
        assert 0.15 < asyncio.get_running_loop().time() - began < HUNG
        assert c.trace(name)["failure"] == "no_decode_worker"
        assert not await c.dispatcher.roster.wait_decode(0.01)


async def test_a_waiting_request_runs_when_a_decode_worker_appears() -> None:
    async with cluster(decode=0, worker_wait=5) as c:
        name = c.add(PROMPT)
        late = await WorkerDouble("decode", "late").start()
        await c.membership.set([c.prefill.member, late.member])
        assert await c.finish(name) == (expected_tokens(PROMPT, 6), FinishReason.LENGTH)
        await late.stop()


async def test_a_worker_that_restarts_is_used_again() -> None:
    async with cluster() as c:
        await c.run(PROMPT)
        await c.decode.die()
        await until(lambda: not c.dispatcher.roster.ready("decode"))
        again = WorkerDouble("decode", "again")
        await again.start()
        await c.membership.set([c.prefill.member, again.member])
        await until(lambda: bool(c.dispatcher.roster.ready("decode")))
        assert (await c.run(PROMPT))[1] is FinishReason.LENGTH
        await again.stop()


async def test_the_request_deadline() -> None:
    async with cluster(request_timeout=0.2) as c:
        c.decode.knobs.mute_steps = True
        name = c.add(PROMPT)
        assert await c.finish(name) == ([], FinishReason.ERROR)
        assert c.trace(name)["failure"] == "request_timeout"
        await until(lambda: c.decode.aborted == [c.decode.adds[0].id] and len(c.prefill.released) == 1)
        await c.everything_returned()


@pytest.mark.parametrize("stage", ["waiting", "prefill", "publishing", "loading", "decoding", "ended"])
async def test_an_abort_at_each_stage_returns_everything(stage: str) -> None:
    async with cluster(decode=0 if stage == "waiting" else 1, worker_wait=5) as c:
        c.prefill.knobs.mute_publish = stage == "prefill"
        c.prefill.knobs.publish_seconds = 0.1 if stage == "publishing" else 0
        if stage != "waiting":
            c.decode.knobs.mute_steps = stage == "loading"
            c.decode.knobs.step_seconds = 0.02 if stage == "decoding" else 0.001
        name = c.add(PROMPT, max_tokens=50)
        reached = {
            "waiting": lambda: True,
            "prefill": lambda: c.prefill.held == 1,
            "publishing": lambda: c.prefill.held == 1,
            "loading": lambda: c.decode.held == 1,
            "decoding": lambda: len(c.outputs[name]) > 1,
            "ended": lambda: bool(c.outputs[name]) and c.outputs[name][-1].finish_reason is not None,
        }
        await until(reached[stage])
        delivered = len(c.outputs[name])
        c.dispatcher.abort([name, "unknown"])
        if stage in ("publishing", "loading", "decoding", "ended"):
            await until(lambda: len(c.prefill.released) == 1)
        await until(lambda: sum(double.held for double in c.doubles) == 0)
        await asyncio.sleep(0.05)
        assert len(c.outputs[name]) <= delivered + 1  # one batch may have been on its way
        assert c.trace(name)["status"] == ("finished" if stage == "ended" else "aborted")
        await c.everything_returned()


async def test_books_are_not_trivially_balanced() -> None:
    """Negative control of everything_returned: it sees a boundary that nobody released."""
    async with cluster() as c:
        c.decode.knobs.mute_steps = True
        c.add(PROMPT)
        await until(lambda: c.decode.held == 1)
        with pytest.raises(TimeoutError):
            await c.everything_returned(0.1)


async def test_concurrent_requests_share_steps() -> None:
    async with cluster() as c:
        prompts = [[50 + i] * (2 + i % 40) for i in range(64)]
        names = [c.add(prompt, max_tokens=30) for prompt in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            assert await c.finish(name) == (expected_tokens(prompt, 30), FinishReason.LENGTH)
        assert c.batches < 64 * 30 / 4  # a batch carries many requests
        await until(lambda: len(c.prefill.released) == 64)
        await c.everything_returned()


async def test_a_stop_is_delivered_as_a_stop() -> None:
    async with cluster() as c:
        c.decode.knobs.stop_after = 3
        assert await c.run(PROMPT) == (expected_tokens(PROMPT, 3), FinishReason.STOP)


async def test_work_goes_to_the_least_loaded_worker() -> None:
    async with cluster(prefill=2, decode=3) as c:
        for double in c.role("decode"):
            double.knobs.mute_steps = True
        names = [c.add(PROMPT, max_tokens=10) for _ in range(9)]
        await until(lambda: sum(double.held for double in c.role("decode")) == 9)
        assert [double.held for double in c.role("decode")] == [3, 3, 3]
        assert {len(double.adds) for double in c.role("prefill")} <= {4, 5}
        c.dispatcher.abort(names)


async def test_a_draining_worker_finishes_what_it_holds() -> None:
    async with cluster(decode=2) as c:
        first, second = c.role("decode")
        first.knobs.step_seconds = 0.02
        name = c.add(PROMPT, max_tokens=20)
        await until(lambda: len(c.outputs[name]) > 0)
        draining = replace(first.member, draining=True)
        await c.membership.set([c.prefill.member, draining, second.member])
        await until(lambda: len(c.dispatcher.roster.ready("decode")) == 1)
        other = c.add(PROMPT)
        await c.finish(other)
        assert c.trace(other)["route"] == "handover p0 d1"
        # Its lease ends too, while the request is still on it.
        await c.membership.set([c.prefill.member, second.member])
        assert await c.finish(name) == (expected_tokens(PROMPT, 20), FinishReason.LENGTH)
        await until(lambda: "d0" not in c.dispatcher.roster._links)


async def test_the_last_view_stays_in_force_without_the_register() -> None:
    async with cluster() as c:
        await c.membership.set([double.member for double in c.doubles], connected=False)
        await until(lambda: c.dispatcher.roster.report()["register"] is False)
        assert (await c.run(PROMPT))[1] is FinishReason.LENGTH
        assert any("etcd is away" in text for text in c.dispatcher.roster.report()["missing"])


async def test_too_many_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_FLIGHTS", 2)
    async with cluster() as c:
        c.decode.knobs.mute_steps = True
        names = [c.add(PROMPT) for _ in range(2)]
        with pytest.raises(Overloaded):
            c.add(PROMPT)
        c.dispatcher.abort(names)
        assert c.dispatcher.in_flight == 0


async def test_a_reader_that_stalls_holds_the_workers_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_READY", 4)
    async with cluster() as c:
        stalled = asyncio.Event()

        async def stall() -> object:
            await stalled.wait()
            return await original()

        original = c.dispatcher.outputs
        await c.run(PROMPT)
        monkeypatch.setattr(c.dispatcher, "outputs", stall)
        name = c.add(PROMPT, max_tokens=500)
        await until(lambda: c.decode.held == 0 and c.decode.steps_sent > 400)
        assert len(c.dispatcher._outbox) <= 5
        stalled.set()
        assert (await c.finish(name))[0] == expected_tokens(PROMPT, 500)


@pytest.mark.parametrize("bundles", [True, False])
async def test_requests_that_come_together_share_a_message_where_the_worker_reads_bundles(
    bundles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = WorkerDouble.Describe

    async def described(self: WorkerDouble, request: Any, context: Any) -> Any:
        self.bundles = bundles  # an older worker does not say that it does
        return await describe(self, request, context)

    monkeypatch.setattr(WorkerDouble, "Describe", described)
    async with cluster(prefill=0) as c:
        names = [c.add([1, 2, number]) for number in range(20)]
        for number, name in enumerate(names):
            assert await c.finish(name) == (expected_tokens([1, 2, number], 6), FinishReason.LENGTH)
        assert [list(add.prompt)[2] for add in c.decode.adds] == list(range(20))
        assert (c.decode.messages < 4) if bundles else (c.decode.messages >= 20)


async def test_closing_ends_what_is_in_flight() -> None:
    async with cluster() as c:
        c.decode.knobs.mute_steps = True
        name = c.add(PROMPT)
        await until(lambda: c.decode.held == 1)
        c.dispatcher.end_all("stopping")
        assert await c.finish(name) == ([], FinishReason.ERROR)
        assert c.trace(name)["failure"] == "shutdown"
        await until(lambda: len(c.prefill.released) == 1)
        await c.everything_returned()
