# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a publish: gather, prove, digest, put. Called on an I/O thread while the blocks are pinned."""

from __future__ import annotations

import logging

from statestore.boundary import Group, ObjectEntry, object_key
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import check_heads, check_table, unit_digest
from statestore.connector.messages import PublishJob, RankReport
from statestore.objects import (
    Packing,
    Unit,
    head_bytes,
    kda_units,
    mla_units,
    row_bytes,
    row_tokens,
    token_slice,
)
from statestore.pool import Pool, PoolError

log = logging.getLogger(__name__)


class Publisher:
    """Writes this rank's objects of one boundary after another."""

    def __init__(self, view: CacheView, pool: Pool, rank: int, timeout: float) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._geometry = view.geometry

    def publish(self, job: PublishJob, report: RankReport) -> None:
        """Write the objects and name them in `report`; on any error remove what was written, then raise it."""
        check_table(job.blocks, "publish")
        try:
            self._heads(job, report)
            self._rows(job, report)
        except BaseException:
            self._remove([entry.key for entry in report.objects])
            report.objects = []
            raise

    def _heads(self, job: PublishJob, report: RankReport) -> None:
        g = self._geometry
        with self._pool.staging(g.heads_per_rank * head_bytes(g), self._timeout) as data:
            self._view.gather_heads(job.blocks, data)
            check_heads(data, g.heads_per_rank, g)
            self._put(job, report, "kda", data, kda_units(g, self._rank), range(job.length))

    def _rows(self, job: PublishJob, report: RankReport) -> None:
        g = self._geometry
        # MLA rows are the same on every rank: each writes its share of the tokens, so that they are stored once.
        tokens = token_slice(job.length, g.tp, self._rank)
        if not tokens:
            return
        packing = Packing(job.packing_dcp, job.packing_interleave)
        with self._pool.staging(len(tokens) * row_bytes(g), self._timeout) as data:
            self._view.gather_rows(job.blocks, row_tokens(tokens, packing), data)
            self._put(job, report, "mla", data, mla_units(g, tokens, packing), tokens)

    def _put(
        self, job: PublishJob, report: RankReport, group: Group, data: Bytes, units: list[Unit], tokens: range
    ) -> None:
        key = object_key(self._geometry.model_digest, job.epoch, group, self._rank)
        digests = tuple(unit_digest(data[unit.offset : unit.offset + unit.nbytes]) for unit in units)
        placement = self._pool.put(key, [data], preferred_segment=job.segment)
        report.objects.append(
            ObjectEntry(
                key=key,
                group=group,
                nbytes=data.nbytes,
                digests=digests,
                token_lo=tokens.start,
                token_hi=tokens.stop,
                null_free=True,
                segment=placement.segment,
            )
        )
        report.nbytes += data.nbytes

    def _remove(self, keys: list[str]) -> None:
        try:
            if keys:
                self._pool.remove(keys)
        except PoolError as error:
            log.warning("objects of a failed publish stay until their owner is swept: %s", error)
