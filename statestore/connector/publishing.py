# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a link: take room, gather, prove, digest, put. Called on an I/O thread, the blocks pinned.

The latent rows of every link, and all of the final one, are what the reading worker wants now, so they go straight into
its segment. The KDA state of a checkpoint is for requests to come: it goes into the writer's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from statestore.boundary import ObjectEntry, object_key
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import check_table
from statestore.connector.device_proofs import RowSums, heads_digests, heads_problem, rows_problem
from statestore.connector.lanes import share
from statestore.connector.messages import PublishJob, RankReport
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.connector.store_ahead import PUT_PIECE, StreamedPuts
from statestore.digest import ML64, XXH3
from statestore.pool import Placement, Pool, Reservation
from statestore.reshard import ObjectPlan, Packing, plan_write, row_bytes

HEADS_AT_ONCE = 2
"""Least heads that are gathered as one piece: a layer is one copy whatever its heads, and a large model's heads are so
large that the copies' fixed cost shows."""

LANES = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
"""Threads that have a device gather and prove one publish: they wait for it, not for each other. Host memory is
gathered by one: with four of them on 16 cores 64 MiB took 2.1 times their bare put, and 1.9 with one."""

DEVICE_PIECE = 16 << 20
"""Bytes that a device gathers and proves at once, about. They cross in less than a millisecond, and each time the
caller waits for the device: for what else runs on it, as well."""

_Put = Callable[[int, Bytes], None]
"""Has data written to a byte of the object."""


class Publisher:
    """Writes this rank's objects of one link after another."""

    def __init__(self, view: CacheView, pool: Pool, rank: int, timeout: float) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._geometry = view.geometry

    def publish(
        self, job: PublishJob, report: RankReport, computed: Callable[[], None] = lambda: None
    ) -> None:
        """Write the objects and name them in `report`; on any error remove what was written, then raise it.

        `computed` returns when the caches hold the state: until then room is taken, so that it does not have to wait
        for that. What cannot be removed stays in the report, so that the owner can try again.
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
            computed()
            nbytes = sum(plan.nbytes for plan in plans)
            with self._pool.staging(nbytes, self._timeout) as staging, puts:
                digests: list[tuple[str, ...]] = []
                at = 0
                for number, plan in enumerate(plans):
                    data = staging[at : at + plan.nbytes]
                    at += plan.nbytes
                    write = self._write_heads if plan.group == "kda" else self._write_rows
                    digests.append(write(job, plan, data, partial(puts.write, number)))
                placements = puts.seal()
            algorithm = ML64 if self._view.proves else XXH3
            report.objects = [
                _entry(plan, placed, found, algorithm)
                for plan, placed, found in zip(plans, placements, digests, strict=True)
            ]
            report.nbytes = nbytes
        except BaseException:
            left = puts.undo()
            report.objects = [
                _entry(plan, Placement(one.key, one.nbytes, "", False), ("0",))
                for plan, one in zip(plans, objects, strict=True)
                if one.key in left
            ]
            report.nbytes = 0
            raise

    def _write_heads(self, job: PublishJob, plan: ObjectPlan, data: Bytes, put: _Put) -> tuple[str, ...]:
        """Gather, prove and write some heads after the other; returns the digests.

        Inside, layer by layer: what has been gathered is proved while it is still in the core's cache. What comes from
        a device comes at once: there each copy has a price of its own. A device with kernels proves what it gathers.
        """
        size, layers = plan.units[0].nbytes, len(self._geometry.kda_layers)
        digests = [""] * len(plan.units)

        def write(some: tuple[int, int]) -> None:
            first, heads = some
            piece = data[first * size : (first + heads) * size]
            if self._view.proves:
                found = self._view.prove_heads(job.blocks, piece, first)
                if problem := heads_problem(found, self._geometry, plan.units[first].first):
                    raise problem
                _put_all(first * size, piece, put)
                digests[first : first + heads] = heads_digests(found, self._geometry)
                return
            proof = HeadsProof(piece, heads, self._geometry, plan.units[first].first)
            gather = self._view.gatherer(job.blocks, piece, first, heads)
            step = proof.step if self._view.on_host else layers
            for low in range(0, layers, step):
                taken = range(low, min(low + step, layers))
                gather(taken)
                proof.take(taken)
                if proof.problem is not None:
                    raise proof.problem
            put(first * size, piece)
            digests[first : first + heads] = proof.digests()

        each, lanes = (DEVICE_PIECE, LANES) if self._view.proves else (PUT_PIECE, 1)
        share(list(_pieces(len(plan.units), size, each, HEADS_AT_ONCE)), lanes, write)
        return tuple(digests)

    def _write_rows(self, job: PublishJob, plan: ObjectPlan, data: Bytes, put: _Put) -> tuple[str, ...]:
        """The same, some rows after the other, and at the end the table of their digests."""
        if self._view.proves:
            return self._write_proved_rows(job, plan, data, put)
        proof = RowsProof(data[: plan.payload], plan.units, self._geometry, finite=True)
        size = row_bytes(self._geometry)

        def write(some: tuple[int, int]) -> None:
            first, rows = some
            step = proof.step if self._view.on_host else rows
            for low in range(first, first + rows, step):
                high = min(low + step, first + rows)
                self._view.gather_rows(job.blocks, plan.tokens[low:high], data[low * size : high * size])
                proof.take(range(low, high))
                if proof.problem is not None:
                    raise proof.problem
            put(first * size, data[first * size : (first + rows) * size])

        share(list(_pieces(len(plan.tokens), size, PUT_PIECE)), 1, write)
        _put_table(plan, data, proof.table, put)
        return proof.digests()

    def _write_proved_rows(
        self, job: PublishJob, plan: ObjectPlan, data: Bytes, put: _Put
    ) -> tuple[str, ...]:
        size = row_bytes(self._geometry)
        sums = RowSums(len(plan.tokens), size)

        def write(some: tuple[int, int]) -> None:
            first, rows = some
            piece = data[first * size : (first + rows) * size]
            tokens = plan.tokens[first : first + rows]
            found = self._view.prove_rows(job.blocks, tokens, piece, sums.places(rows))
            if problem := rows_problem(found, self._geometry, first, finite=True):
                raise problem
            _put_all(first * size, piece, put)
            sums.add(first, found)

        share(list(_pieces(len(plan.tokens), size, DEVICE_PIECE)), LANES, write)
        _put_table(plan, data, sums.table, put)
        return sums.digests(plan.units)

    def _key(self, job: PublishJob, plan: ObjectPlan) -> str:
        return object_key(self._geometry.model_digest, job.epoch, plan.group, self._rank, job.link)

    def _segment(self, job: PublishJob, plan: ObjectPlan) -> str:
        """Where to write: into the segment of the reading worker's rank that this rank's number falls on."""
        if plan.group == "kda" and not job.final:
            return self._pool.segment_name
        segments = job.segment.split(",")
        # Asked for nothing, the store would take any segment, also one of a worker that may leave first.
        return segments[self._rank % len(segments)] or self._pool.segment_name


def _put_all(at: int, piece: Bytes, put: _Put) -> None:
    """In calls of `PUT_PIECE` bytes, which can be on their way side by side."""
    for low in range(0, piece.nbytes, PUT_PIECE):
        put(at + low, piece[low : low + PUT_PIECE])


def _put_table(plan: ObjectPlan, data: Bytes, table: Bytes, put: _Put) -> None:
    """The digests of the rows behind them."""
    behind = data[plan.payload :]
    behind[:] = table.reshape(-1)
    put(plan.payload, behind)


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


def _pieces(count: int, nbytes: int, together: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """(first, how many) of `count` items of `nbytes` each, gathered as one piece: about `together` bytes of them,
    but not fewer than `least`."""
    each = max(least, -(-together // nbytes))
    for first in range(0, count, each):
        yield first, min(each, count - first)
