# SPDX-License-Identifier: Apache-2.0
"""Restoring: from a committed boundary to a running request. docs/handoff.md has the protocol; this file owns its
second half.

Happy path: Add{load} ─▶ the record is read from the ledger (committed ones only) and checked against this request and
this worker's geometry ─▶ the engine allocates, the ranks read and verify ─▶ Loaded{from_store} to the router ─▶ the
request is scheduled and computes token N.

Crash path: a record that is gone, does not fit the request or the geometry, or state that fails a check: the prompt is
computed here instead, Loaded{failure} says why, a counter counts it. Nothing that failed a check is ever used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from deltaserve.engine.role import Job, Role
from deltaserve.telemetry import HANDOFF
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryRecord
from statestore.connector.intents import PARAMS, Intents, LoadIntent
from statestore.connector.messages import RankReport
from statestore.geometry import Geometry, GeometryError
from statestore.ledger import Ledger, LedgerError
from statestore.pool import Pool
from statestore.prefix import prefix_hash
from statestore.reshard import GeometryMismatch, compatible

log = logging.getLogger(__name__)


class DecodeRole(Role):
    """See the module's description."""

    def __init__(self, geometry: Geometry, ledger: Ledger, pool: Pool, forget: Callable[[Job], None]) -> None:
        super().__init__()
        self._geometry, self._ledger, self._pool, self._forget = geometry, ledger, pool, forget

    async def on_lease(self, lease: int) -> None:
        """A decode worker writes nothing into the ledger yet."""

    async def prepare(self, job: Job) -> Any:
        add = job.add
        request = codec.decode_add(add, job.key)
        if add.WhichOneof("handoff") == "load":
            record, failure = await self._record(add)
            if record is None:
                self._report(job, 0, failure)
            else:
                job.state["loading"] = True
                params = request.sampling_params
                assert params is not None
                params.extra_args = {
                    **(params.extra_args or {}),
                    "kv_transfer_params": {PARAMS: Intents(load=LoadIntent((record,)))},
                }
        return request

    async def _record(self, add: pb.Add) -> tuple[BoundaryRecord | None, str]:
        """The boundary to load, or why there is none."""
        try:
            record = await self._ledger.get_committed(add.load.boundary)
        except (LedgerError, ConnectionError, TimeoutError) as error:
            log.warning("boundary %s: the ledger cannot be read: %s", add.load.boundary, error)
            return None, "ledger"
        if record is None:
            return None, "missing_record"
        prefix = list(add.prompt)[: record.length]
        if record.length != len(add.prompt) - 1 or record.prefix_hash != prefix_hash(prefix, add.cache_salt):
            log.error("boundary %s is of another prompt than request %s", record.id, add.request_id)
            return None, "wrong_prefix"
        try:
            compatible(Geometry.from_json(record.geometry), self._geometry)
        except (GeometryMismatch, GeometryError) as error:
            log.error("boundary %s cannot be restored here: %s", record.id, error)
            return None, "geometry"
        return record, ""

    def on_output(self, job: Job, output: Any) -> None:
        if output.prefill_stats is not None:
            stats = output.prefill_stats
            job.state["local"] = stats.num_local_cached_tokens

    def on_restored(self, job: Job, tokens: int, reports: list[RankReport]) -> None:
        """Every rank has reported its load: `tokens` were restored."""
        if not job.state.pop("loading", False):
            return
        bad = [report for report in reports if report.failure]
        if bad:
            self._report(job, 0, bad[0].failure)
            return
        HANDOFF.loaded(
            sum(report.nbytes for report in reports), max((r.seconds for r in reports), default=0.0)
        )
        local = job.add.prompt.__len__() - 1 - tokens
        self._report(job, tokens, "", local)

    def _report(self, job: Job, tokens: int, failure: str, local: int = 0) -> None:
        if failure:
            HANDOFF.failed("load", failure)
            HANDOFF.recomputed(failure, len(job.add.prompt) - 1)
        loaded = pb.Loaded(id=job.add.id, from_store=tokens, local=local, failure=failure)
        job.stream.send(pb.FromWorker(loaded=loaded))

    def on_end(self, job: Job, reason: str) -> None:
        """Nothing is held for a request that the engine does not hold."""

    async def release(self, boundaries: list[str]) -> None:
        """A decode worker publishes nothing yet."""

    async def close(self) -> None:
        await self._finish_tasks(0.0)
        await asyncio.to_thread(self._pool.close, 1.0)
