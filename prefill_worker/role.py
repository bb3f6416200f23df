# SPDX-License-Identifier: Apache-2.0
"""Publishing: from a prompt to a committed boundary. docs/handoff.md has the protocol; this file owns its first half.

Happy path of one request (N prompt tokens):

    Add{publish} ─▶ look-up: the longest checkpoint in the store of at most N-2 tokens of this prompt
                    (docs/checkpoints.md)
                 ─▶ open: record with every rank pending, and the pin on that checkpoint (ledger, first write; beside
                    the compute where there is nothing to pin)
                 ─▶ engine: restores the checkpoint, computes what is left of N-1 tokens, and one that nobody reads;
                    ranks write checkpoints on the way and the boundary at the end
    every rank's reports ─▶ Written to the router, if it asks for it: its reader begins beside the commit
                    (docs/early_reads.md)
                 ─▶ commit: every link in one transaction fenced by this worker's lease (second write)
                    (a worker of one rank, whose publish is one link, hears of it from that rank itself: the engine
                    collects reports when a step ends, and the next step may be a long prefill)
                 ─▶ Published{committed} to the router ─▶ ... ─▶ Release from the router: objects, then record, go; the
                    checkpoints stay

Crash path: a rank that fails to write, a lost lease, an unreachable ledger or a deadline end the publish: the objects
that were written are removed, the record is aborted, the router hears why and computes the prompt elsewhere. An aborted
request is cleaned up the same way when its ranks have reported. A store without room is known before anything is
computed. A checkpoint that cannot be loaded is computed. A worker that dies leaves pending or committed records behind;
the sweeper of another worker removes them with their objects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from deltaserve.config import WorkerConfig
from deltaserve.doctor.capabilities import Capability
from deltaserve.doctor.passes import Prefills
from deltaserve.engine.role import Job, Refused, Role
from deltaserve.telemetry import HANDOFF
from deltaserve.telemetry.tracing import Span
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryRecord
from statestore.checkpoints.publication import Publication, Publisher
from statestore.connector.intents import (
    PARAMS,
    Intents,
    LinkOutcome,
    LoadIntent,
    PublishIntent,
    PublishOutcome,
)
from statestore.connector.messages import RankReport
from statestore.geometry import Geometry
from statestore.ledger import Ledger, LedgerError
from statestore.pool import Pool
from statestore.reshard import Packing
from statestore.unread import Unread

log = logging.getLogger(__name__)


class PrefillRole(Role):
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
        self._config, self._pool, self._forget = config, pool, forget
        self._unread = Unread(ledger)
        self.publisher = Publisher(config, worker_id, geometry, ledger, pool, self.background)
        self._spacing = config.checkpoint_tokens if config.checkpoint_limit else 0
        self._held: dict[str, BoundaryRecord] = {}
        self._prefills = Prefills()
        HANDOFF.owns("request", lambda: len(self._held))

    async def on_lease(self, lease: int) -> None:
        self.publisher.lease = lease

    # ---- the life of a publish

    async def prepare(self, job: Job) -> Any:
        add = job.add
        if add.WhichOneof("handoff") != "publish":
            raise Refused("a prefill worker takes requests with a publish directive only")
        prompt = list(add.prompt)
        length = len(prompt) - 1
        if length < 1:
            raise Refused("a prompt of one token has no boundary to publish; send it to a decode worker")
        job.silent = True
        job.state.update(keep=True, cached=0, restored=0, length=length)
        # One token at least must be computed: a recurrent state cannot take a token that it holds already.
        chain = self.publisher.index.lookup(prompt, add.cache_salt, length - 1)
        packing = Packing(add.publish.pack_dcp or 1, add.publish.pack_interleave or 1)
        publication = await self.publisher.start(
            prompt[:-1], add.cache_salt, chain, packing, spacing=self._spacing
        )
        if publication is None:
            job.state["kind"] = "store_full"
            raise Refused("the store has no room for this prompt's state")
        job.state["publication"] = publication
        if job.ended:
            # Aborted while it was being prepared: the engine never hears of it.
            self.on_publish_failed(job, "aborted")
        limit = min(add.timeout or self._config.load_timeout * 4, self._config.load_timeout * 4)
        loop = asyncio.get_running_loop()
        job.state["deadline"] = loop.call_later(limit, self._too_late, job)
        request = codec.decode_add(add, job.key)
        request.prompt_token_ids = prompt[:-1]
        publish = PublishIntent(
            publication.epoch,
            length,
            add.publish.preferred_segment,
            packing.dcp,
            packing.interleave,
            base=publication.base,
            checkpoint_tokens=publication.spacing,
        )
        load = LoadIntent(publication.chain) if publication.chain else None
        request.sampling_params = _one_token(Intents(load, publish))
        return request

    def on_output(self, job: Job, output: Any) -> None:
        if output.prefill_stats is not None:
            job.state["cached"] = output.prefill_stats.num_local_cached_tokens

    def on_restored(self, job: Job, tokens: int, reports: list[RankReport]) -> None:
        """Every rank has reported its load of the checkpoint."""
        publication: Publication = job.state["publication"]
        bad = next((report for report in reports if report.failure), None)
        if bad is None:
            job.state["restored"] = tokens
            HANDOFF.restored(tokens)
            HANDOFF.loaded(
                sum(report.nbytes for report in reports),
                max((report.seconds for report in reports), default=0.0),
                self._config.verify,
            )
            self._load_span(job, tokens, reports).end()
            return
        log.warning(
            "request %s: its checkpoint is computed instead: rank %d: %s",
            job.add.request_id,
            bad.rank,
            bad.detail,
        )
        HANDOFF.failed("load", bad.failure)
        HANDOFF.recomputed(bad.failure, publication.base)
        self._load_span(job, 0, reports).end(f"{bad.failure}: {bad.detail}")
        self.publisher.load_failed(publication.chain, bad)

    @staticmethod
    def _load_span(job: Job, tokens: int, reports: list[RankReport]) -> Span:
        began = time.time() - max((report.seconds for report in reports), default=0.0)
        nbytes = sum(report.nbytes for report in reports)
        return job.span.child("load", start=began, checkpoint=True, tokens=tokens, bytes=nbytes)

    def on_end(self, job: Job, reason: str) -> None:
        if reason == "finished":
            return
        job.state["ended"] = reason
        if reason != "aborted":
            # Refused here or by the engine: no rank will ever report.
            self.on_publish_failed(job, reason)

    def on_written(self, job: Job, outcome: PublishOutcome) -> None:
        """Every rank has reported every link; commit, or clean up."""
        if not job.state.pop("keep", False):
            return
        if "early" not in job.state:
            self.background(self._settle(job, outcome))
            return
        self._passed(outcome)
        if job.ended and "done" in job.state:
            self._forget(job)

    def on_wrote(self, job: Job, link: LinkOutcome) -> None:
        """The only rank has written the final link. `on_written` follows with the engine's next step, and settles it
        where this was not all: other links, or a load that failed and moved its base."""
        publication: Publication | None = job.state.get("publication")
        if publication is None or link.link or link.base != publication.base or link.failure is not None:
            return
        if job.state.get("keep") and "early" not in job.state:
            job.state["early"] = True
            outcome = PublishOutcome(publication.epoch, publication.base, (link,), complete=True)
            self.background(self._settle(job, outcome))

    def on_publish_failed(self, job: Job, reason: str) -> None:
        """No boundary will come of this job, and no rank has written or will."""
        if job.state.pop("keep", False) and "early" not in job.state:
            kind = job.state.get("kind", "no_publish")
            if job.progress is not None:
                job.progress.end("aborted" if job.state.get("ended") == "aborted" else kind)
            self.background(self._fail(job, None, reason, kind))

    def _too_late(self, job: Job) -> None:
        """The router need not wait any longer; what the ranks still write is removed when they have reported."""
        if "keep" in job.state and "early" not in job.state and not job.state.get("late"):
            job.state["late"] = True
            self._tell_failure(job, "deadline", "deadline")

    async def _settle(self, job: Job, outcome: PublishOutcome) -> None:
        publication: Publication = job.state["publication"]
        slowest = max((report.seconds for link in outcome.links[-1:] for report in link.reports), default=0.0)
        span = job.span.child("publish", start=time.time() - slowest, epoch=publication.epoch)
        if not outcome.complete:
            span.end(outcome.detail or outcome.failure)
            if outcome.failure == "store_full":
                await self.publisher.keeper.evict_some(self.publisher.missing_room(publication))
            await self._fail(job, outcome, outcome.detail or outcome.failure, outcome.failure)
            return
        if "ended" in job.state or "late" in job.state:
            span.end(job.state.get("ended", "deadline"))
            await self._fail(job, outcome, job.state.get("ended", "deadline"), "aborted")
            return
        if job.progress is not None:
            job.progress.state = "committing"
        try:
            links = self.publisher.links(publication, outcome, list(job.add.prompt)[:-1])
            if job.add.publish.early:
                told = [link.to_json().encode() for link in links]
                written = pb.Written(id=job.add.id, boundary=links[-1].id, records=told)
                job.stream.send(pb.FromWorker(written=written))
            committed = await self.publisher.commit(publication, links)
        except (LedgerError, ConnectionError, TimeoutError, ValueError) as error:
            span.end(f"ledger: {error}")
            await self._fail(job, outcome, f"{type(error).__name__}: {error}", "ledger")
            return
        boundary = committed.links[-1]
        nbytes = sum(link.nbytes for link in outcome.links)
        self._held[boundary.id] = boundary
        if "early" not in job.state:
            self._passed(outcome)
            span.set(passes=outcome.passes.steps, computed_again=outcome.passes.again)
        log.debug(
            "request %s: boundary %s of %d tokens, %d bytes",
            job.add.request_id,
            boundary.id,
            boundary.length,
            nbytes,
        )
        span.set(
            boundary=boundary.id,
            bytes=nbytes,
            ranks=len(boundary.ranks),
            links=len(outcome.links),
        )
        span.end()
        if job.progress is not None:
            job.progress.boundary = boundary.id
            job.progress.end("committed")
        self._done(job)
        HANDOFF.published(nbytes, time.monotonic() - publication.began)
        HANDOFF.streamed(sum(link.streamed for link in outcome.links))
        if "ended" in job.state or "late" in job.state or job.stream.closed:
            await self.release([boundary.id])
            return
        job.stream.boundaries.add(boundary.id)
        job.stream.send(
            pb.FromWorker(
                published=pb.Published(
                    id=job.add.id,
                    committed=True,
                    boundary=boundary.id,
                    length=boundary.length,
                    bytes=nbytes,
                    cached_tokens=job.state["cached"],
                    store_tokens=job.state["restored"],
                )
            )
        )

    async def _fail(self, job: Job, outcome: PublishOutcome | None, reason: str, kind: str) -> None:
        job.span.end(f"{kind}: {reason}")
        if job.progress is not None:
            job.progress.end(kind)
        self._done(job)
        if "late" not in job.state:
            self._tell_failure(job, reason, kind)
        publication: Publication | None = job.state.get("publication")
        if publication is not None:
            await self.publisher.discard(publication, outcome)

    def _tell_failure(self, job: Job, reason: str, kind: str) -> None:
        HANDOFF.failed("publish", kind)
        log.warning("request %s: no boundary: %s", job.add.request_id, reason)
        failed = pb.Published(
            id=job.add.id, committed=False, length=job.state["length"], error=reason, kind=kind
        )
        job.stream.send(pb.FromWorker(published=failed))

    def _done(self, job: Job) -> None:
        job.span.end()
        if (deadline := job.state.get("deadline")) is not None:
            deadline.cancel()
        job.state["done"] = True
        # Else its last step has not been delivered yet, and its end forgets it, or its ranks' reports are to come.
        if job.ended and "keep" not in job.state:
            self._forget(job)

    def _passed(self, outcome: PublishOutcome) -> None:
        """Count the passes that computed a published prompt."""
        passes = outcome.passes
        self._prefills.add(passes.steps, passes.computed, passes.again)
        HANDOFF.prefilled(passes.steps, passes.computed - passes.again, passes.again)

    def capabilities(self, configured: list[Capability]) -> list[Capability]:
        return self._prefills.seen(configured)

    # ---- release

    async def release(self, boundaries: list[str]) -> None:
        for name in boundaries:
            record = self._held.pop(name, None)
            if record is not None:
                await self.publisher.release(record, HANDOFF.released)

    async def unread(self, segments: Collection[str]) -> int:
        return await self._unread.count(segments)

    async def close(self) -> None:
        await self.release(list(self._held))
        await self._finish_tasks(0.5)
        await asyncio.to_thread(self._pool.close, 1.0)


def _one_token(intents: Intents) -> Any:
    """Sampling of a prefill: one token, that ends the request in the step that computed the prompt."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {PARAMS: intents}},
    )
