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
    check_epoch,
    check_table,
)
from statestore.connector.messages import LoadJob, RankReport
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.connector.store_ahead import PIECE, ReadAhead
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
        with (
            self._pool.staging(plan.nbytes, self._timeout) as staging,
            ReadAhead(self._pool, plan, staging) as ahead,
        ):
            for run in _runs(plan.pieces, PIECE):
                ahead.wait(run[-1].at + run[-1].unit.nbytes)
                if self._verify:
                    self._check(run, _bytes(run, staging))
            for run in _runs(plan.pieces):
                self._write(job, run, _bytes(run, staging))

    def _check(self, run: list[Piece], data: Bytes) -> None:
        """Digests first: what is wrong with bytes that are not the ones that were written means nothing."""
        g, first = self._geometry, run[0].unit.first
        proof: HeadsProof | RowsProof
        if run[0].tokens is None:
            proof = HeadsProof(data, len(run), g, first)
        else:
            proof = RowsProof(data, [piece.unit for piece in run], g, finite=False, first=first)
        proof.take_all()
        for piece, found in zip(run, proof.digests(), strict=True):
            if found != piece.digest:
                raise VerificationFailed(
                    "digest",
                    f"{piece.entry.key} at byte {piece.unit.offset}: digest {found}, the record says {piece.digest}",
                )
        if proof.problem is not None:
            raise proof.problem

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

    def _write(self, job: LoadJob, run: list[Piece], data: Bytes) -> None:
        piece = run[0]
        if piece.tokens is None or piece.wanted is None:
            self._view.scatter_heads(job.blocks, piece.head, len(run), data)
            return
        tokens = piece.tokens
        if not piece.wanted.all():
            rows = data.reshape(len(tokens), -1)[piece.wanted]
            data, tokens = np.ascontiguousarray(rows).reshape(-1), tokens[piece.wanted]
        self._view.scatter_rows(job.blocks, tokens, data)


def _runs(pieces: Sequence[Piece], limit: int | None = None) -> list[list[Piece]]:
    """Heads that follow one another in the rank and in staging, `limit` bytes of them at most; rows unit by unit."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and piece.tokens is None
            and last.tokens is None
            and piece.head == last.head + 1
            and piece.unit.first == last.unit.first + 1
            and piece.at == last.at + last.unit.nbytes
            and (limit is None or piece.at + piece.unit.nbytes - runs[-1][0].at <= limit)
        ):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _bytes(run: list[Piece], staging: Bytes) -> Bytes:
    return staging[run[0].at : run[-1].at + run[-1].unit.nbytes]
