# SPDX-License-Identifier: Apache-2.0
"""What gathers, proves and puts one object, part by part, in the order in which its parts become final."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from statestore.connector.cache_view import Bytes, CacheView
from statestore.connector.device_proofs import HeadSums, RowSums, heads_problem, rows_problem
from statestore.connector.lanes import share
from statestore.connector.messages import PublishJob
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.connector.store_ahead import PUT_PIECE
from statestore.reshard import ObjectPlan, row_bytes

HEADS_AT_ONCE = 2
"""Least heads that are gathered as one piece: a layer is one copy whatever its heads, and a large model's heads are so
large that the copies' fixed cost shows."""

LANES = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
"""Threads that have a device gather and prove one publish: they wait for it, not for each other. Host memory is
gathered by one: with four of them on 16 cores 64 MiB took 2.1 times their bare put, and 1.9 with one."""

DEVICE_PIECE = 16 << 20
"""Bytes that a device gathers and proves at once, about. They cross in less than a millisecond, and each time the
caller waits for the device: for what else runs on it, as well."""

Put = Callable[[int, Bytes], None]
"""Has data written to a byte of the object."""


class HeadsWriter:
    """The KDA object: some heads after the other, of all layers or of one group of layers after the other.

    Inside, layer by layer: what has been gathered is proved while it is still in the core's cache. What comes from
    a device comes at once: there each copy has a price of its own. A device with kernels proves what it gathers, and
    what it gathers of a group lies together in staging, so that it is one copy: group by group, heads inside.
    """

    def __init__(self, view: CacheView, job: PublishJob, plan: ObjectPlan, data: Bytes, put: Put) -> None:
        self._view, self._job, self._plan, self._data, self._put = view, job, plan, data, put
        self.nbytes = plan.nbytes
        g = self._geometry = view.geometry
        self._heads, self._size = len(plan.units), plan.units[0].nbytes
        self._layers = len(g.kda_layers)
        self._layer = self._size // self._layers
        self._sums = HeadSums(self._heads, g)
        self._proofs: dict[int, tuple[HeadsProof, Callable[[range], None]]] = {}
        """By first head of a piece, in their order: its proof, which takes layers in order, and its gathering."""

    def write(self, group: range | None = None) -> None:
        """The next layers, which are final; all of them without a group."""
        group = range(self._layers) if group is None else group
        write = self._write_proved if self._view.proves else self._write_some
        # On the host pieces are the same for every group: each has a proof that goes on.
        pieces = self._pieces(len(group) if self._view.proves else self._layers)
        share(pieces, LANES if self._view.proves else 1, partial(write, group))

    def digests(self) -> tuple[str, ...]:
        """One a head."""
        if self._view.proves:
            return self._sums.digests()
        return tuple(digest for proof, _ in self._proofs.values() for digest in proof.digests())

    def _pieces(self, layers: int) -> list[tuple[int, int]]:
        together = DEVICE_PIECE if self._view.proves else PUT_PIECE
        return list(_pieces(self._heads, layers * self._layer, together, HEADS_AT_ONCE))

    def _write_some(self, group: range, some: tuple[int, int]) -> None:
        first, heads = some
        if first not in self._proofs:
            piece = self._data[first * self._size : (first + heads) * self._size]
            made = HeadsProof(piece, heads, self._geometry, self._plan.units[first].first)
            self._proofs[first] = made, self._view.gatherer(self._job.blocks, piece, first, heads)
        proof, gather = self._proofs[first]
        step = proof.step if self._view.on_host else len(group)
        for low in range(group.start, group.stop, step):
            taken = range(low, min(low + step, group.stop))
            gather(taken)
            proof.take(taken)
            if proof.problem is not None:
                raise proof.problem
        if len(group) == self._layers:
            self._put(first * self._size, self._data[first * self._size : (first + heads) * self._size])
            return
        for head in range(first, first + heads):
            low, high = (head * self._size + layer * self._layer for layer in (group.start, group.stop))
            self._put(low, self._data[low:high])

    def _write_proved(self, group: range, some: tuple[int, int]) -> None:
        first, heads = some
        each = len(group) * self._layer
        at = self._heads * group.start * self._layer + first * each
        piece = self._data[at : at + heads * each]
        found = self._view.prove_heads(self._job.blocks, piece, first, group)
        if problem := heads_problem(found, self._geometry, self._plan.units[first].first, group):
            raise problem
        if len(group) == self._layers:
            _put_all(first * self._size, piece, self._put)
        else:
            for number in range(heads):
                to = (first + number) * self._size + group.start * self._layer
                _put_all(to, piece[number * each : (number + 1) * each], self._put)
        self._sums.add(first, found)


class RowsWriter:
    """The MLA object: some rows after the other, and at the end the table of their digests."""

    def __init__(self, view: CacheView, job: PublishJob, plan: ObjectPlan, data: Bytes, put: Put) -> None:
        self._view, self._job, self._plan, self._data, self._put = view, job, plan, data, put
        self.nbytes = plan.nbytes
        g = self._geometry = view.geometry
        self._size = row_bytes(g)
        self._sums = RowSums(len(plan.tokens), self._size) if view.proves else None
        self._proof = None if view.proves else RowsProof(data[: plan.payload], plan.units, g, finite=True)

    def write(self) -> None:
        """All rows, which are final, and the table of their digests."""
        pieces = list(_pieces(len(self._plan.tokens), self._size, self._together))
        if self._view.proves:
            share(pieces, LANES, self._write_proved)
        else:
            share(pieces, 1, self._write_some)
        _put_table(self._plan, self._data, (self._sums or self._checked).table, self._put)

    def digests(self) -> tuple[str, ...]:
        """One a unit."""
        return self._sums.digests(self._plan.units) if self._sums is not None else self._checked.digests()

    @property
    def _together(self) -> int:
        return DEVICE_PIECE if self._view.proves else PUT_PIECE

    @property
    def _checked(self) -> RowsProof:
        assert self._proof is not None
        return self._proof

    def _write_some(self, some: tuple[int, int]) -> None:
        (first, rows), size, proof = some, self._size, self._checked
        step = proof.step if self._view.on_host else rows
        for low in range(first, first + rows, step):
            high = min(low + step, first + rows)
            tokens = self._plan.tokens[low:high]
            self._view.gather_rows(self._job.blocks, tokens, self._data[low * size : high * size])
            proof.take(range(low, high))
            if proof.problem is not None:
                raise proof.problem
        self._put(first * size, self._data[first * size : (first + rows) * size])

    def _write_proved(self, some: tuple[int, int]) -> None:
        (first, rows), size = some, self._size
        assert self._sums is not None
        piece = self._data[first * size : (first + rows) * size]
        tokens = self._plan.tokens[first : first + rows]
        found = self._view.prove_rows(self._job.blocks, tokens, piece, self._sums.places(rows))
        if problem := rows_problem(found, self._geometry, first, finite=True):
            raise problem
        _put_all(first * size, piece, self._put)
        self._sums.add(first, found)


def _put_all(at: int, piece: Bytes, put: Put) -> None:
    """In calls of `PUT_PIECE` bytes, which can be on their way side by side."""
    for low in range(0, piece.nbytes, PUT_PIECE):
        put(at + low, piece[low : low + PUT_PIECE])


def _put_table(plan: ObjectPlan, data: Bytes, table: Bytes, put: Put) -> None:
    """The digests of the rows behind them."""
    behind = data[plan.payload :]
    behind[:] = table.reshape(-1)
    put(plan.payload, behind)


def _pieces(count: int, nbytes: int, together: int, least: int = 1) -> Iterator[tuple[int, int]]:
    """(first, how many) of `count` items of `nbytes` each, gathered as one piece: about `together` bytes of them,
    but not fewer than `least`."""
    each = max(least, -(-together // nbytes))
    for first in range(0, count, each):
        yield first, min(each, count - first)
