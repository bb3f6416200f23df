# SPDX-License-Identifier: Apache-2.0
"""MLA latent rows: the tokens a prefill rank writes, the tokens a decode rank reads.

Without DCP on the prefill side every prefill rank holds every token, and the tokens [start, stop) are divided among
the ranks in contiguous pieces. With DCP each token lies on the a/c ranks of its owner, and those divide what the
owner holds. Either way each token is written once. Block sizes may differ between the roles: maps go by token,
never by block id. Layout of an object and `Packing`: see the package's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statestore.geometry import Geometry
from statestore.reshard.ownership import local_length, owned_tokens, owner, place
from statestore.reshard.ranges import Cell, Ints, Ranges

SPLIT_TOKENS = 16
"""Prefill ranks divide tokens in multiples of this."""

CELL_ROWS = 1024
"""Rows of one digest cell at most. At 27 KB a token this is 28 MB hashed at once; 120K tokens have 120 cells."""

RowRuns = NDArray[np.int64]
"""[n, 2] array of row ranges [lo, hi), ascending and disjoint."""


@dataclass(frozen=True)
class Packing:
    """How rows of an object are ordered: grouped by (t // interleave) % dcp. (1, 1) is plain token order.

    A writer that knows its reader takes the reader's DCP and interleave. Raises ValueError unless both are ≥ 1.
    """

    dcp: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        for name in ("dcp", "interleave"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"packing field {name}={value!r} is not an integer of at least 1; correct it"
                )
        if self.dcp == 1 and self.interleave != 1:
            # One owner makes every interleave the same order; one name for it keeps records comparable.
            object.__setattr__(self, "interleave", 1)

    @classmethod
    def for_reader(cls, reader: Geometry) -> Packing:
        """The packing with which every rank of `reader` reads one run a layer."""
        return cls(reader.dcp, reader.interleave)

    def to_dict(self) -> dict[str, int]:
        return {"dcp": self.dcp, "interleave": self.interleave}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Packing:
        """Read `to_dict`'s output. Raises ValueError when a field is missing, unknown or wrong."""
        if set(values) != {"dcp", "interleave"}:
            raise ValueError(f"packing has fields {sorted(values)}; it needs exactly dcp and interleave")
        return cls(**values)


@dataclass(frozen=True)
class MlaLayout:
    """Offsets in an object (or staged region) of `rows` rows in each of `layers` MLA layers; bytes throughout."""

    layers: int
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.rows * self.row_bytes

    def offset(self, layer: int, row: int = 0) -> int:
        """Where row `row` begins; `layer` counts the MLA layers, not the model's."""
        return (layer * self.rows + row) * self.row_bytes

    def cell(self, index: int, row_lo: int, row_hi: int) -> Cell:
        """Rows [row_lo, row_hi) of every layer as a digest cell."""
        offsets = (np.arange(self.layers, dtype=np.int64) * self.rows + row_lo) * self.row_bytes
        return Cell(index, offsets, np.full(self.layers, (row_hi - row_lo) * self.row_bytes, dtype=np.int64))


@dataclass(frozen=True)
class MlaShard:
    """The object of one prefill rank: which token every row is, and where the rank's own cache has it."""

    rank: int
    tokens: Ints
    """Absolute token position of each row, in the object's row order."""
    group_starts: Ints
    """[packing.dcp + 1] first row of each owner's group, and the number of rows."""
    layout: MlaLayout
    block: Ints
    """Block-table index of each row's token in the writer's cache."""
    row: Ints
    """Row in that block."""

    def cell_rows(self, most: int = CELL_ROWS) -> RowRuns:
        """Row ranges of the object's cells: each owner's group cut into pieces of at most `most` rows."""
        pieces = []
        for low, high in zip(self.group_starts[:-1], self.group_starts[1:], strict=True):
            lows = np.arange(low, high, most, dtype=np.int64)
            pieces.append(np.stack((lows, np.minimum(lows + most, high)), axis=1))
        return np.concatenate(pieces)

    def cells(self, most: int = CELL_ROWS) -> list[Cell]:
        """Cells of the object, at its own offsets."""
        return [self.layout.cell(i, lo, hi) for i, (lo, hi) in enumerate(self.cell_rows(most).tolist())]


def mla_shard(src: Geometry, rank: int, start: int, stop: int, packing: Packing | None = None) -> MlaShard:
    """What prefill rank `rank` writes of tokens [start, stop), or reads back of it; no rows is a valid answer.

    Raises ValueError when the rank or the token range does not exist.
    """
    if not 0 <= start <= stop:
        raise ValueError(f"token range [{start}, {stop}) is not a range of positions")
    packing = packing or Packing()
    dcp_rank = src.dcp_rank(rank)
    first = local_length(start, dcp_rank, src.dcp, src.interleave)
    count = local_length(stop, dcp_rank, src.dcp, src.interleave) - first
    low, high = _share(count, rank // src.dcp, src.tp // src.dcp)
    tokens = owned_tokens(first + low, first + high, dcp_rank, src.dcp, src.interleave)
    owners = owner(tokens, packing.dcp, packing.interleave)
    if packing.dcp > 1:
        # A stable sort keeps tokens ascending inside each group.
        tokens = tokens[np.argsort(owners, kind="stable")]
    sizes = np.bincount(owners, minlength=packing.dcp)
    block, row = place(src, tokens)
    return MlaShard(
        rank=rank,
        tokens=tokens,
        group_starts=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        layout=MlaLayout(len(src.mla_layers), len(tokens), src.latent_row_bytes),
        block=block,
        row=row,
    )


def _share(count: int, part: int, parts: int) -> tuple[int, int]:
    """[low, high) of `count` items that the part gets: balanced, in multiples of SPLIT_TOKENS but for the last."""
    units = -(-count // SPLIT_TOKENS)
    low, high = part * units // parts, (part + 1) * units // parts
    return min(low * SPLIT_TOKENS, count), min(high * SPLIT_TOKENS, count)


@dataclass(frozen=True)
class MlaSourceRead:
    """What one decode rank reads from one prefill rank's object, and where each token goes."""

    src_rank: int
    runs: RowRuns
    """Row ranges of the source object that are read."""
    tokens: Ints
    """Absolute positions of the needed tokens."""
    staged_row: Ints
    """Row of each needed token in the staged region; other staged rows are dropped."""
    block: Ints
    """Block-table index of each needed token in the reader's cache."""
    row: Ints
    """Row in that block."""
    layout: MlaLayout
    """How the bytes lie once staged: the rows of `runs`, one after the other, layer by layer."""
    source_layout: MlaLayout
    cell_index: Ints
    """Number at the writer of each cell to check; empty when read without verification."""
    cell_runs: RowRuns
    """Staged rows [lo, hi) of each of those cells."""

    @property
    def nbytes(self) -> int:
        """Bytes of the staged region."""
        return self.layout.nbytes

    @property
    def bytes_needed(self) -> int:
        """Bytes that end in the reader's cache."""
        return self.layout.layers * len(self.tokens) * self.layout.row_bytes

    @cached_property
    def ranges(self) -> Ranges:
        """Byte ranges of the source object, coalesced; targets are offsets in the staged region."""
        count = self.runs[:, 1] - self.runs[:, 0]
        staged = np.cumsum(count) - count
        layer = np.arange(self.layout.layers, dtype=np.int64)[:, None]
        size = self.layout.row_bytes
        return Ranges(
            ((layer * self.source_layout.rows + self.runs[None, :, 0]) * size).reshape(-1),
            ((layer * self.layout.rows + staged[None, :]) * size).reshape(-1),
            np.tile(count * size, self.layout.layers),
        ).coalesced()

    def cells(self) -> list[Cell]:
        """Cells to check, at their staged offsets."""
        pairs = zip(self.cell_index.tolist(), self.cell_runs.tolist(), strict=True)
        return [self.layout.cell(index, lo, hi) for index, (lo, hi) in pairs]


def mla_ranges(rows: Ints, max_gap: int = 0) -> RowRuns:
    """Ascending, distinct rows as few ranges: rows at most `max_gap` unneeded rows apart share a range.

    A gap costs its bytes and saves a request to the store; 0 reads nothing that is not needed.
    """
    if len(rows) == 0:
        return np.empty((0, 2), dtype=np.int64)
    breaks = np.flatnonzero(np.diff(rows) > max_gap + 1)
    lows = rows[np.concatenate(([0], breaks + 1))]
    highs = rows[np.concatenate((breaks, [len(rows) - 1]))] + 1
    return np.stack((lows, highs), axis=1)


def mla_read(
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
) -> tuple[MlaSourceRead, ...]:
    """Read plan of decode rank `rank` for tokens [start, stop) that were written with `packing`.

    One entry a source rank that has something for the reader; the order begins at a different source for every
    reader, so that readers spread over the writers. `want` narrows the tokens (default all) for a reader that holds
    a prefix. With `cell_rows` whole cells are read, so that each can be checked; the writer must have used the same
    number. None reads only needed rows, and nothing can be checked. Raises ValueError for a rank, a token range or a
    gap that does not exist. The caller has asked `compatible` before.
    """
    low, high = want or (start, stop)
    if not (0 <= start <= low <= high <= stop):
        raise ValueError(f"wanted tokens [{low}, {high}) are outside the written [{start}, {stop})")
    if max_gap < 0 or (cell_rows is not None and cell_rows < 1):
        raise ValueError(f"max_gap={max_gap} must be at least 0 and cell_rows={cell_rows} at least 1")
    dcp_rank = dst.dcp_rank(rank)
    if not src.mla_layers:
        return ()
    reads = []
    for step in range(src.tp):
        source = (rank + step) % src.tp
        shard = mla_shard(src, source, start, stop, packing)
        mine = (shard.tokens >= low) & (shard.tokens < high)
        mine &= owner(shard.tokens, dst.dcp, dst.interleave) == dcp_rank
        rows = np.flatnonzero(mine).astype(np.int64)
        if len(rows):
            reads.append(_read_shard(shard, dst, rows, max_gap, cell_rows))
    return tuple(reads)


def _read_shard(
    shard: MlaShard, dst: Geometry, rows: Ints, max_gap: int, cell_rows: int | None
) -> MlaSourceRead:
    cell_index = np.empty(0, dtype=np.int64)
    cells = np.empty((0, 2), dtype=np.int64)
    runs = mla_ranges(rows, max_gap)
    if cell_rows is not None:
        every = shard.cell_rows(cell_rows)
        cell_index = np.unique(np.searchsorted(every[:, 0], rows, side="right") - 1)
        cells = every[cell_index]
        runs = _merge(cells, max_gap)
    count = runs[:, 1] - runs[:, 0]
    staged = np.cumsum(count) - count
    tokens = shard.tokens[rows]
    block, row = place(dst, tokens)
    return MlaSourceRead(
        src_rank=shard.rank,
        runs=runs,
        tokens=tokens,
        staged_row=_staged(rows, runs, staged),
        block=block,
        row=row,
        layout=MlaLayout(shard.layout.layers, int(count.sum()), shard.layout.row_bytes),
        source_layout=shard.layout,
        cell_index=cell_index,
        cell_runs=_staged(cells[:, 0], runs, staged)[:, None] + (cells - cells[:, :1]),
    )


def _merge(runs: RowRuns, max_gap: int) -> RowRuns:
    first = np.flatnonzero(np.concatenate(([True], runs[1:, 0] - runs[:-1, 1] > max_gap)))
    last = np.concatenate((first[1:] - 1, [len(runs) - 1]))
    return np.stack((runs[first, 0], runs[last, 1]), axis=1)


def _staged(rows: Ints, runs: RowRuns, staged: Ints) -> Ints:
    """Staged row of every source row, which must lie inside a run."""
    run = np.searchsorted(runs[:, 0], rows, side="right") - 1
    return staged[run] + rows - runs[run, 0]
