# SPDX-License-Identifier: Apache-2.0
"""Digest and checks of staged state in one pass over it, piece by piece, while a piece is still in the core's cache.

What is checked, and why, is `statestore.connector.checks`'. Passes over memory are what digest and checks cost: the
arithmetic of both runs at several times the speed of memory.

A proof takes pieces in order. `problem` is the first thing found wrong; digests are complete once every piece has been
taken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statestore.connector.cache_view import Bytes
from statestore.connector.checks import VerificationFailed
from statestore.digest import (
    XXH3,
    all_finite,
    first_not_finite,
    first_null,
    row_digests,
    stream,
    unit_digest,
)
from statestore.geometry import Geometry
from statestore.reshard import ROW_DIGEST, Unit, head_bytes, row_bytes

_TILE = 512 << 10
"""Bytes that are taken at once."""


class HeadsProof:
    """Heads [first, first + heads) of all KDA layers, [heads, layers, bytes] of `data`; a digest a head."""

    def __init__(
        self, data: Bytes, heads: int, geometry: Geometry, first: int = 0, algorithm: str = XXH3
    ) -> None:
        g = self._geometry = geometry
        self._layers, self._first = len(g.kda_layers), first
        self._states = data.reshape(heads, self._layers, head_bytes(g) // self._layers)
        self._recurrent = g.head_v * g.head_k * g.recurrent_bytes
        self._streams = [stream(algorithm) for _ in range(heads)]
        self.problem: VerificationFailed | None = None
        self.step = max(1, _TILE // (heads * self._states.shape[2]))
        """Layers that are best taken at once."""

    def take(self, layers: range) -> None:
        """The next layers, which are complete in `data`."""
        piece = self._states[:, layers.start : layers.stop]
        for head, running in zip(piece, self._streams, strict=True):
            running.update(head)
        if self.problem is None:
            self._look(piece, layers.start)

    def take_all(self) -> None:
        """Every layer."""
        for low in range(0, self._layers, self.step):
            self.take(range(low, min(low + self.step, self._layers)))

    def digests(self) -> tuple[str, ...]:
        """One a head, of what has been taken."""
        return tuple(running.hexdigest() for running in self._streams)

    def _look(self, piece: Bytes, low: int) -> None:
        g = self._geometry
        recurrent, conv = piece[:, :, : self._recurrent], piece[:, :, self._recurrent :]
        # Real state shows itself in its first bytes; only what does not is read to its end.
        if not recurrent[:, :, :16].any(axis=2).all():
            flat = recurrent.reshape(-1, self._recurrent)
            null = first_null(flat)
            if null is not None:
                where = self._where(null, piece.shape[1], low)
                self.problem = VerificationFailed("null_state", f"KDA state of {where} is all zeros")
                return
        for name, part, dtype in (
            ("recurrent", recurrent, g.recurrent_dtype),
            ("convolution", conv, g.conv_dtype),
        ):
            if not all_finite(part, dtype):
                bad = first_not_finite(part.reshape(-1, part.shape[2]), dtype)
                assert bad is not None
                where = self._where(bad, piece.shape[1], low)
                self.problem = VerificationFailed(
                    "not_finite", f"KDA {name} state of {where} has a number that is not finite"
                )
                return

    def _where(self, index: int, layers: int, low: int) -> str:
        head, layer = divmod(index, layers)
        return f"head {self._first + head}, layer {self._geometry.kda_layers[low + layer]}"


class RowsProof:
    """Latent rows, [rows, layers, bytes] of `data`, whose first row is row `first` of the object; a digest a row in
    `table`, and one a unit of its part of the table."""

    def __init__(
        self,
        data: Bytes,
        units: Sequence[Unit],
        geometry: Geometry,
        finite: bool,
        first: int = 0,
        algorithm: str = XXH3,
    ) -> None:
        """`units`: runs of rows of the object that cover `data` in order; `finite`: also look at every number."""
        self._geometry, self._finite, self._first = geometry, finite, first
        self._data, self._units, self._row = data, units, row_bytes(geometry)
        self._algorithm = algorithm
        self.table = np.zeros((len(data) // self._row, ROW_DIGEST), np.uint8)
        """[rows, bytes]: of those that have been taken."""
        self.problem: VerificationFailed | None = None
        self.step = max(1, _TILE // self._row)
        """Rows that are best taken at once."""

    def take(self, rows: range) -> None:
        """The next rows, numbered as in the object."""
        taken = self._bytes(rows.start, rows.stop).reshape(-1, self._row)
        self.table[rows.start - self._first : rows.stop - self._first] = row_digests(taken, self._algorithm)
        if self.problem is None:
            self._look(rows)

    def take_all(self) -> None:
        """Every row."""
        end = self._units[-1].first + self._units[-1].count
        for low in range(self._first, end, self.step):
            self.take(range(low, min(low + self.step, end)))

    def digests(self) -> tuple[str, ...]:
        """One a unit, once all rows have been taken."""
        return tuple(
            unit_digest(self.table[low : low + unit.count], self._algorithm)
            for unit in self._units
            for low in (unit.first - self._first,)
        )

    def _bytes(self, low: int, high: int) -> Bytes:
        return self._data[(low - self._first) * self._row : (high - self._first) * self._row]

    def _look(self, rows: range) -> None:
        g = self._geometry
        parts = self._bytes(rows.start, rows.stop).reshape(-1, g.latent_row_bytes)
        null = first_null(parts)
        if null is not None:
            self.problem = VerificationFailed("null_state", f"MLA {self._where(null, rows)} is all zeros")
            return
        bad = first_not_finite(parts, g.kv_cache_dtype) if self._finite else None
        if bad is not None:
            self.problem = VerificationFailed(
                "not_finite", f"MLA {self._where(bad, rows)} has a number that is not finite"
            )

    def _where(self, index: int, rows: range) -> str:
        row, layer = divmod(index, len(self._geometry.mla_layers))
        return f"row {rows.start + row}, layer {self._geometry.mla_layers[layer]}"
