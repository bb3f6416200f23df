# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a link: gather, prove, digest, put. Called on an I/O thread while the blocks are pinned.

The latent rows of every link, and all of the final one, are what the reading worker wants now, so they go straight into
its segment. The KDA state of a checkpoint is for requests to come: it goes into the writer's own.
"""

from __future__ import annotations

import logging

from statestore.boundary import ObjectEntry, object_key
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import check_heads, check_rows, check_table
from statestore.connector.messages import PublishJob, RankReport
from statestore.digest import unit_digest
from statestore.pool import Pool, PoolError
from statestore.reshard import ObjectPlan, Packing, plan_write

log = logging.getLogger(__name__)


class Publisher:
    """Writes this rank's objects of one link after another."""

    def __init__(self, view: CacheView, pool: Pool, rank: int, timeout: float) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._geometry = view.geometry

    def publish(self, job: PublishJob, report: RankReport) -> None:
        """Write the objects and name them in `report`; on any error remove what was written, then raise it.

        What cannot be removed stays in the report, so that the owner can try again.
        """
        check_table(self._view, job.blocks, job.length, "publish")
        g = self._geometry
        try:
            packing = Packing(job.packing_dcp, job.packing_interleave)
            for plan in plan_write(g, self._rank, job.length, packing, job.base):
                with self._pool.staging(plan.nbytes, self._timeout) as data:
                    if plan.group == "kda":
                        self._view.gather_heads(job.blocks, data)
                        check_heads(data, g.heads_per_rank, g, plan.units[0].first)
                    else:
                        self._view.gather_rows(job.blocks, plan.tokens, data)
                        check_rows(data, g, finite=True)
                    self._put(job, report, plan, data)
        except BaseException:
            left = self._remove([entry.key for entry in report.objects])
            report.objects = [entry for entry in report.objects if entry.key in left]
            report.nbytes = 0
            raise

    def _put(self, job: PublishJob, report: RankReport, plan: ObjectPlan, data: Bytes) -> None:
        key = object_key(self._geometry.model_digest, job.epoch, plan.group, self._rank, job.link)
        digests = tuple(unit_digest(data[unit.offset : unit.offset + unit.nbytes]) for unit in plan.units)
        placement = self._pool.put(key, [data], preferred_segment=self._segment(job, plan))
        report.objects.append(
            ObjectEntry(
                key=key,
                group=plan.group,
                nbytes=data.nbytes,
                digests=digests,
                token_lo=plan.token_lo,
                token_hi=plan.token_hi,
                null_free=True,
                segment=placement.segment,
            )
        )
        report.nbytes += data.nbytes

    def _segment(self, job: PublishJob, plan: ObjectPlan) -> str:
        """Where to write: into the segment of the reading worker's rank that this rank's number falls on."""
        if plan.group == "kda" and not job.final:
            return self._pool.segment_name
        segments = job.segment.split(",")
        return segments[self._rank % len(segments)]

    def _remove(self, keys: list[str]) -> list[str]:
        """Returns the keys that could not be removed."""
        try:
            return self._pool.remove(keys) if keys else []
        except PoolError as error:
            log.warning("objects of a failed publish cannot be removed yet: %s", error)
            return keys
