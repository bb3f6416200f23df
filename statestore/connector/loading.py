# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a load: read what it owns, check all of it, and only then write the caches.

A load that fails has written nothing, so what vLLM recomputes afterwards starts from its own blocks.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from statestore.connector import faults
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import VerificationFailed, check_digest, check_heads, check_table
from statestore.connector.messages import LoadJob, RankReport
from statestore.geometry import Geometry, GeometryError
from statestore.pool import Pool
from statestore.read_plan import Piece, RecordIncomplete, plan


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
        check_table(job.blocks, "load into")
        record = job.record
        try:
            source = Geometry.from_json(record.geometry)
            pieces = plan(record, source, self._geometry, self._rank, job.local_tokens)
        except (RecordIncomplete, GeometryError) as error:
            raise VerificationFailed("record", str(error)) from error
        if self._damage != "none":
            faults.inject(self._damage, self._pool, record, pieces)
        report.nbytes = sum(piece.unit.nbytes for piece in pieces)
        with self._pool.staging(report.nbytes, self._timeout) as staging:
            placed = self._read(pieces, staging)
            if self._verify:
                for piece, data in placed:
                    check_digest(data, piece.digest, f"{piece.entry.key} at byte {piece.unit.offset}")
                    if piece.tokens is None:
                        check_heads(data, 1, self._geometry)
            for piece, data in placed:
                self._write(job, piece, data)

    def _read(self, pieces: list[Piece], staging: Bytes) -> list[tuple[Piece, Bytes]]:
        """One ranged read an object; neighbouring pieces as one range."""
        placed: list[tuple[Piece, Bytes]] = []
        at = 0
        for key, of_key in groupby(pieces, key=lambda piece: piece.entry.key):
            ranges: list[tuple[int, int, int]] = []
            nbytes = 0
            for piece in of_key:
                unit = piece.unit
                placed.append((piece, staging[at : at + unit.nbytes]))
                if ranges and ranges[-1][0] + ranges[-1][2] == unit.offset:
                    source, target, length = ranges[-1]
                    ranges[-1] = (source, target, length + unit.nbytes)
                else:
                    ranges.append((unit.offset, at, unit.nbytes))
                at += unit.nbytes
                nbytes = piece.entry.nbytes
            if [(0, nbytes)] == [(source, length) for source, _, length in ranges]:
                target = ranges[0][1]
                self._pool.get_into(key, [staging[target : target + nbytes]])
            else:
                self._pool.get_ranges(
                    key, [(source, staging[to : to + length]) for source, to, length in ranges]
                )
        return placed

    def _write(self, job: LoadJob, piece: Piece, data: Bytes) -> None:
        if piece.tokens is None or piece.wanted is None:
            self._view.scatter_heads(job.blocks, piece.head, 1, data)
            return
        tokens = piece.tokens
        if not piece.wanted.all():
            rows = data.reshape(len(tokens), -1)[piece.wanted]
            data, tokens = np.ascontiguousarray(rows).reshape(-1), tokens[piece.wanted]
        self._view.scatter_rows(job.blocks, tokens, data)
