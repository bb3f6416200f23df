# SPDX-License-Identifier: Apache-2.0
"""What a decode worker leaves for the next turn, and what it starts from."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.engine.role import Job
from deltaserve.wire import worker_pb2 as pb
from statestore.connector.intents import Intents
from statestore.connector.messages import RankReport
from statestore.prefix import prefix_hash
from tests.unit.roles.harness import DecodeHarness, PrefillHarness, Stream, job
from tests.unit.roles.test_prefill_checkpoints import publish

PROMPT = list(range(100, 170))
ANSWER = [5, 6, 7, 8]


async def decode_beside(prefill: PrefillHarness, **config: Any) -> DecodeHarness:
    h = DecodeHarness(beside=prefill, **config)
    await h.join()
    h.see()
    return h


async def prefilled() -> tuple[PrefillHarness, str]:
    """A prefill worker with one boundary that rests on two checkpoints."""
    prefill = PrefillHarness()
    await prefill.join()
    _, _, message = await publish(prefill)
    return prefill, message.boundary


async def answer(
    h: DecodeHarness, boundary: str = "", prompt: list[int] = PROMPT, tokens: list[int] = ANSWER
) -> tuple[Job, Any, Stream]:
    """A whole request; the last token that was sampled has not been computed."""
    stream = Stream()
    handoff = {"load": pb.Load(boundary=boundary, recompute=True)} if boundary else {}
    j = job(stream, prompt, **handoff)
    request = await h.role.prepare(j)
    load = h.intents(request).load
    if load is not None:
        h.role.on_restored(j, load.length, [RankReport(0, nbytes=10)])
    j.ended = True
    h.role.on_end(j, "finished")
    if h.intents(request).publish is not None:
        h.role.on_written(j, h.outcome_of(request, [], [*prompt, *tokens[:-1]]))
    await h.settle()
    h.see()
    return j, request, stream


async def test_a_chain_is_loaded_and_the_answers_end_rests_on_its_checkpoints() -> None:
    prefill, boundary = await prefilled()
    h = await decode_beside(prefill)
    j, request, stream = await answer(h, boundary)
    load = h.intents(request).load
    assert load is not None
    assert [record.length for record in load.records] == [32, 64, 69]
    loaded = (await stream.next()).loaded
    assert (loaded.from_store, loaded.local, loaded.failure) == (69, 0, "")
    end = next(r for r in h.checkpoints().values() if r.owner == "decode-a")
    covered = [*PROMPT, *ANSWER[:-1]]
    assert (end.base, end.length, end.reusable) == (64, len(covered), True)
    assert end.prefix_hash == prefix_hash(covered)
    assert end.parents == tuple(r.id for r in load.records[:2]), "not on the request's own boundary"
    await prefill.role.release([boundary])
    assert h.own() == []
    assert await h.ledger.get_chain(end.id)
    assert h.forgotten == [j]


async def test_the_next_turn_starts_from_the_end_of_the_answer() -> None:
    prefill, boundary = await prefilled()
    h = await decode_beside(prefill)
    await answer(h, boundary)
    prefill.see()
    turn = [*PROMPT, *ANSWER, *range(40, 50)]
    _, request, message = await publish(prefill, turn)
    assert message.store_tokens == len(PROMPT) + len(ANSWER) - 1
    assert prefill.intent(request).base == message.store_tokens


async def test_a_prompt_without_a_boundary_starts_from_a_checkpoint() -> None:
    prefill, _ = await prefilled()
    h = await decode_beside(prefill)
    other = [*PROMPT[:66], 1, 2]
    _, request, stream = await answer(h, "", other)
    load = h.intents(request).load
    assert load is not None
    assert load.length == 64
    loaded = (await stream.next()).loaded
    assert (loaded.from_store, loaded.local) == (64, 0)
    ends = [r for r in h.checkpoints().values() if r.owner == "decode-a"]
    assert [(r.base, r.length) for r in ends] == [(64, len(other) + 3)]
    nothing = [3, *PROMPT]
    _, request, _ = await answer(h, "", nothing)
    assert h.intents(request).load is None, "the control"


async def test_a_boundary_whose_chain_has_a_hole_is_computed() -> None:
    prefill, boundary = await prefilled()
    h = await decode_beside(prefill)
    chain = await h.ledger.get_chain(boundary)
    await h.ledger.release(chain[0])
    h.see()
    _, request, stream = await answer(h, boundary)
    assert h.intents(request).load is None
    assert (await stream.next()).loaded.failure == "broken_chain"


async def test_a_checkpoint_that_fails_is_computed_and_not_found_again() -> None:
    prefill, _ = await prefilled()
    h = await decode_beside(prefill)
    stream = Stream()
    j = job(stream, [*PROMPT[:66], 1, 2])
    request = await h.role.prepare(j)
    h.role.on_restored(j, 0, [RankReport(0, failure="null_state", detail="zeros")])
    loaded = (await stream.next()).loaded
    assert (loaded.from_store, loaded.failure) == (0, "null_state")
    end = h.outcome_of(request, [], [*PROMPT[:66], 1, 2, *ANSWER[:-1]], load_failed=True)
    h.role.on_written(j, end)
    await h.settle()
    record = next(r for r in h.checkpoints().values() if r.owner == "decode-a")
    assert (record.base, record.parents) == (0, ())
    assert h.role.publisher.index.lookup(PROMPT, "", 69)[-1].length == 32


@pytest.mark.parametrize("how", ["aborted", "refused", "too short", "rank", "ledger", "speculation"])
async def test_what_comes_to_no_good_end_leaves_nothing(how: str) -> None:
    h = await decode_beside(PrefillHarness(), checkpoint_min_tokens=72)
    prompt = PROMPT
    j = job(Stream(), prompt)
    request = await h.role.prepare(j)
    assert h.ledger.records or not j.state["answer"].opening.done(), "the control: something is open"
    j.ended = True
    covered = [*prompt, *ANSWER[:-1]]
    if how == "aborted":
        h.role.on_end(j, "aborted")
        h.role.on_written(j, h.outcome_of(request, [], covered))
    elif how == "refused":
        h.role.on_end(j, "ValueError: no")
    elif how == "too short":
        h.role.on_end(j, "finished")
        h.role.on_written(j, h.outcome_of(request, [], prompt[:-1]))
    elif how == "rank":
        h.role.on_end(j, "finished")
        h.role.on_written(j, h.outcome_of(request, [], covered, failed="store_unavailable"))
    elif how == "ledger":
        h.ledger.commit_fails = 1
        h.role.on_end(j, "finished")
        h.role.on_written(j, h.outcome_of(request, [], covered))
    else:
        h.role.on_end(j, "finished")
        h.role.on_publish_failed(j, how)
    await h.settle()
    assert not h.ledger.records
    assert not h.store.objects
    assert h.role.publisher.budget.used == 0
    assert h.forgotten == [j]


async def test_tokens_that_come_after_the_connectors_word_find_their_job() -> None:
    """It may say that there is nothing to publish before the step that ends the request has been delivered."""
    h = await decode_beside(PrefillHarness())
    j = job(Stream(), PROMPT)
    await h.role.prepare(j)
    h.role.on_publish_failed(j, "nothing to publish")
    await h.settle()
    assert h.forgotten == []
    assert "keep" not in j.state, "so its end forgets it"
    assert not h.ledger.records


async def test_the_same_answer_twice_is_kept_once() -> None:
    h = await decode_beside(PrefillHarness())
    jobs = [job(Stream(), PROMPT) for _ in range(2)]
    requests = [await h.role.prepare(j) for j in jobs]
    for j, request in zip(jobs, requests, strict=True):
        h.role.on_end(j, "finished")
        h.role.on_written(j, h.outcome_of(request, [], [*PROMPT, 1, 2]))
    await h.settle()
    assert len(h.ledger.records) == 1
    assert len(h.store.objects) == 2
    assert h.role.publisher.budget.used == h.store.used


async def test_too_short_requests_are_not_opened_at_all() -> None:
    h = await decode_beside(PrefillHarness(), checkpoint_min_tokens=200)
    request = await h.role.prepare(job(Stream(), PROMPT))
    assert request.sampling_params.extra_args is None
    assert h.ledger.writes == 0
    off = await decode_beside(PrefillHarness(), checkpoint_bytes=0)
    request = await off.role.prepare(job(Stream(), PROMPT))
    assert request.sampling_params.extra_args is None


async def test_without_room_the_answer_runs_and_is_not_kept() -> None:
    h = await decode_beside(PrefillHarness(), store={"segment_bytes": 100})
    j = job(Stream(), PROMPT)
    request = await h.role.prepare(j)
    assert request.sampling_params.extra_args is None
    h.role.on_end(j, "finished")
    assert not h.ledger.records


async def test_a_full_budget_keeps_the_latest_answers() -> None:
    h = await decode_beside(PrefillHarness(), checkpoint_bytes=8_000)
    for number in range(60):
        await answer(h, "", [number, *PROMPT])
    kept = {r.prefix_hash for r in h.checkpoints().values()}
    assert 2 < len(kept) < 40
    last = [prefix_hash([number, *PROMPT, *ANSWER[:-1]]) for number in range(58, 60)]
    assert set(last) <= kept
    assert h.role.publisher.budget.used == h.store.used <= 8_000


async def test_an_answer_that_can_not_be_kept_within_the_limit_is_dropped() -> None:
    h = await decode_beside(PrefillHarness())
    j = job(Stream(), PROMPT)
    request = await h.role.prepare(j)
    h.role.publisher.budget.checkpoint_limit = 100
    j.ended = True
    h.role.on_written(j, h.outcome_of(request, [], [*PROMPT, 1, 2]))
    await h.settle()
    assert not h.ledger.records
    assert not h.store.objects


async def test_a_lookup_needs_the_same_salt() -> None:
    prefill, _ = await prefilled()
    h = await decode_beside(prefill)
    j = job(Stream(), [*PROMPT, 4])
    j.add.cache_salt = "tenant"
    found = h.intents(await h.role.prepare(j))
    assert isinstance(found, Intents)
    assert found.load is None
