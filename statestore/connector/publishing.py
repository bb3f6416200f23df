# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a link: take room, gather, prove, digest, put. Called on an I/O thread, the blocks pinned.

The latent rows of every link, and all of the final one, are what the reading worker wants now, so they go straight into
its segment. The KDA state of a checkpoint is for requests to come: it goes into the writer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from statestore.boundary import ObjectEntry, object_key
from statestore.connector.cache_view import CacheView
from statestore.connector.checks import check_table
from statestore.connector.messages import PublishJob, RankReport
from statestore.connector.passing import Passing
from statestore.connector.store_ahead import StreamedPuts
from statestore.connector.writing import HeadsWriter, RowsWriter
from statestore.digest import ML64, XXH3
from statestore.pool import Placement, Pool, Reservation
from statestore.reshard import ObjectPlan, Packing, plan_write


class Publisher:
    """Writes this rank's objects of one link after another."""

    def __init__(self, view: CacheView, pool: Pool, rank: int, timeout: float) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._geometry = view.geometry

    def publish(
        self,
        job: PublishJob,
        report: RankReport,
        computed: Callable[[], None] = lambda: None,
        passing: Passing | None = None,
    ) -> None:
        """Write the objects and name them in `report`; on any error remove what was written, then raise it.

        `computed` returns when the caches hold the state: until then room is taken, so that it does not have to wait
        for that. `passing`: parts are gathered and put as its marks are reached, and sealed after `computed`. What
        cannot be removed stays in the report, so that the owner can try again.
        """
        check_table(self._view, job.blocks, job.length, "publish")
        packing = Packing(job.packing_dcp, job.packing_interleave)
        plans = plan_write(self._geometry, self._rank, job.length, packing, job.base)
        if not plans:
            return
        objects = [Reservation(self._key(job, plan), plan.nbytes, self._segment(job, plan)) for plan in plans]
        puts = StreamedPuts(self._pool, objects)
        try:
            puts.reserve()
            if passing is None:
                computed()
            else:
                # Memory that is held while a step computes is taken when there is something to put into it.
                passing.wait(0)
            nbytes = sum(plan.nbytes for plan in plans)
            with self._pool.staging(nbytes, self._timeout) as staging, puts:
                writers: list[HeadsWriter | RowsWriter] = []
                at = 0
                for number, plan in enumerate(plans):
                    data = staging[at : at + plan.nbytes]
                    at += plan.nbytes
                    writer = HeadsWriter if plan.group == "kda" else RowsWriter
                    writers.append(writer(self._view, job, plan, data, partial(puts.write, number)))
                if passing is None:
                    for one in writers:
                        one.write()
                else:
                    report.streamed = self._write(writers, passing, puts.flush)
                    computed()
                placements = puts.seal()
            algorithm = ML64 if self._view.proves else XXH3
            report.objects = [
                _entry(plan, placed, writer.digests(), algorithm)
                for plan, placed, writer in zip(plans, placements, writers, strict=True)
            ]
            report.nbytes = nbytes
        except BaseException:
            left = puts.undo()
            report.objects = [
                _entry(plan, Placement(one.key, one.nbytes, "", False), ("0",))
                for plan, one in zip(plans, objects, strict=True)
                if one.key in left
            ]
            report.nbytes = report.streamed = 0
            raise

    def _write(
        self, writers: Sequence[HeadsWriter | RowsWriter], passing: Passing, flush: Callable[[], None]
    ) -> int:
        """Every part when it is final; returns the bytes of those that were before the step had ended."""
        g, streamed = self._geometry, 0
        parts: list[tuple[int, int, int, Callable[[], None]]] = []
        for writer in writers:
            if isinstance(writer, RowsWriter):
                parts.append((g.mla_layers[-1], passing.rows, writer.nbytes, writer.write))
                continue
            for mark, group in enumerate(passing.groups):
                nbytes = writer.nbytes * len(group) // len(g.kda_layers)
                parts.append((g.kda_layers[group.stop - 1], mark, nbytes, partial(writer.write, group)))
        for number, (_, mark, nbytes, write) in enumerate(sorted(parts, key=lambda part: part[0])):
            if number:
                flush()  # the last ones go with what seals
            streamed += nbytes if passing.wait(mark) else 0
            write()
        return streamed

    def _key(self, job: PublishJob, plan: ObjectPlan) -> str:
        return object_key(self._geometry.model_digest, job.epoch, plan.group, self._rank, job.link)

    def _segment(self, job: PublishJob, plan: ObjectPlan) -> str:
        """Where to write: into the segment of the reading worker's rank that this rank's number falls on."""
        if plan.group == "kda" and not job.final:
            return self._pool.segment_name
        segments = job.segment.split(",")
        # Asked for nothing, the store would take any segment, also one of a worker that may leave first.
        return segments[self._rank % len(segments)] or self._pool.segment_name


def _entry(
    plan: ObjectPlan, placed: Placement, digests: tuple[str, ...], algorithm: str = XXH3
) -> ObjectEntry:
    return ObjectEntry(
        key=placed.key,
        group=plan.group,
        nbytes=plan.nbytes,
        digests=digests,
        token_lo=plan.token_lo,
        token_hi=plan.token_hi,
        null_free=True,
        segment=placed.segment,
        digest=algorithm,
    )
