# SPDX-License-Identifier: Apache-2.0
"""Restoring: from a committed boundary to a running request, and what a decode worker leaves for the next turn.
docs/handoff.md has the protocol, this file owns its second half; docs/checkpoints.md has the chain.

Happy path: Add{load} ─▶ the record and everything that it rests on are read from the ledger (committed ones only) and
checked against this request and this worker's geometry ─▶ the engine allocates, the ranks read and verify ─▶
Loaded{from_store} to the router ─▶ the request is scheduled and computes token N. An Add without a boundary starts from
the longest checkpoint of its prompt, if there is one. A load whose boundary is not committed yet waits for that behind
a gate (`early.py`).

When the answer ends by itself, the state at its end is published as a checkpoint (`answers.py`).

Crash path: a record that is gone, does not fit the request or the geometry, or state that fails a check: the prompt is
computed here instead, Loaded{failure} says why, a counter counts it. Nothing that failed a check is ever used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from decode_worker.answers import Answers
from decode_worker.early import Early, EarlyLoads
from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job, Role
from deltaserve.telemetry import HANDOFF
from deltaserve.telemetry.tracing import NO_SPAN, Span
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryInvalid
from statestore.checkpoints.publication import Publisher
from statestore.connector import gate
from statestore.connector.intents import PARAMS, Intents, LinkOutcome, LoadIntent, PublishOutcome
from statestore.connector.messages import RankReport
from statestore.geometry import Geometry, GeometryError
from statestore.ledger import Chain, ChainBroken, Ledger, LedgerError
from statestore.pool import Pool
from statestore.prefix import prefix_hash
from statestore.reshard import GeometryMismatch, compatible
from statestore.unread import Unread

log = logging.getLogger(__name__)


class DecodeRole(Role):
    """See the module's description."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        geometry: Geometry,
        ledger: Ledger,
        pool: Pool,
        forget: Callable[[Job], None],
    ) -> None:
        super().__init__()
        self._geometry, self._ledger, self._pool = geometry, ledger, pool
        self._verify = config.verify
        self._unread = Unread(ledger)
        self.publisher = Publisher(config, worker_id, geometry, ledger, pool, self.background)
        self._answers = Answers(config, self.publisher, self.background, forget)
        self._early = EarlyLoads(
            ledger,
            lambda: self.publisher.index.records,
            config.load_timeout,
            self._settle,
            lambda job: self.withdraw(job),
            self._load_ended,
        )

    def _settle(self, key: str, opened: bool) -> None:
        """Open or leave the gate, on the engine's thread."""
        self.call(partial(gate.settle, key=key, opened=opened))

    async def on_lease(self, lease: int) -> None:
        self.publisher.lease = lease

    async def prepare(self, job: Job) -> Any:
        add = job.add
        request = codec.decode_add(add, job.key)
        prompt = list(add.prompt)
        intents = Intents()
        early: Early | None = None
        if add.WhichOneof("handoff") == "load":
            job.state["load span"] = job.span.child(
                "load", boundary=add.load.boundary, early=bool(add.load.early)
            )
            if add.load.early:
                early = self._early.begin(job)
            chain, failure = await self._chain(job, prompt, early)
            if failure and early is not None:
                self._early.give_up(job, failure, "it cannot be read")
                return request
            if failure:
                self._report(job, 0, failure)
            # The boundary itself is its request's own and goes with it; what it rests on stays.
            parents = chain[:-1]
        else:
            # Token N at least is computed here: that is where the answer begins.
            chain = parents = self.publisher.index.lookup(prompt, add.cache_salt, len(prompt) - 1)
        if chain:
            job.state["loading"] = chain
            intents.load = LoadIntent(chain, early is not None)
        if job.ended:
            return request
        params = request.sampling_params
        assert params is not None
        if early is not None:
            early.chain = chain
            self.background(self._early.follow(job, early))
        intents.publish = await self._answers.begin(
            job, prompt, parents, params.max_tokens, early.committed if early is not None else None
        )
        if intents.load or intents.publish:
            params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": {PARAMS: intents}}
        return request

    async def _chain(self, job: Job, prompt: list[int], early: Early | None) -> tuple[Chain, str]:
        """The boundary to load with what it rests on, or why there is none."""
        add = job.add
        try:
            if early is not None:
                chain = await self._early.chain(job)
            else:
                chain = await self._ledger.get_chain(add.load.boundary, self.publisher.index.records)
        except BoundaryInvalid as error:
            log.error("request %s: boundary %s: %s", add.request_id, add.load.boundary, error)
            return (), "record"
        except ChainBroken as error:
            log.error("request %s: %s", add.request_id, error)
            return (), "broken_chain"
        except (LedgerError, ConnectionError, TimeoutError) as error:
            log.warning("boundary %s: the ledger cannot be read: %s", add.load.boundary, error)
            return (), "ledger"
        if not chain:
            return (), "missing_record"
        record = chain[-1]
        prefix = prompt[: record.length]
        if record.length != len(prompt) - 1 or record.prefix_hash != prefix_hash(prefix, add.cache_salt):
            log.error("request %s: boundary %s is of another prompt", add.request_id, record.id)
            return (), "wrong_prefix"
        try:
            for geometry in {one.geometry for one in chain}:
                compatible(Geometry.from_json(geometry), self._geometry)
        except (GeometryMismatch, GeometryError) as error:
            log.error("boundary %s cannot be restored here: %s", record.id, error)
            return (), "geometry"
        return chain, ""

    def on_output(self, job: Job, output: Any) -> None:
        """Where its tokens came from is known from the load."""

    def on_restored(self, job: Job, tokens: int, reports: list[RankReport]) -> None:
        """Every rank has reported its load: `tokens` were restored, the rest of the chain was in the local cache."""
        if (early := self._early.of(job)) is not None:
            self._early.restored(job, early, tokens, reports)
            return
        self._load_ended(job, tokens, reports)

    def _load_ended(self, job: Job, tokens: int, reports: list[RankReport]) -> None:
        """What was loaded may be used, if all went well."""
        chain: Chain = job.state.pop("loading", ())
        if not chain:
            return
        bad = next((report for report in reports if report.failure), None)
        if bad is not None:
            self.publisher.load_failed(chain, bad)
            self._report(job, 0, bad.failure, of=chain[-1].length)
            return
        nbytes = sum(report.nbytes for report in reports)
        HANDOFF.loaded(nbytes, max((r.seconds for r in reports), default=0.0), self._verify)
        if "load span" in job.state:
            job.state["load span"].set(bytes=nbytes, ranks=len(reports), verified=self._verify)
        if chain[-1].reusable:
            HANDOFF.restored(tokens)
        self._report(job, tokens, "", local=chain[-1].length - tokens)

    def _report(self, job: Job, tokens: int, failure: str, local: int = 0, of: int = 0) -> None:
        """Tell the router. `of`: tokens that should have come from the store; 0: all but the last."""
        log.debug("request %s: %d tokens restored %s", job.add.request_id, tokens, failure)
        span: Span = job.state.pop("load span", NO_SPAN)
        span.set(tokens=tokens, local_tokens=local)
        span.end(failure)
        if job.progress is not None:
            job.progress.end(failure or "loaded")
        if failure:
            HANDOFF.failed("load", failure)
            HANDOFF.recomputed(failure, of or len(job.add.prompt) - 1)
        loaded = pb.Loaded(id=job.add.id, from_store=tokens, local=local, failure=failure)
        job.stream.send(pb.FromWorker(loaded=loaded))

    def on_wrote(self, job: Job, link: LinkOutcome) -> None:
        """Nobody waits for the end of an answer: it is committed when the engine has told of it."""

    def on_written(self, job: Job, outcome: PublishOutcome) -> None:
        """Every rank has written the end of the answer, or the request ended without one."""
        self._answers.written(job, outcome)

    def on_publish_failed(self, job: Job, reason: str) -> None:
        """The end of this answer is not published, and no rank has written or will."""
        self._answers.failed(job, reason)

    def on_end(self, job: Job, reason: str) -> None:
        if "load span" in job.state:  # it ended before every rank had reported
            job.state.pop("load span").end(reason)
        self._early.ended(job)
        self._answers.ended(job, reason)

    def on_confirmed(self, job: Job) -> None:
        if (early := self._early.of(job)) is not None:
            early.told.set()

    async def release(self, boundaries: list[str]) -> None:
        """What a decode worker publishes is nobody's own; its budget evicts it."""

    async def unread(self, segments: Collection[str]) -> int:
        return await self._unread.count(segments)

    async def close(self) -> None:
        await self._finish_tasks(0.5)
        await asyncio.to_thread(self._pool.close, 1.0)
