# SPDX-License-Identifier: Apache-2.0
"""One rank's share of a load: read what it owns of a chain, check all of it, and only then write the caches.

What lies in this rank's own segment (where the publisher was asked to put it) is copied here, the rest comes over the
wire ahead of its check. A load that fails has written nothing, so what vLLM recomputes afterwards starts from its own
blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from statestore.boundary import BoundaryRecord
from statestore.connector import faults
from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.checks import (
    VerificationFailed,
    check_epoch,
    check_table,
)
from statestore.connector.device_proofs import RowSums, heads_digests, heads_problem, rows_problem
from statestore.connector.lanes import share
from statestore.connector.messages import LoadJob, RankReport
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.connector.store_ahead import PIECE, ReadAhead
from statestore.digest import ALGORITHMS, ML64, first_null, row_digests, unit_digest
from statestore.geometry import GeometryError
from statestore.pool import Pool, SizeMismatch
from statestore.reshard import (
    ROW_DIGEST,
    GeometryMismatch,
    Piece,
    ReadPlan,
    RecordIncomplete,
    plan_read_chain,
)

LANES = max(2, min(4, len(os.sched_getaffinity(0)) // 4))
"""Threads that copy and check one load: two hide a copy behind a check, more want cores of their own. Beside an H200 a
thread copied 5 to 6 GB/s out of the rank's segment, and the GPU's check of it took as long."""

LANE_BYTES = 4 << 20
"""What is smaller is not worth the start of a thread."""


KEPT_BYTES = 512 << 20
"""Device memory that a load may take from its check to its end, so that its bytes cross to the device once."""


class Loader:
    """Restores this rank's share of one boundary after another."""

    def __init__(
        self, view: CacheView, pool: Pool, rank: int, timeout: float, verify: bool, damage: str
    ) -> None:
        self._view, self._pool, self._rank, self._timeout = view, pool, rank, timeout
        self._verify, self._damage = verify, damage
        self._geometry = view.geometry

    def load(self, job: LoadJob, report: RankReport, free: Callable[[], None] = lambda: None) -> None:
        """Restore; raises VerificationFailed, or what the pool raised. `free` returns once blocks may be written."""
        records = job.records
        check_table(self._view, job.blocks, records[-1].length, "load into")
        plan = self._plan(records, job.local_tokens)
        if self._damage != "none":
            damaged = faults.inject(self._damage, self._pool, records[-1], plan.pieces)
            plan = self._plan((*records[:-1], damaged), job.local_tokens)
        report.nbytes = plan.nbytes
        keys = list(dict.fromkeys(piece.entry.key for piece in plan.pieces))
        with (
            self._pool.staging(plan.nbytes, self._timeout) as staging,
            self._pool.at_home(keys, self._timeout) as home,
            ReadAhead(self._pool, plan, staging, without=home) as ahead,
        ):
            for piece in plan.pieces:
                _check_size(piece, home)
            lanes = LANES if plan.nbytes >= LANE_BYTES else 1
            kept: dict[int, torch.Tensor] | None = {} if plan.nbytes <= KEPT_BYTES else None
            together = self._view.proves
            # A host's lanes have cores of their own to fill; a device is one, and each call of it has a price.
            limit = min(PIECE, -(-plan.nbytes // lanes)) if self._view.on_host else PIECE
            share(
                _runs(plan.pieces, limit, together),
                lanes,
                lambda run: self._take(run, staging, home, ahead, kept),
            )
            free()
            # Device caches are written in one stream, and what is on the device already in the pieces it came in.
            lanes = lanes if self._view.on_host else 1
            limit = PIECE if kept else -(-plan.nbytes // lanes)
            share(
                _runs(plan.pieces, limit, together),
                lanes,
                lambda run: self._write(job, run, (kept or {}).get(run[0].at, _bytes(run, staging))),
            )

    def _take(
        self,
        run: list[Piece],
        staging: Bytes,
        home: Mapping[str, Bytes],
        ahead: ReadAhead,
        kept: dict[int, torch.Tensor] | None,
    ) -> None:
        """Have the bytes of a run in staging, and check them there.

        Digests first: what is wrong with bytes that are not the ones that were written means nothing. What is copied
        here is checked while it is in the core's cache. A device that can checks its own copy, which stays in `kept`.
        """
        data = _bytes(run, staging)
        for piece in reversed(run):
            if piece.entry.key not in home:
                ahead.wait(piece.at + piece.nbytes)
                break
        here = [piece for piece in run if piece.entry.key in home]
        if not self._verify or run[0].rows is not None:
            copy_from_home(here, home, staging, 0, max(piece.nbytes for piece in run))
        if not self._verify:
            return
        if run[0].rows is not None:
            self._check_some(run[0], data)
            return
        g, first, algorithm = self._geometry, run[0].unit.first, run[0].entry.digest
        if algorithm == ML64 and self._view.proves:
            copy_from_home(here, home, staging, 0, max(piece.unit.nbytes for piece in run))
            digests, problem, copy = self._look(run, data)
            _compare(run, digests)
            if problem is not None:
                raise problem
            if kept is not None and all(piece.wanted is None or piece.wanted.all() for piece in run):
                kept[run[0].at] = copy
            return
        proof: HeadsProof | RowsProof
        if run[0].tokens is None:
            proof, count, low = HeadsProof(data, len(run), g, first, algorithm), len(g.kda_layers), 0
        else:
            proof = RowsProof(data, [run[0].unit], g, False, first, algorithm)
            count, low = run[0].unit.count, first
        size = run[0].nbytes // count
        for at in range(0, count, proof.step):
            end = min(at + proof.step, count)
            copy_from_home(here, home, staging, at * size, end * size)
            proof.take(range(low + at, low + end))
        _compare(run, proof.digests())
        if proof.problem is not None:
            raise proof.problem

    def _check_some(self, piece: Piece, data: Bytes) -> None:
        """Some rows of a unit, with its table behind them: the table first, by the record, then they by the table."""
        assert piece.rows is not None
        end = len(piece.rows) * piece.row_bytes
        table, algorithm = data[end:], piece.entry.digest
        _compare([piece], [unit_digest(table, algorithm)])
        rows = data[:end].reshape(len(piece.rows), -1)
        wrong = row_digests(rows, algorithm) != table.reshape(-1, ROW_DIGEST)[piece.rows]
        if wrong.any():
            row = piece.unit.first + int(piece.rows[wrong.any(axis=1).argmax()])
            raise VerificationFailed(
                "digest", f"{piece.entry.key}: row {row} has another digest than the object's table says"
            )
        null = first_null(rows.reshape(-1, self._geometry.latent_row_bytes))
        if null is not None:
            index, layer = divmod(null, len(self._geometry.mla_layers))
            where = (
                f"row {piece.unit.first + int(piece.rows[index])}, layer {self._geometry.mla_layers[layer]}"
            )
            raise VerificationFailed("null_state", f"MLA {where} is all zeros")

    def _look(
        self, run: list[Piece], data: Bytes
    ) -> tuple[Sequence[str], VerificationFailed | None, torch.Tensor]:
        """A device's look at its copy of a run: digests, what is wrong, the copy."""
        g, unit = self._geometry, run[0].unit
        if run[0].tokens is None:
            found, copy = self._view.check_heads(data)
            return heads_digests(found, g), heads_problem(found, g, unit.first), copy
        rows = sum(piece.unit.count for piece in run)
        sums = RowSums(rows, run[0].row_bytes)
        found, copy = self._view.check_rows(data, sums.places(rows))
        sums.add(0, found)
        # Their rows alone, and so the first of a table.
        digests = sums.digests([replace(piece.unit, first=piece.unit.first - unit.first) for piece in run])
        return digests, rows_problem(found, g, unit.first, finite=False), copy

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
            for piece in plan.pieces:
                if piece.entry.digest not in ALGORITHMS:
                    raise VerificationFailed(
                        "digest",
                        f"{piece.entry.key}: digest algorithm {piece.entry.digest!r} is unknown to this version, "
                        f"which has {', '.join(ALGORITHMS)}; run the same version on every role",
                    )
        return plan

    def _write(self, job: LoadJob, run: list[Piece], data: Bytes | torch.Tensor) -> None:
        piece = run[0]
        if piece.tokens is None or piece.wanted is None:
            self._view.scatter_heads(job.blocks, piece.head, len(run), data)
            return
        if len(run) > 1:
            tokens = np.concatenate([one.tokens for one in run if one.tokens is not None])
            self._view.scatter_rows(job.blocks, tokens, data)
            return
        tokens = piece.tokens
        if piece.rows is not None:
            data = data[: len(tokens) * piece.row_bytes]
        elif not piece.wanted.all():
            assert isinstance(data, np.ndarray)  # a device keeps whole units only
            rows = data.reshape(len(tokens), -1)[piece.wanted]
            data, tokens = np.ascontiguousarray(rows).reshape(-1), tokens[piece.wanted]
        self._view.scatter_rows(job.blocks, tokens, data)


def copy_from_home(
    pieces: Sequence[Piece], home: Mapping[str, Bytes], staging: Bytes, low: int, high: int
) -> None:
    """Bytes [low, high) of each whole piece into its place in staging; of some rows of a unit, all that is read."""
    for piece in pieces:
        source = home[piece.entry.key]
        if piece.rows is not None:
            for at, to, nbytes in piece.ranges():
                np.copyto(staging[to : to + nbytes], source[at : at + nbytes])
            continue
        at, nbytes = piece.unit.offset + low, min(high, piece.unit.nbytes) - low
        np.copyto(staging[piece.at + low : piece.at + low + nbytes], source[at : at + nbytes])


def _compare(run: Sequence[Piece], digests: Sequence[str]) -> None:
    """Raise unless every piece has the digest that its record says."""
    for piece, found in zip(run, digests, strict=True):
        if found != piece.digest:
            raise VerificationFailed(
                "digest",
                f"{piece.entry.key} at byte {piece.unit.offset}: digest {found}, the record says {piece.digest}",
            )


def _check_size(piece: Piece, home: Mapping[str, Bytes]) -> None:
    entry = piece.entry
    if entry.key in home and home[entry.key].nbytes != entry.nbytes:
        raise SizeMismatch(
            f"get {entry.key}: {home[entry.key].nbytes} bytes are stored, {entry.nbytes} were written"
        )


def _runs(
    pieces: Sequence[Piece], limit: int | None = None, rows_together: bool = False
) -> list[list[Piece]]:
    """Heads that follow one another in the rank and in staging, `limit` bytes of them at most; rows unit by unit.

    `rows_together`: whole units of rows whose digests a device takes are put together too, since there each call has a
    price of its own.
    """
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and piece.at == last.at + last.nbytes
            and (limit is None or piece.at + piece.nbytes - runs[-1][0].at <= limit)
            and (_next_head(last, piece) or (rows_together and _next_rows(last, piece)))
        )
        if joins:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def _next_head(last: Piece, piece: Piece) -> bool:
    return (
        piece.tokens is None
        and last.tokens is None
        and piece.entry.digest == last.entry.digest
        and piece.head == last.head + 1
        and piece.unit.first == last.unit.first + 1
    )


def _next_rows(last: Piece, piece: Piece) -> bool:
    return (
        _is_whole(last)
        and _is_whole(piece)
        and piece.entry.key == last.entry.key
        and piece.entry.digest == ML64
        and piece.unit.first == last.unit.first + last.unit.count
    )


def _is_whole(piece: Piece) -> bool:
    """A unit of rows that is read and wanted as a whole."""
    return (
        piece.tokens is not None and piece.rows is None and (piece.wanted is None or bool(piece.wanted.all()))
    )


def _bytes(run: list[Piece], staging: Bytes) -> Bytes:
    return staging[run[0].at : run[-1].at + run[-1].nbytes]
