# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler half: which blocks a boundary lies in, when they are pinned, when a request may run.

Publish, happy path: the request's prompt is the N-1 tokens. In a step that ends on a block boundary far enough after
the last link, in one that takes a state on its way (inside.py), and in the step that computes the last token,
`build_metadata` takes the request's block table, as the cache manager holds it then, into a job, and pins its blocks.
The pins go when every rank has reported that link, well or badly. When no link is out any more and none is to come, the
service hears of all of them, and commits.

A publish without a length is the end of an answer: its one link is made when the request has ended by itself, of
everything that has been computed, and goes out with the next step. Where steps are scheduled ahead, one of the
request's may be on the device still: then that is the token which ended the answer as well, and without such a step the
last token has been sampled only.

Load, happy path: `matched` offers the boundary's tokens, vLLM allocates, `allocated` makes the job, the request waits
until every rank has reported; only then is it scheduled, and computes what follows.

A load that begins before its boundary is committed is the same, but for the gate (gate.py) behind the ranks' reports.

Crash paths: a request that ends early sends no further link; those that are out are waited for. A load that fails on
any rank is reported to vLLM, which frees and reschedules the request; then `matched` offers nothing, the prompt is
computed here, and what it publishes rests on no other boundary. A request that is aborted while it loads keeps its
blocks until every rank has reported (vLLM does that). A preempted request begins again; its pins and links stay.

A recurrent block is never resolved by its position in a hash chain: align mode leaves null blocks between states, so
the running state is the block at the position of the last computed token, and a null block there is refused here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from statestore.connector.events import emit, show
from statestore.connector.gate import Gate
from statestore.connector.inside import NULL_BLOCK, Inside, Offer, last_inside
from statestore.connector.intents import MAX_LINKS, PARAMS, Intents, LoadIntent, PublishIntent
from statestore.connector.links import Link, Links
from statestore.connector.messages import LoadJob, PublishJob, RankReport, RankReports, StepMetadata
from statestore.connector.passes import Passes
from statestore.connector.pins import Pins

__all__ = ["MAX_LINKS", "PARAMS", "Intents", "LoadIntent", "PublishIntent", "SchedulerHalf"]

log = logging.getLogger(__name__)


@dataclass
class _Publish:
    intent: PublishIntent
    request: Any
    links: Links
    tokens: list[int]
    passes: Passes = field(default_factory=Passes)


@dataclass
class _Load:
    intent: LoadIntent
    request: Any
    tokens: int = 0
    over: bool = False


class SchedulerHalf:
    """State of the boundaries that this engine writes and reads; used on the engine thread only."""

    def __init__(
        self, worker_id: str, world_size: int, dcp: int, groups: list[Any], speculative: bool = False
    ) -> None:
        """`groups`: vLLM's KV cache groups, in the order of every block table; `dcp`: decode context parallel size.

        `speculative`: the engine drafts tokens, so that the running state may be ahead of the accepted ones.
        """
        self._worker_id = worker_id
        self._world_size = world_size
        self._speculative = speculative
        self._recurrent = [_is_recurrent(group.kv_cache_spec) for group in groups]
        self._states = [number for number, state in enumerate(self._recurrent) if state]
        # One block id of an attention group stands for block_size tokens on every DCP rank; KDA state is not divided.
        self._block_tokens = [
            group.kv_cache_spec.block_size * (dcp if group.kv_cache_spec.dcp_sharded else 1)
            for group in groups
        ]
        self._state_tokens = next(
            tokens for tokens, state in zip(self._block_tokens, self._recurrent, strict=True) if state
        )
        self._cache_manager: Any = None
        self.gate = Gate()
        self._pins = Pins()
        self._publish: dict[str, _Publish] = {}
        self._load: dict[str, _Load] = {}
        self._loading: dict[str, list[RankReport]] = {}
        self._new_loads: list[LoadJob] = []
        self._new_publishes: list[PublishJob] = []

    def bind(self, cache_manager: Any) -> None:
        """vLLM's cache manager; the authority on block tables. Raises RuntimeError when it has changed its shape."""
        self._pins.bind(cache_manager)
        self._cache_manager = cache_manager

    def added(self, request: Any) -> None:
        """A request entered the scheduler."""
        # Taken out of the request: vLLM sends its parameters to every rank, and a chain may be hundreds of kilobytes.
        intents = (request.kv_transfer_params or {}).pop(PARAMS, None)
        if not isinstance(intents, Intents):
            return
        if intents.publish is not None:
            links = Links(intents.publish, self._world_size)
            self._publish[request.request_id] = _Publish(intents.publish, request, links, [])
        if intents.load is not None:
            self._load[request.request_id] = _Load(intents.load, request)
            if intents.load.early:
                self.gate.add(request.request_id)

    # ---- load

    def matched(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        """Tokens that a load would bring beyond the `local_tokens` found here, and that it runs asynchronously."""
        load = self._load.get(request.request_id)
        if load is None or load.over:
            return 0, False
        if load.intent.length >= request.num_tokens:
            # At least one token must be computed, and a recurrent state cannot take a token twice.
            load.over = True
            detail = f"a boundary of {load.intent.length} tokens for a request of {request.num_tokens}"
            self._restored(request.request_id, 0, [RankReport(0, failure="length", detail=detail)])
            return 0, False
        tokens = load.intent.length - local_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], tokens: int) -> None:
        """vLLM allocated blocks; `tokens` > 0 of them are to be loaded."""
        load = self._load.get(request.request_id)
        if load is None or load.over:
            return
        load.over = True
        if tokens <= 0:
            emit(self._worker_id, "restored", request.request_id, 0, [])
            return
        load.tokens = tokens
        length = load.intent.length
        self._new_loads.append(
            LoadJob(request.request_id, load.intent.records, self._blocks(block_ids, length), length - tokens)
        )
        show(self._worker_id, "sent", request.request_id, "load", self._world_size)

    def _restored(self, key: str, tokens: int, reports: list[RankReport]) -> None:
        """Every rank has reported a load; `tokens` are restored when all went well."""
        failed = any(report.failure for report in reports)
        publish = self._publish.get(key)
        if failed and publish is not None:
            publish.links.rebase()
        emit(self._worker_id, "restored", key, 0 if failed else tokens, reports)

    # ---- publish

    def build_metadata(
        self, scheduled: dict[str, int], offers: Mapping[str, Sequence[Offer]] | None = None
    ) -> StepMetadata:
        """Jobs that start with the step that schedules `scheduled[request id]` tokens; `offers`: by request, the blocks
        that vLLM offers of states in this step."""
        metadata = StepMetadata(publish=self._new_publishes, load=self._new_loads)
        self._new_publishes, self._new_loads = [], []
        if self._publish:
            for key, tokens in scheduled.items():
                publish = self._publish.get(key)
                if publish is None:
                    continue
                first = publish.request.num_computed_tokens
                computed = first + tokens
                if publish.intent.length is not None and not publish.links.closed:
                    publish.passes.step(first, tokens)
                inside = self._inside(key, first, computed, (offers or {}).get(key, ()))
                if inside is not None and (link := publish.links.passed(inside.length)) is not None:
                    job = self._publish_job(key, publish.intent, link, inside)
                    metadata.publish.append(replace(job, tokens=tokens))
                link = publish.links.due(computed, self._state_tokens)
                if link is not None:
                    job = self._publish_job(key, publish.intent, link)
                    metadata.publish.append(replace(job, tokens=tokens))
        return metadata

    def _inside(self, key: str, first: int, end: int, offers: Sequence[Offer]) -> Inside | None:
        if not offers:
            return None
        return last_inside(offers, self._states, self._cache_manager.get_block_ids(key), first, end)

    def _publish_job(
        self, key: str, intent: PublishIntent, link: Link, inside: Inside | None = None
    ) -> PublishJob:
        tables = self._cache_manager.get_block_ids(key)
        blocks, spans = self._blocks(tables, link.length, inside), self._spans(link.base, link.length)
        if inside is not None:
            for group, block in inside.blocks.items():
                at = tables[group].index(block)
                spans[group] = (at, at)
        self._pins.pin((key, link.number), key, spans)
        show(self._worker_id, "sent", key, "publish", self._world_size)
        return PublishJob(
            key,
            intent.epoch,
            link.length,
            blocks,
            intent.segment,
            intent.packing_dcp,
            intent.packing_interleave,
            link.base,
            link.number,
            link.final,
        )

    def _blocks(
        self, tables: tuple[list[int], ...], length: int, inside: Inside | None = None
    ) -> tuple[list[int], ...]:
        """Per group what holds the state after `length` tokens: one running-state block (of a state that was taken on
        the way, the one that was offered), or the table."""
        blocks = []
        for group, (table, recurrent, tokens) in enumerate(
            zip(tables, self._recurrent, self._block_tokens, strict=True)
        ):
            last = -(-length // tokens) - 1
            if not recurrent:
                chosen = list(table[: last + 1])
            else:
                chosen = [table[last] if inside is None else inside.blocks[group]]
            if NULL_BLOCK in chosen:
                # A bug here or in vLLM; it must never become state. The worker half reports it as a failure.
                log.error("null block in the table of a boundary of %d tokens: %s", length, table)
            blocks.append(chosen)
        return tuple(blocks)

    def _spans(self, base: int, length: int) -> list[tuple[int, int]]:
        """Per group the positions, first and last, of the blocks that a link of [base, length) is read from."""
        spans = []
        for recurrent, tokens in zip(self._recurrent, self._block_tokens, strict=True):
            last = -(-length // tokens) - 1
            spans.append((last if recurrent else base // tokens, last))
        return spans

    def collect(self, reports: RankReports | None) -> None:
        """Reports of the ranks from the step just ended."""
        if reports is None:
            return
        for (key, number), of_ranks in reports.publish.items():
            publish = self._publish[key]
            show(self._worker_id, "reported", key, "publish", of_ranks)
            if publish.links.report(number, of_ranks):
                self._pins.unpin((key, number))
                self._settle(key, publish)
        for key, of_ranks in reports.load.items():
            show(self._worker_id, "reported", key, "load", of_ranks)
            done = self._loading.setdefault(key, [])
            done.extend(of_ranks)
            if len(done) == self._world_size:
                del self._loading[key]
                load = self._load.get(key)
                self._restored(key, load.tokens if load is not None else 0, done)

    def _settle(self, key: str, publish: _Publish) -> None:
        """Tell the service once nothing is out and nothing will follow."""
        if publish.links.over:
            del self._publish[key]
            outcome = publish.links.outcome(publish.tokens)
            emit(self._worker_id, "written", key, replace(outcome, passes=publish.passes))

    def finished(self, request: Any) -> None:
        """The request ended; called before its blocks are freed. Pins keep those that are still read."""
        key = request.request_id
        self._load.pop(key, None)
        self._new_loads = [job for job in self._new_loads if job.key != key]
        publish = self._publish.get(key)
        if publish is None:
            return
        reason = "the request ended before its last prompt token"
        if publish.intent.length is None:
            reason = self._publish_answer(key, publish)
        publish.links.close()
        if not publish.links.started:
            del self._publish[key]
            emit(self._worker_id, "publish_failed", key, reason)
        else:
            self._settle(key, publish)

    def _publish_answer(self, key: str, publish: _Publish) -> str:
        """Make the link of an answer that has just ended; returns why there is none."""
        request = publish.request
        if not _ended_by_itself(request):
            return "the request was aborted"
        if self._speculative:
            return "speculation"
        length = request.num_computed_tokens
        if request.num_in_flight_tokens and not _one_ahead(request):
            return "steps of other tokens are in flight"
        link = publish.links.finish(length)
        if link is None:
            return "nothing to publish"
        publish.tokens = list(request.all_token_ids[:length])
        self._new_publishes.append(self._publish_job(key, publish.intent, link))
        return ""

    @property
    def pending(self) -> bool:
        """True while a link is out: the engine must keep stepping to collect the reports."""
        return bool(self._pins)


def _is_recurrent(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def _one_ahead(request: Any) -> bool:
    """Whether what is on the device of the request is one step, which computes the token that ended the answer.

    vLLM counts a step's tokens as computed when it schedules it, and the request has their blocks then. So the running
    state at `num_computed_tokens` will be that of all tokens, once the device has come there; the ranks read it behind
    a fence of a later step. After a preemption the counts are of something else.
    """
    return (
        request.num_in_flight_tokens == 1
        and request.num_computed_tokens == request.num_tokens
        and not request.num_stale_output_tokens
    )


def _ended_by_itself(request: Any) -> bool:
    from vllm.v1.request import RequestStatus

    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
