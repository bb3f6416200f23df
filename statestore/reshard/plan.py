# SPDX-License-Identifier: Apache-2.0
"""The plans of one rank: what it writes of a handover, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass

from statestore.geometry import Geometry
from statestore.reshard.compat import compatible
from statestore.reshard.kda import KdaSourceRead, KdaWrite, kda_read, kda_write
from statestore.reshard.mla import CELL_ROWS, MlaShard, MlaSourceRead, Packing, mla_read, mla_shard


@dataclass(frozen=True)
class WritePlan:
    """What a prefill rank writes for tokens [start, stop) and the state after token stop - 1."""

    kda: KdaWrite
    mla: MlaShard

    @property
    def nbytes(self) -> int:
        """Bytes of the rank's objects together; the store must have room for them."""
        return self.kda.layout.nbytes + self.mla.layout.nbytes


def plan_write(
    src: Geometry, rank: int, start: int, stop: int, packing: Packing | None = None, *, history: int = 0
) -> WritePlan:
    """Write plan of prefill rank `rank`. Raises ValueError for a rank, a token range or a history that is not."""
    return WritePlan(kda_write(src, history), mla_shard(src, rank, start, stop, packing))


@dataclass(frozen=True)
class ReadPlan:
    """What a decode rank reads, source by source. A group without sources needs nothing of it."""

    kda: tuple[KdaSourceRead, ...]
    mla: tuple[MlaSourceRead, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that cross the wire, which is also the staging room that the rank needs."""
        return sum(read.nbytes for read in self.kda) + sum(read.nbytes for read in self.mla)

    @property
    def bytes_needed(self) -> int:
        """Bytes that end in the rank's cache."""
        return sum(read.nbytes for read in self.kda) + sum(read.bytes_needed for read in self.mla)


def plan_read(
    src: Geometry,
    dst: Geometry,
    rank: int,
    start: int,
    stop: int,
    packing: Packing | None = None,
    *,
    want: tuple[int, int] | None = None,
    max_gap: int = 0,
    cell_rows: int | None = CELL_ROWS,
) -> ReadPlan:
    """Read plan of decode rank `rank`; parameters as in `mla_read`.

    Raises `GeometryMismatch` when the geometries do not map, ValueError for a rank or range that does not exist.
    """
    compatible(src, dst)
    mla = mla_read(src, dst, rank, start, stop, packing, want=want, max_gap=max_gap, cell_rows=cell_rows)
    return ReadPlan(kda_read(src, dst, rank), mla)
