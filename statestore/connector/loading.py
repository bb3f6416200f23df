# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a load: read what it owns, check all of it, and only then write the caches.

A load that fails has written nothing, so what vLLM recomputes afterwards starts from its own blocks.
"""

from __future__ import annotations

import numpy as np

from statestore.boundary import BoundaryRecord
from statestore.connector import faults
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import (
    VerificationFailed,
    check_digest,
    check_epoch,
    check_heads,
    check_rows,
    check_table,
)
from statestore.connector.messages import LoadJob, RankReport
from statestore.geometry import Geometry, GeometryError
from statestore.pool import Pool
from statestore.reshard import GeometryMismatch, Piece, ReadPlan, RecordIncomplete, plan_read


class Loader:
    """Restores this rank's share of one boundary after another."""

    def __init__(
        self, view: CacheView, pool: Pool, rank: int, timeout: float, verify: bool, damage: str
    ) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._verify, self._damage = verify, damage
        self._geometry = view.geometry

    def load(self, job: LoadJob, report: RankReport) -> None:
        """Restore; raises VerificationFailed, or what the pool raised."""
        record = job.record
        check_table(self._view, job.blocks, record.length, "load into")
        plan = self._plan(record, job.local_tokens)
        if self._damage != "none":
            damaged = faults.inject(self._damage, self._pool, record, plan.pieces)
            plan = self._plan(damaged, job.local_tokens)
        report.nbytes = plan.nbytes
        with self._pool.staging(plan.nbytes, self._timeout) as staging:
            self._read(plan, staging)
            placed = [(piece, staging[piece.at : piece.at + piece.unit.nbytes]) for piece in plan.pieces]
            if self._verify:
                for piece, data in placed:
                    check_digest(data, piece.digest, f"{piece.entry.key} at byte {piece.unit.offset}")
                    if piece.tokens is None:
                        check_heads(data, 1, self._geometry, piece.unit.first)
                    else:
                        check_rows(data, self._geometry, finite=False)
            for piece, data in placed:
                self._write(job, piece, data)

    def _plan(self, record: BoundaryRecord, local_tokens: int) -> ReadPlan:
        """What to read of a record that is what it says it is."""
        try:
            source = Geometry.from_json(record.geometry)
            plan = plan_read(record, source, self._geometry, self._rank, local_tokens)
        except GeometryMismatch as error:
            raise VerificationFailed("geometry", str(error)) from error
        except (RecordIncomplete, GeometryError) as error:
            raise VerificationFailed("record", str(error)) from error
        if self._verify:
            check_epoch(record)
        return plan

    def _read(self, plan: ReadPlan, staging: Bytes) -> None:
        """One call an object."""
        for read in plan.reads():
            ranges = [(source, staging[at : at + nbytes]) for source, at, nbytes in read.ranges]
            if read.whole:
                self._pool.get_into(read.entry.key, [ranges[0][1]])
            else:
                self._pool.get_ranges(read.entry.key, ranges)

    def _write(self, job: LoadJob, piece: Piece, data: Bytes) -> None:
        if piece.tokens is None or piece.wanted is None:
            self._view.scatter_heads(job.blocks, piece.head, 1, data)
            return
        tokens = piece.tokens
        if not piece.wanted.all():
            rows = data.reshape(len(tokens), -1)[piece.wanted]
            data, tokens = np.ascontiguousarray(rows).reshape(-1), tokens[piece.wanted]
        self._view.scatter_rows(job.blocks, tokens, data)
