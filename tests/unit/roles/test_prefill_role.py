# SPDX-License-Identifier: Apache-2.0
"""Publishing: one record, two ledger writes, and nothing left behind whatever goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deltaserve.engine.role import Refused
from deltaserve.wire import worker_pb2 as pb
from statestore.connector.messages import RankReport
from statestore.connector.passes import Passes
from tests.unit.roles.harness import PrefillHarness, Stream, job

PROMPT = list(range(100, 140))


async def _prepared(h: PrefillHarness, stream: Stream, prompt: list[int] = PROMPT):
    await h.join()
    j = job(stream, prompt, publish=pb.Publish(preferred_segment="seg"))
    request = await h.role.prepare(j)
    j.ended = True  # by the step that computed the prompt
    return j, request


async def test_a_publish_computes_n_minus_1_tokens_and_commits_in_two_writes() -> None:
    h, stream = PrefillHarness(tp=2), Stream()
    j, request = await _prepared(h, stream)
    assert request.prompt_token_ids == PROMPT[:-1]
    assert request.sampling_params.max_tokens == 1
    assert j.silent
    h.role.on_written(j, h.outcome(request, h.written(request, 1), h.written(request, 0)))
    message = await stream.next()
    assert message.published.committed
    assert message.published.length == len(PROMPT) - 1
    assert message.published.bytes == 4 * 64
    record = await h.ledger.get_committed(message.published.boundary)
    assert record is not None
    assert [entry.rank for entry in record.ranks] == [0, 1]
    assert len(record.objects()) == 4
    assert h.ledger.writes == 2
    assert h.forgotten == [j]


async def test_the_only_ranks_word_is_enough_to_commit_and_the_engines_comes_later() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    outcome = h.outcome(request, h.written(request))
    h.role.on_wrote(j, outcome.links[-1])
    message = await stream.next()
    assert message.published.committed
    assert message.published.bytes == 2 * 64
    assert h.ledger.writes == 2
    assert h.forgotten == [], "its blocks are pinned until the engine has taken the report"
    passes = Passes(steps=1, computed=len(PROMPT) - 1)
    h.role.on_written(j, replace(outcome, passes=passes))
    await _settle(h)
    assert h.forgotten == [j]
    assert (h.role._prefills.prompts, h.role._prefills.passes) == (1, 1)
    assert h.ledger.writes == 2
    assert stream.sent == [], "it is said once"


async def test_a_rank_that_did_not_write_all_of_it_commits_nothing_early() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    outcome = h.outcome(request, h.written(request))
    (link,) = outcome.links
    failed = replace(link, reports=(RankReport(0, failure="null_state"),))
    for other in (replace(link, base=16), replace(link, link=1), failed):
        h.role.on_wrote(j, other)
    await _settle(h)
    assert stream.sent == []
    assert h.ledger.writes < 2, "opened, not committed"
    h.role.on_written(j, outcome)
    assert (await stream.next()).published.committed, "the engine's word is the whole of it"
    h.role.on_wrote(j, link)
    await _settle(h)
    assert (h.ledger.writes, stream.sent) == (2, [])


async def test_a_client_that_goes_between_the_ranks_word_and_the_engines_leaves_nothing() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    j.ended = False
    outcome = h.outcome(request, h.written(request))
    h.role.on_wrote(j, outcome.links[-1])
    j.ended = True
    h.role.on_end(j, "aborted")
    h.role.on_publish_failed(j, "aborted")
    h.role.on_written(j, outcome)
    await _settle(h)
    assert not h.store.objects
    assert not h.ledger.records


async def test_release_removes_objects_and_record() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    h.role.on_written(j, h.outcome(request, h.written(request)))
    boundary = (await stream.next()).published.boundary
    assert h.store.objects, "the control: there is something to remove"
    await h.role.release([boundary])
    assert not h.store.objects
    assert not h.ledger.records
    await h.role.release([boundary])  # once more is no error


async def test_a_rank_that_fails_aborts_the_boundary_and_removes_its_siblings_objects() -> None:
    h, stream = PrefillHarness(tp=2), Stream()
    j, request = await _prepared(h, stream)
    h.role.on_written(
        j, h.outcome(request, h.written(request, 0), h.written(request, 1, failure="null_state"))
    )
    message = await stream.next()
    assert not message.published.committed
    assert "null_state" in message.published.error
    await _settle(h)
    assert not h.store.objects
    assert not h.ledger.records


async def test_nothing_becomes_visible_after_the_lease_was_lost() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    await asyncio.sleep(0)
    await h.register.expire("prefill-a")
    h.role.on_written(j, h.outcome(request, h.written(request)))
    assert not (await stream.next()).published.committed
    await _settle(h)
    assert not h.store.objects
    assert not [r for r in h.ledger.records.values() if '"committed"' in r]


async def test_a_ledger_that_is_away_fails_the_publish_and_the_objects_go() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    h.ledger.commit_fails = 1
    h.role.on_written(j, h.outcome(request, h.written(request)))
    assert not (await stream.next()).published.committed
    await _settle(h)
    assert not h.store.objects


async def test_what_cannot_be_given_back_now_is_given_back_later() -> None:
    """A living owner is never swept: a record it cannot delete would stay for ever."""
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    report = h.written(request)
    await j.state["publication"].opening
    await h.register.set_away(True)
    h.role.on_written(j, h.outcome(request, report))
    assert not (await stream.next()).published.committed
    assert h.ledger.records, "the control: etcd is away, the record is still there"
    await h.register.set_away(False)
    await _settle(h)
    assert not h.ledger.records
    assert not h.store.objects


async def test_an_aborted_request_is_cleaned_up_when_its_ranks_have_reported() -> None:
    h, stream = PrefillHarness(), Stream()
    j, request = await _prepared(h, stream)
    h.role.on_end(j, "aborted")
    assert not stream.sent, "its blocks are still being written: nothing to say yet"
    h.role.on_written(j, h.outcome(request, h.written(request)))
    assert not (await stream.next()).published.committed
    await _settle(h)
    assert not h.store.objects
    assert not h.ledger.records


async def test_ranks_that_never_report_run_into_the_deadline() -> None:
    h, stream = PrefillHarness(), Stream()
    await h.join()
    j = job(stream, PROMPT, publish=pb.Publish(), timeout=0.05)
    request = await h.role.prepare(j)
    j.ended = True
    message = await stream.next()
    assert not message.published.committed
    assert "deadline" in message.published.error
    assert h.ledger.records, "ranks may still write: the record says where"
    assert not h.forgotten
    # The job keeps its name until its ranks have reported; then all of it goes, and the router hears nothing more.
    h.role.on_written(j, h.outcome(request, h.written(request)))
    await _settle(h)
    assert not stream.sent
    assert not h.ledger.records
    assert not h.store.objects
    assert h.forgotten == [j]


async def test_epochs_are_never_reused_and_follow_the_lease() -> None:
    h, stream = PrefillHarness(), Stream()
    await h.join()
    epochs = []
    for lease_changes in (False, False, True):
        if lease_changes:
            await h.register.expire("prefill-a", come_back=True)
        request = await h.role.prepare(job(stream, PROMPT, publish=pb.Publish()))
        epochs.append(request.sampling_params.extra_args["kv_transfer_params"]["deltaserve"].publish.epoch)
    assert len({str(epoch) for epoch in epochs}) == 3
    assert epochs[0].lease == epochs[1].lease != epochs[2].lease


@pytest.mark.parametrize("prompt", [[5], []])
async def test_a_prompt_without_a_boundary_is_refused(prompt: list[int]) -> None:
    h, stream = PrefillHarness(), Stream()
    await h.join()
    with pytest.raises(Refused, match="one token"):
        await h.role.prepare(job(stream, prompt, publish=pb.Publish()))


async def test_a_load_directive_is_refused() -> None:
    h, stream = PrefillHarness(), Stream()
    await h.join()
    with pytest.raises(Refused, match="publish directive"):
        await h.role.prepare(job(stream, PROMPT, load=pb.Load(boundary="x")))


async def _settle(h: PrefillHarness) -> None:
    await h.settle()
