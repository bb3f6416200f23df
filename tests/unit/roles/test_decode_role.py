# SPDX-License-Identifier: Apache-2.0
"""Restoring: a decode worker believes nothing that it has not checked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deltaserve.engine.role import Job
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryRecord
from statestore.connector.messages import RankReport
from statestore.connector.scheduler_half import LoadIntent
from tests.unit.roles.harness import DecodeHarness, PrefillHarness, Stream, geometry, job

PROMPT = list(range(200, 233))


class Case:
    """A published boundary, and a decode role that reads the same ledger."""

    def __init__(self, **config: Any) -> None:
        self.prefill = PrefillHarness()
        self.stream = Stream()
        self.decode = DecodeHarness(2, beside=self.prefill, **{"checkpoint_bytes": 0, **config})
        self.role = self.decode.role

    async def publish(self) -> str:
        stream = Stream()
        await self.prefill.join()
        j = job(stream, PROMPT, publish=pb.Publish())
        request = await self.prefill.role.prepare(j)
        self.prefill.role.on_written(j, self.prefill.outcome(request, self.prefill.written(request)))
        return (await stream.next()).published.boundary

    async def load(self, boundary: str, prompt: list[int] = PROMPT) -> tuple[Job, Any]:
        j = job(self.stream, prompt, load=pb.Load(boundary=boundary, recompute=True))
        return j, await self.role.prepare(j)

    def change(self, boundary: str, **changes: Any) -> None:
        """Rewrite the record in the ledger."""
        record = BoundaryRecord.from_json(self.prefill.ledger.records[boundary])
        self.prefill.ledger.records[boundary] = replace(record, **changes).to_json()


def _intent(request: Any) -> Any:
    return (request.sampling_params.extra_args or {}).get("kv_transfer_params", {}).get("deltaserve")


async def test_a_committed_boundary_of_this_prompt_is_loaded() -> None:
    case = Case()
    boundary = await case.publish()
    j, request = await case.load(boundary)
    intent = _intent(request).load
    assert isinstance(intent, LoadIntent)
    assert [record.id for record in intent.records] == [boundary]
    assert request.prompt_token_ids == PROMPT
    case.role.on_restored(j, len(PROMPT) - 1, [RankReport(0, nbytes=10), RankReport(1, nbytes=10)])
    message = await case.stream.next()
    assert message.loaded.from_store == len(PROMPT) - 1
    assert message.loaded.local == 0
    assert not message.loaded.failure


async def test_what_lies_in_the_local_cache_is_told_apart() -> None:
    case = Case()
    j, _ = await case.load(await case.publish())
    case.role.on_restored(j, 16, [RankReport(0), RankReport(1)])
    message = await case.stream.next()
    assert (message.loaded.from_store, message.loaded.local) == (16, 16)


@pytest.mark.parametrize(
    ("changes", "prompt", "kind"),
    [
        ({}, [*PROMPT[:-2], 1, 2], "wrong_prefix"),
        ({}, [*PROMPT, 9], "wrong_prefix"),
        ({"geometry": geometry(conv_dtype="bfloat16").to_json()}, PROMPT, "geometry"),
        ({"geometry": geometry(model_digest="feedfeed").to_json()}, PROMPT, "geometry"),
        ({"geometry": "{}"}, PROMPT, "geometry"),
        ({"state": "pending"}, PROMPT, "missing_record"),
    ],
)
async def test_what_does_not_fit_is_computed_instead(
    changes: dict[str, Any], prompt: list[int], kind: str
) -> None:
    case = Case()
    boundary = await case.publish()
    case.change(boundary, **changes)
    _, request = await case.load(boundary, prompt)
    assert _intent(request) is None
    message = await case.stream.next()
    assert message.loaded.failure == kind
    assert message.loaded.from_store == 0


async def test_a_record_that_is_gone_or_unreachable_is_computed_instead() -> None:
    case = Case()
    boundary = await case.publish()
    await case.load("nobody.knows.1-1")
    assert (await case.stream.next()).loaded.failure == "missing_record"
    await case.prefill.register.set_away(True)
    _, request = await case.load(boundary)
    assert _intent(request) is None
    assert (await case.stream.next()).loaded.failure == "ledger"


async def test_one_rank_that_fails_fails_the_load() -> None:
    case = Case()
    j, _ = await case.load(await case.publish())
    case.role.on_restored(j, 0, [RankReport(0), RankReport(1, failure="digest", detail="...")])
    message = await case.stream.next()
    assert message.loaded.failure == "digest"
    assert message.loaded.from_store == 0


async def test_a_request_without_a_directive_runs_as_it_is() -> None:
    case = Case()
    request = await case.role.prepare(job(case.stream, PROMPT))
    assert request.prompt_token_ids == PROMPT
    assert not case.stream.sent
