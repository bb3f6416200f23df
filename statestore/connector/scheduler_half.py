# SPDX-License-Identifier: Apache-2.0
"""The connector's scheduler half: which blocks a boundary lies in, when they are pinned, when a request may run.

Publish, happy path: the request's prompt is the N-1 tokens. In the step that computes the last of them,
`build_metadata` takes the request's block table, as the cache manager holds it then, into a job. The request ends in
that step (it samples one token that nobody reads); `finished` answers that its blocks stay pinned, and they do until
every rank has reported, well or badly. The reports go to the service, which commits.

Load, happy path: `matched` offers N-1 tokens, vLLM allocates, `allocated` makes the job, the request waits until every
rank has reported; only then is it scheduled, and computes token N.

Crash paths: a request that ends before its last chunk publishes nothing. A load that fails on any rank is reported to
vLLM, which frees and reschedules the request; then `matched` offers nothing and the prompt is recomputed here. A
request that is aborted while it loads keeps its blocks until every rank has reported (vLLM does that).

A recurrent block is never resolved by its position in a hash chain: align mode leaves null blocks between states, so
the running state is the block at the position of the last computed token, and a null block there is refused here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from statestore.boundary import BoundaryRecord, Epoch
from statestore.connector.events import emit
from statestore.connector.messages import LoadJob, PublishJob, RankReport, RankReports, StepMetadata

log = logging.getLogger(__name__)

NULL_BLOCK = 0
PARAMS = "deltaserve"
"""Key in a request's kv_transfer_params under which the service hands over an intent."""


@dataclass
class PublishIntent:
    """The service's wish: publish this request's prompt as a boundary."""

    epoch: Epoch
    length: int
    segment: str = ""
    packing_dcp: int = 1
    packing_interleave: int = 1


@dataclass
class LoadIntent:
    """The service's wish: restore this committed boundary first."""

    record: BoundaryRecord


@dataclass
class _Publish:
    intent: PublishIntent
    request: Any
    sent: bool = False


@dataclass
class _Load:
    intent: LoadIntent
    request: Any
    tokens: int = 0
    over: bool = False


class SchedulerHalf:
    """State of the boundaries that this engine writes and reads; used on the engine thread only."""

    def __init__(self, worker_id: str, world_size: int, dcp: int, groups: list[Any]) -> None:
        """`groups`: vLLM's KV cache groups, in the order of every block table; `dcp`: decode context parallel size."""
        self._worker_id = worker_id
        self._world_size = world_size
        self._recurrent = [_is_recurrent(group.kv_cache_spec) for group in groups]
        # One block id of an attention group stands for block_size tokens on every DCP rank; KDA state is not divided.
        self._block_tokens = [
            group.kv_cache_spec.block_size * (dcp if group.kv_cache_spec.dcp_sharded else 1)
            for group in groups
        ]
        self._cache_manager: Any = None
        self._publish: dict[str, _Publish] = {}
        self._load: dict[str, _Load] = {}
        self._reports: dict[str, list[RankReport]] = {}
        self._new_loads: list[LoadJob] = []

    def bind(self, cache_manager: Any) -> None:
        """vLLM's cache manager; the authority on block tables."""
        self._cache_manager = cache_manager

    def added(self, request: Any) -> None:
        """A request entered the scheduler."""
        intent = (request.kv_transfer_params or {}).get(PARAMS)
        if isinstance(intent, PublishIntent):
            self._publish[request.request_id] = _Publish(intent, request)
        elif isinstance(intent, LoadIntent):
            self._load[request.request_id] = _Load(intent, request)

    def matched(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        """Tokens that a load would bring beyond the `local_tokens` found here, and that it runs asynchronously."""
        load = self._load.get(request.request_id)
        if load is None or load.over:
            return 0, False
        tokens = load.intent.record.length - local_tokens
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
        record = load.intent.record
        self._new_loads.append(
            LoadJob(
                request.request_id, record, self._blocks(block_ids, record.length), record.length - tokens
            )
        )

    def build_metadata(self, scheduled: dict[str, int]) -> StepMetadata:
        """Jobs that start with the step that schedules `scheduled[request id]` tokens."""
        metadata = StepMetadata(load=self._new_loads)
        self._new_loads = []
        if self._publish:
            for key, tokens in scheduled.items():
                publish = self._publish.get(key)
                if publish is None or publish.sent:
                    continue
                if publish.request.num_computed_tokens + tokens >= publish.intent.length:
                    metadata.publish.append(self._publish_job(key, publish))
                    publish.sent = True
        return metadata

    def _publish_job(self, key: str, publish: _Publish) -> PublishJob:
        intent = publish.intent
        blocks = self._blocks(self._cache_manager.get_block_ids(key), intent.length)
        return PublishJob(
            key,
            intent.epoch,
            intent.length,
            blocks,
            intent.segment,
            intent.packing_dcp,
            intent.packing_interleave,
        )

    def _blocks(self, tables: tuple[list[int], ...], length: int) -> tuple[list[int], ...]:
        """Per group what holds the state after `length` tokens: one running-state block, or the table."""
        blocks = []
        for table, recurrent, tokens in zip(tables, self._recurrent, self._block_tokens, strict=True):
            last = -(-length // tokens) - 1
            chosen = [table[last]] if recurrent else list(table[: last + 1])
            if NULL_BLOCK in chosen:
                # A bug here or in vLLM; it must never become state. The worker half reports it as a failure.
                log.error("null block in the table of a boundary of %d tokens: %s", length, table)
            blocks.append(chosen)
        return tuple(blocks)

    def collect(self, reports: RankReports | None, failed_loads: set[str]) -> None:
        """Reports of the ranks from the step just ended."""
        if reports is None:
            return
        for key, of_ranks in reports.publish.items():
            done = self._reports.setdefault(key, [])
            done.extend(of_ranks)
            if len(done) == self._world_size:
                del self._reports[key]
                self._publish.pop(key, None)
                emit(self._worker_id, "written", key, done)
        for key, of_ranks in reports.load.items():
            done = self._reports.setdefault(key, [])
            done.extend(of_ranks)
            if len(done) == self._world_size:
                del self._reports[key]
                load = self._load.get(key)
                tokens = load.tokens if load is not None else 0
                failed = any(report.failure for report in done)
                emit(self._worker_id, "restored", key, 0 if failed else tokens, done)

    def finished(self, request: Any) -> bool:
        """The request ended; True: its blocks stay pinned until the worker half reports them sent."""
        key = request.request_id
        self._load.pop(key, None)
        self._new_loads = [job for job in self._new_loads if job.key != key]
        publish = self._publish.get(key)
        if publish is None:
            return False
        if not publish.sent:
            del self._publish[key]
            emit(self._worker_id, "publish_failed", key, "the request ended before its last prompt token")
            return False
        return True

    @property
    def pending(self) -> bool:
        """True while a publish is out: the engine must keep stepping to collect the reports."""
        return any(publish.sent for publish in self._publish.values())


def _is_recurrent(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)
