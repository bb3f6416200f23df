# SPDX-License-Identifier: Apache-2.0
"""Carries out plans on numpy caches, as a worker does on tensors, and checks the result against the reference.

`check_kda` and `check_mla` raise AssertionError when a byte is wrong, missing, written twice, read twice or read for
nothing. A `tamper` function changes each read plan before it is carried out: the negative controls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import reshard_reference as reference
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from statestore.digest import digest_pieces
from statestore.geometry import Geometry
from statestore.reshard import (
    ConvView,
    KdaSourceRead,
    MlaSourceRead,
    Packing,
    Part,
    Ranges,
    compatible,
    kda_read,
    kda_write,
    mla_read,
    mla_shard,
)

RATIO = 1.02
"""Most bytes moved for a needed byte."""

STAGED_PATTERN = 0x5A


@dataclass
class Tally:
    """What the checks have covered, for the terminal summary."""

    cases: int = 0
    ranks: int = 0
    moved: int = 0
    needed: int = 0

    def add(self, ranks: int, moved: int, needed: int) -> None:
        self.cases += 1
        self.ranks += ranks
        self.moved += moved
        self.needed += needed


TALLIES: dict[str, Tally] = {}


def strided(flat: NDArray[np.generic], view: ConvView) -> NDArray[np.generic]:
    """The view's elements, after checking that it stays inside the block's tensor."""
    last = view.offset + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
    assert 0 <= view.offset <= last < flat.size, f"view {view} leaves the tensor of {flat.size}"
    size = flat.itemsize
    return as_strided(flat[view.offset :], view.shape, [step * size for step in view.strides])


def carry_out(ranges: Ranges, source: NDArray[np.uint8], nbytes: int) -> tuple[NDArray[np.uint8], int]:
    """Copy the ranges; no byte of the object is read twice, and every byte of the region is written once."""
    region = np.full(nbytes, STAGED_PATTERN, np.uint8)
    read = np.zeros(len(source), np.int64)
    written = np.zeros(nbytes, np.int64)
    for at, to, size in ranges:
        assert at >= 0, "range begins before the object"
        assert at + size <= len(source), "range leaves the object"
        assert to + size <= nbytes, "range leaves the staged region"
        region[to : to + size] = source[at : at + size]
        read[at : at + size] += 1
        written[to : to + size] += 1
    assert read.max(initial=0) <= 1, "a byte is read twice"
    assert (written == 1).all(), "a staged byte is written twice or never"
    return region, ranges.total


def kda_object(cache: reference.KdaCache, geometry: Geometry, history: int) -> NDArray[np.uint8]:
    """What a prefill rank puts into the store."""
    plan = kda_write(geometry, history)
    out = np.full(plan.layout.nbytes, STAGED_PATTERN, np.uint8)
    count = np.zeros(plan.layout.nbytes, np.int64)

    def put(layer: int, part: Part, values: NDArray[np.generic]) -> None:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        at = plan.layout.offset(layer, part)
        out[at : at + len(raw)] = raw
        count[at : at + len(raw)] += 1

    for layer in range(plan.layout.layers):
        put(layer, Part.RECURRENT, cache.recurrent[layer])
        for part, view in zip((Part.CONV_Q, Part.CONV_K, Part.CONV_V), plan.conv, strict=True):
            put(layer, part, strided(cache.conv[layer], view))
    assert (count == 1).all(), "a byte of the object is written twice or never"
    return out


def _unpack_kda(
    read: KdaSourceRead,
    region: NDArray[np.uint8],
    dst: Geometry,
    history: int,
    cache: reference.KdaCache,
    counts: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> None:
    heads = slice(read.dst_head, read.dst_head + read.heads)
    views = read.conv_views(dst, history)
    for layer in range(read.layout.layers):
        for part in Part:
            at = read.layout.offset(layer, part)
            raw = region[at : at + read.heads * read.layout.head_bytes[part]]
            if part is Part.RECURRENT:
                target = cache.recurrent[layer, heads]
                target[...] = raw.view(np.uint32).reshape(target.shape)
                counts[0][layer, heads] += 1
            else:
                view = views[part - Part.CONV_Q]
                strided(cache.conv[layer], view)[...] = raw.view(np.uint16).reshape(view.shape)
                strided(counts[1][layer], view)[...] += 1


def check_kda(
    src: Geometry,
    dst: Geometry,
    *,
    seed: int = 0,
    src_history: int = 0,
    dst_history: int = 0,
    tamper: Callable[[KdaSourceRead], KdaSourceRead] = lambda read: read,
    tally: str = "",
) -> None:
    """Every decode rank, from write to cache."""
    compatible(src, dst)
    world = reference.KdaWorld.random(src, seed)
    caches = [reference.kda_cache(world, src, rank, src_history)[0] for rank in range(src.tp)]
    objects = [kda_object(cache, src, src_history) for cache in caches]
    written = [[digest_pieces(raw, cell) for cell in kda_write(src, src_history).cells()] for raw in objects]
    total_moved = total_needed = 0
    for rank in range(dst.tp):
        want, recurrent_count, conv_count = reference.kda_cache(world, dst, rank, dst_history)
        cache = reference.empty_kda_cache(dst)
        counts = (np.zeros_like(recurrent_count), np.zeros_like(conv_count))
        moved = 0
        for read in map(tamper, kda_read(src, dst, rank)):
            region, size = carry_out(read.ranges, objects[read.src_rank], read.nbytes)
            moved += size
            assert size == sum(piece.nbytes for piece in read.pieces()), "pieces and ranges differ"
            for piece in read.pieces():
                whole = objects[read.src_rank][piece.byte_offset :][: piece.nbytes]
                staged = read.layout.offset(piece.layer, piece.part)
                assert (region[staged : staged + piece.nbytes] == whole).all(), "a piece is not where it says"
            for cell in read.cells():
                digest = digest_pieces(region, cell)
                assert digest == written[read.src_rank][cell.index], "a cell's digest differs"
            _unpack_kda(read, region, dst, dst_history, cache, counts)
        assert (counts[0] == recurrent_count).all(), "recurrent element written twice, never or for nothing"
        assert (counts[1] == conv_count).all(), "conv element written twice, never or for nothing"
        assert (cache.recurrent == want.recurrent).all(), "recurrent state differs"
        assert (cache.conv == want.conv).all(), "convolution state differs"
        needed = int(recurrent_count.sum()) * 4 + int(conv_count.sum()) * 2
        assert moved <= RATIO * needed, f"moved {moved} bytes for {needed}"
        total_moved += moved
        total_needed += needed
    assert total_needed == src.sizes.kda == dst.sizes.kda
    if tally:
        TALLIES.setdefault(tally, Tally()).add(dst.tp, total_moved, total_needed)


def mla_objects(
    world: NDArray[np.uint8], src: Geometry, start: int, stop: int, packing: Packing
) -> list[NDArray[np.uint8]]:
    """What the prefill ranks put into the store; together they write each token once."""
    table = reference.block_table(src, stop, 1)
    objects = []
    wrote: list[int] = []
    for rank in range(src.tp):
        cache, _ = reference.mla_cache(world, src, rank, table, 0, stop)
        shard = mla_shard(src, rank, start, stop, packing)
        rows = np.array(
            [[layer[table[b], r] for b, r in zip(shard.block, shard.row, strict=True)] for layer in cache]
        )
        raw = rows.reshape(-1).astype(np.uint8)
        assert len(raw) == shard.layout.nbytes
        objects.append(raw)
        wrote += shard.tokens.tolist()
        cells = shard.cells(7)
        covered = np.zeros(len(raw), np.int64)
        for cell in cells:
            for at, size in zip(cell.offsets.tolist(), cell.nbytes.tolist(), strict=True):
                covered[at : at + size] += 1
        assert (covered == 1).all(), "cells do not cover the object once"
    assert sorted(wrote) == list(range(start, stop)), "a token is written twice or never"
    return objects


def check_mla(
    src: Geometry,
    dst: Geometry,
    *,
    start: int,
    stop: int,
    packing: Packing,
    want: tuple[int, int] | None = None,
    max_gap: int = 0,
    cell_rows: int | None = None,
    seed: int = 0,
    tamper: Callable[[MlaSourceRead], MlaSourceRead] = lambda read: read,
    tally: str = "",
) -> None:
    """Every decode rank, from write to cache."""
    compatible(src, dst)
    low, high = want or (start, stop)
    world = reference.mla_world(src, stop, seed)
    objects = mla_objects(world, src, start, stop, packing)
    table = reference.block_table(dst, stop, 2)
    # Only these promise that nothing unneeded moves; the others trade bytes for fewer or for checkable ranges.
    whole = packing == Packing.for_reader(dst) and (low, high) == (start, stop)
    exact = max_gap == 0 and (cell_rows in (None, 1) or whole)
    total_moved = total_needed = 0
    for rank in range(dst.tp):
        cache_wanted, count_wanted = reference.mla_cache(world, dst, rank, table, low, high)
        cache = reference.empty_mla_cache(dst, table)
        count = np.zeros_like(count_wanted)
        moved = 0
        for read in map(
            tamper,
            mla_read(src, dst, rank, start, stop, packing, want=want, max_gap=max_gap, cell_rows=cell_rows),
        ):
            region, size = carry_out(read.ranges, objects[read.src_rank], read.nbytes)
            moved += size
            staged = region.reshape(read.layout.layers, read.layout.rows, read.layout.row_bytes)
            for at, block, row in zip(read.staged_row, read.block, read.row, strict=True):
                cache[:, table[block], row] = staged[:, at]
                count[table[block], row] += 1
            if cell_rows is not None:
                _check_cells(read, src, region, objects[read.src_rank], start, stop, packing, cell_rows)
            if whole and max_gap == 0:
                assert len(read.runs) == 1, "matching packing needs more than one run"
        assert (count == count_wanted).all(), "a row is written twice, never or for nothing"
        assert (cache == cache_wanted).all(), "MLA rows differ"
        needed = int(count_wanted.sum()) * src.latent_row_bytes * len(src.mla_layers)
        assert moved >= needed, "bytes come from nowhere"
        if exact:
            assert moved <= RATIO * needed, f"moved {moved} bytes for {needed}"
        total_moved += moved
        total_needed += needed
    if tally:
        TALLIES.setdefault(tally + (" (exact)" if exact else " (with gaps or cells)"), Tally()).add(
            dst.tp, total_moved, total_needed
        )


def _check_cells(
    read: MlaSourceRead,
    src: Geometry,
    region: NDArray[np.uint8],
    source: NDArray[np.uint8],
    start: int,
    stop: int,
    packing: Packing,
    cell_rows: int,
) -> None:
    """Every needed row lies in a cell whose digest the writer has too."""
    written = mla_shard(src, read.src_rank, start, stop, packing).cells(cell_rows)
    covered = np.zeros(read.layout.rows, np.int64)
    for cell, (first, last) in zip(read.cells(), read.cell_runs.tolist(), strict=True):
        assert digest_pieces(region, cell) == digest_pieces(source, written[cell.index]), "digest differs"
        covered[first:last] += 1
    assert (covered[read.staged_row] == 1).all(), "a needed row lies in no cell"


def replace_ranges(read: KdaSourceRead, **columns: NDArray[np.int64]) -> KdaSourceRead:
    """The read with other ranges, for negative controls."""
    return dataclasses.replace(read, ranges=dataclasses.replace(read.ranges, **columns))
