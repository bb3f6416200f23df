# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a link: gather, prove, digest, put. Called on an I/O thread while the blocks are pinned.

The latent rows of every link, and all of the final one, are what the reading worker wants now, so they go straight into
its segment. The KDA state of a checkpoint is for requests to come: it goes into the writer's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

from statestore.boundary import ObjectEntry, object_key
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import check_table
from statestore.connector.messages import PublishJob, RankReport
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.connector.store_ahead import LEAST_PIECE, StreamedPut
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
        packing = Packing(job.packing_dcp, job.packing_interleave)
        plans = plan_write(self._geometry, self._rank, job.length, packing, job.base)
        if not plans:
            return
        keys = [self._key(job, plan) for plan in plans]
        puts: list[StreamedPut] = []
        try:
            with (
                self._pool.staging(sum(plan.nbytes for plan in plans), self._timeout) as staging,
                ExitStack() as stack,
            ):
                digests: list[tuple[str, ...]] = []
                at = 0
                for plan, key in zip(plans, keys, strict=True):
                    data = staging[at : at + plan.nbytes]
                    at += plan.nbytes
                    put = StreamedPut(self._pool, key, plan.nbytes, self._segment(job, plan))
                    puts.append(stack.enter_context(put))
                    write = self._write_heads if plan.group == "kda" else self._write_rows
                    digests.append(write(job, plan, data, put))
                    put.finish()
                report.objects = [
                    _entry(plan, put, found) for plan, put, found in zip(plans, puts, digests, strict=True)
                ]
                report.nbytes = sum(plan.nbytes for plan in plans)
        except BaseException:
            # Only what this call has written: under a key that was there already lies somebody else's object.
            written = [(plan, put) for plan, put in zip(plans, puts, strict=False) if put.sealed]
            left = self._remove([put.key for _, put in written])
            report.objects = [_entry(plan, put, ("0",)) for plan, put in written if put.key in left]
            report.nbytes = 0
            raise

    def _write_heads(
        self, job: PublishJob, plan: ObjectPlan, data: Bytes, put: StreamedPut
    ) -> tuple[str, ...]:
        """Gather, prove and write some heads after the other; returns the digests.

        Inside, layer by layer: what has been gathered is proved while it is still in the core's cache.
        """
        size, layers = plan.units[0].nbytes, len(self._geometry.kda_layers)
        digests: list[str] = []
        for first, heads in _pieces(len(plan.units), size):
            piece = data[first * size : (first + heads) * size]
            proof = HeadsProof(piece, heads, self._geometry, plan.units[first].first)
            for low in range(0, layers, proof.step):
                some = range(low, min(low + proof.step, layers))
                self._view.gather_heads(job.blocks, piece, first, heads, some)
                proof.take(some)
                if proof.problem is not None:
                    raise proof.problem
            put.write([(first * size, piece)])
            digests += proof.digests()
        return tuple(digests)

    def _write_rows(
        self, job: PublishJob, plan: ObjectPlan, data: Bytes, put: StreamedPut
    ) -> tuple[str, ...]:
        """The same, some rows after the other."""
        proof = RowsProof(data, plan.units, self._geometry, finite=True)
        size = plan.nbytes // len(plan.tokens)
        for first, rows in _pieces(len(plan.tokens), size):
            for low in range(first, first + rows, proof.step):
                high = min(low + proof.step, first + rows)
                self._view.gather_rows(job.blocks, plan.tokens[low:high], data[low * size : high * size])
                proof.take(range(low, high))
                if proof.problem is not None:
                    raise proof.problem
            put.write([(first * size, data[first * size : (first + rows) * size])])
        return proof.digests()

    def _key(self, job: PublishJob, plan: ObjectPlan) -> str:
        return object_key(self._geometry.model_digest, job.epoch, plan.group, self._rank, job.link)

    def _segment(self, job: PublishJob, plan: ObjectPlan) -> str:
        """Where to write: into the segment of the reading worker's rank that this rank's number falls on."""
        if plan.group == "kda" and not job.final:
            return self._pool.segment_name
        segments = job.segment.split(",")
        # Asked for nothing, the store would take any segment, also one of a worker that may leave first.
        return segments[self._rank % len(segments)] or self._pool.segment_name

    def _remove(self, keys: list[str]) -> list[str]:
        """Returns the keys that could not be removed."""
        try:
            return self._pool.remove(keys) if keys else []
        except PoolError as error:
            log.warning("objects of a failed publish cannot be removed yet: %s", error)
            return keys


def _entry(plan: ObjectPlan, put: StreamedPut, digests: tuple[str, ...]) -> ObjectEntry:
    return ObjectEntry(
        key=put.key,
        group=plan.group,
        nbytes=plan.nbytes,
        digests=digests,
        token_lo=plan.token_lo,
        token_hi=plan.token_hi,
        null_free=True,
        segment=put.placement().segment,
    )


def _pieces(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(first, how many) of `count` items of `nbytes` each, written together: a quarter of all, LEAST_PIECE or more."""
    each = max(1, -(-count // 4), -(-LEAST_PIECE // nbytes))
    for first in range(0, count, each):
        yield first, min(each, count - first)
