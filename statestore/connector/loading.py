# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a load: read what it owns of a chain, check all of it, and only then write the caches.

A load that fails has written nothing, so what vLLM recomputes afterwards starts from its own blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from statestore.geometry import GeometryError
from statestore.pool import Pool
from statestore.reshard import GeometryMismatch, Piece, ReadPlan, RecordIncomplete, plan_read_chain


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
        records = job.records
        check_table(self._view, job.blocks, records[-1].length, "load into")
        plan = self._plan(records, job.local_tokens)
        if self._damage != "none":
            damaged = faults.inject(self._damage, self._pool, records[-1], plan.pieces)
            plan = self._plan((*records[:-1], damaged), job.local_tokens)
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

    def _plan(self, records: Sequence[BoundaryRecord], local_tokens: int) -> ReadPlan:
        """What to read of records that are what they say they are."""
        try:
            plan = plan_read_chain(records, self._geometry, self._rank, local_tokens)
        except GeometryMismatch as error:
            raise VerificationFailed("geometry", str(error)) from error
        except (RecordIncomplete, GeometryError) as error:
            raise VerificationFailed("record", str(error)) from error
        if self._verify:
            for record in records:
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
