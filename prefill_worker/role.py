# SPDX-License-Identifier: Apache-2.0
"""Publishing: from a prompt to a committed boundary. docs/handoff.md has the protocol; this file owns its first half.

Happy path of one request (N prompt tokens):

    Add{publish} ─▶ open: record with every rank pending (ledger, first write; runs beside the compute)
                 ─▶ engine: N-1 tokens in, one sampled token that nobody reads
    every rank's report ─▶ commit: every rank's entry in one transaction fenced by this worker's lease (second write)
                 ─▶ Published{committed} to the router ─▶ ... ─▶ Release from the router: objects, then record, go

Crash path: a rank that fails to write, a lost lease, an unreachable ledger or a deadline end the publish: the objects
that were written are removed, the record is aborted, the router hears why and computes the prompt elsewhere. An aborted
request is cleaned up the same way when its ranks have reported. A worker that dies leaves pending or committed records
behind; the sweeper of another worker removes them with their objects.

Order of removal: objects first, record last. A reader that still holds the record finds objects missing, which is a
counted miss; the other order would leave objects that nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job, Refused, Role
from deltaserve.telemetry import HANDOFF
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryRecord, Epoch, RankEntry, boundary_id
from statestore.connector.intents import PARAMS, Intents, PublishIntent, PublishOutcome
from statestore.geometry import Geometry
from statestore.ledger import Ledger, LedgerError
from statestore.pool import Pool, PoolError
from statestore.prefix import prefix_hash
from statestore.reshard import Packing

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 5.0
"""Seconds between attempts to give back what etcd or the store could not take back."""


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
        self._config, self._worker_id, self._geometry = config, worker_id, geometry
        self._ledger, self._pool, self._forget = ledger, pool, forget
        self._lease = 0
        self._counter = count(1)
        self._held: dict[str, BoundaryRecord] = {}

    async def on_lease(self, lease: int) -> None:
        self._lease = lease

    # ---- the life of a publish

    async def prepare(self, job: Job) -> Any:
        add = job.add
        if add.WhichOneof("handoff") != "publish":
            raise Refused("a prefill worker takes requests with a publish directive only")
        prompt = list(add.prompt)
        length = len(prompt) - 1
        if length < 1:
            raise Refused("a prompt of one token has no boundary to publish; send it to a decode worker")
        packing = Packing(add.publish.pack_dcp or 1, add.publish.pack_interleave or 1)
        epoch = Epoch(self._lease, next(self._counter))
        model, prefix = self._geometry.model_digest, prefix_hash(prompt[:-1], add.cache_salt)
        record = BoundaryRecord(
            id=boundary_id(model, prefix, epoch),
            model_digest=model,
            prefix_hash=prefix,
            length=length,
            epoch=epoch,
            owner=self._worker_id,
            geometry=self._geometry.to_json(),
            packing_dcp=packing.dcp,
            packing_interleave=packing.interleave,
            created=time.time(),
            state="pending",
            ranks=tuple(RankEntry(rank=rank, status="pending") for rank in range(self._geometry.tp)),
        )
        job.silent = True
        job.state.update(record=record, keep=True, began=time.monotonic(), cached=0)
        job.state["open"] = asyncio.ensure_future(self._ledger.open(record))
        limit = min(add.timeout or self._config.load_timeout * 4, self._config.load_timeout * 4)
        loop = asyncio.get_running_loop()
        job.state["deadline"] = loop.call_later(limit, self.on_publish_failed, job, "deadline")
        request = codec.decode_add(add, job.key)
        request.prompt_token_ids = prompt[:-1]
        request.sampling_params = _one_token(
            PublishIntent(epoch, length, add.publish.preferred_segment, packing.dcp, packing.interleave)
        )
        return request

    def on_output(self, job: Job, output: Any) -> None:
        if output.prefill_stats is not None:
            job.state["cached"] = output.prefill_stats.num_cached_tokens

    def on_end(self, job: Job, reason: str) -> None:
        if reason == "finished":
            return
        job.state["ended"] = reason
        if reason != "aborted":
            # The engine refused the request: no rank will ever report.
            self.on_publish_failed(job, reason)

    def on_written(self, job: Job, outcome: PublishOutcome) -> None:
        """Every rank has reported; commit, or clean up."""
        if job.state.pop("keep", False):
            self.background(self._settle(job, outcome))

    def on_publish_failed(self, job: Job, reason: str) -> None:
        """No boundary will come of this job."""
        if job.state.pop("keep", False):
            self.background(self._fail(job, [], reason, "no_publish"))

    async def _settle(self, job: Job, outcome: PublishOutcome) -> None:
        record: BoundaryRecord = job.state["record"]
        keys = [entry.key for entry in outcome.objects()]
        if not outcome.complete:
            await self._fail(job, keys, outcome.detail, outcome.failure)
            return
        if "ended" in job.state:
            await self._fail(job, keys, job.state["ended"], "aborted")
            return
        reports = outcome.links[-1].reports
        try:
            committed = record.committed(
                RankEntry(rank=report.rank, status="written", objects=tuple(report.objects))
                for report in reports
            )
            await job.state["open"]
            await self._ledger.commit([committed])
        except (LedgerError, ConnectionError, TimeoutError, ValueError) as error:
            await self._fail(job, keys, f"{type(error).__name__}: {error}", "ledger")
            return
        nbytes = sum(report.nbytes for report in reports)
        self._held[record.id] = committed
        self._done(job)
        HANDOFF.published(nbytes, time.monotonic() - job.state["began"])
        if "ended" in job.state or job.stream.closed:
            await self.release([record.id])
            return
        job.stream.boundaries.add(record.id)
        job.stream.send(
            pb.FromWorker(
                published=pb.Published(
                    id=job.add.id,
                    committed=True,
                    boundary=record.id,
                    length=record.length,
                    bytes=nbytes,
                    cached_tokens=job.state["cached"],
                )
            )
        )

    async def _fail(self, job: Job, keys: list[str], reason: str, kind: str) -> None:
        record: BoundaryRecord = job.state["record"]
        self._done(job)
        HANDOFF.failed("publish", kind)
        log.warning("boundary %s of request %s not published: %s", record.id, job.add.request_id, reason)
        job.stream.send(
            pb.FromWorker(
                published=pb.Published(id=job.add.id, committed=False, length=record.length, error=reason)
            )
        )
        # The opening may still be under way, or have failed without saying whether it wrote.
        await asyncio.wait([job.state["open"]])
        job.state["open"].exception()
        await self._give_back(record, keys)

    def _done(self, job: Job) -> None:
        job.state["deadline"].cancel()
        self._forget(job)

    # ---- release

    async def release(self, boundaries: list[str]) -> None:
        records = [record for i in boundaries if (record := self._held.pop(i, None)) is not None]
        for record in records:
            await self._give_back(record, [entry.key for entry in record.objects()])
            HANDOFF.released()

    async def _give_back(self, record: BoundaryRecord, keys: list[str]) -> None:
        """Remove objects, then the record; what cannot be removed now is tried again until it is.

        The sweeper is for dead owners only: what a living one leaves behind, nobody else would remove.
        """
        if not await self._try_to_give_back(record, keys):
            self.background(self._keep_giving_back(record, keys))

    async def _keep_giving_back(self, record: BoundaryRecord, keys: list[str]) -> None:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause * random.uniform(0.8, 1.2))
            if await self._try_to_give_back(record, keys):
                log.info("boundary %s has been given back", record.id)
                return
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _try_to_give_back(self, record: BoundaryRecord, keys: list[str]) -> bool:
        try:
            left = await asyncio.to_thread(self._pool.remove, keys) if keys else []
            if left:
                log.warning("%d objects of %s cannot be removed yet", len(left), record.id)
                return False
            await self._ledger.release(record)
        except (PoolError, LedgerError, ConnectionError, TimeoutError) as error:
            log.warning("boundary %s cannot be given back yet: %s", record.id, error)
            return False
        return True

    async def close(self) -> None:
        await self.release(list(self._held))
        await self._finish_tasks(0.5)
        await asyncio.to_thread(self._pool.close, 1.0)


def _one_token(intent: PublishIntent) -> Any:
    """Sampling of a prefill: one token, that ends the request in the step that computed the prompt."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": {PARAMS: Intents(publish=intent)}},
    )
