# SPDX-License-Identifier: Apache-2.0
"""ReplaySSM through the steps of an engine: which request's records are pending, and where they are folded.

An engine keeps a request's recurrent state in one block of a paged cache at a time, the running block, and a step
of T positions leaves T records in the request's pair of rows (``records.py``). Between two windows of a request lie
the moves of its state to another block, the copy of the state at a block boundary, and the request's end. All of
them fold through ``torch_path.py``; docs/replay_ssm.md has the table of a step and the crash paths.

What is pending belongs to the request, not to the block: a block changes its owner unseen. The layers of a *group*
share a block table, and all groups share the pairs, because every layer runs the same windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decode_worker.replay_ssm.records import RecordRows, WindowPlan, WindowRecords
from decode_worker.replay_ssm.torch_path import advance_window, flush_pending

CONV_DROPPED = 1
"""The engine's convolution cache has W-1+T-1 columns: a step accepts at least one token, so the oldest column goes."""


@dataclass
class ReplayLayer:
    """One KDA layer: its caches, its parameters and its records."""

    state: Tensor
    """[blocks, H, V, K]"""
    conv_cache: Tensor
    """[blocks, C, W-1+T-1], a view of any strides."""
    conv_weight: Tensor
    """[C, W]"""
    a_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    records: WindowRecords

    def fold(self, read_rows: Tensor, counts: Tensor, source_blocks: Tensor, target_blocks: Tensor) -> None:
        """Put the state after the first ``counts`` [B] records, and its history, into ``target_blocks`` [B]."""
        flush_pending(
            a_log=self.a_log,
            dt_bias=self.dt_bias,
            lower_bound=self.lower_bound,
            state=self.state,
            conv_cache=self.conv_cache,
            records=self.records,
            read_rows=read_rows,
            counts=counts,
            conv_first=(counts - CONV_DROPPED).clamp_min(0),
            source_slots=source_blocks,
            target_slots=target_blocks,
            conv_width=self.conv_weight.shape[1],
        )


@dataclass
class ReplayGroup:
    """Layers with one block table [requests, columns], whose rows are the batch's of the current step."""

    layers: Mapping[str, ReplayLayer]
    table: Tensor


@dataclass
class _Step:
    """What is known of the step under way."""

    requests: list[str]
    windows: dict[int, str] = field(default_factory=dict)
    """Batch row -> request, of the rows that run a window and whose records are still to be counted."""
    plan: WindowPlan | None = None
    settle: tuple[list[int], Tensor, Tensor] | None = None
    """Batch rows without a window whose pending records are folded first, the record rows and the counts."""


class ReplaySteps:
    """The pending records of every request of an engine, through its steps.

    The engine calls, a step: ``begin``, ``move`` before the layers run, ``advance`` and ``settle`` in every layer,
    ``boundary`` and then ``accept`` after sampling. Nothing here blocks or fails a request; ``RuntimeError`` says that
    the calls came in an order that would lose a state.
    """

    def __init__(self, groups: Sequence[ReplayGroup], *, max_requests: int, window: int) -> None:
        """``window`` is T, one more than the drafts of a step."""
        self.groups = list(groups)
        self.rows = RecordRows(max_requests, window)
        self._by_layer = {name: group for group in self.groups for name in group.layers}
        self._pairs: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._step = _Step([])

    @property
    def requests(self) -> list[str]:
        """The requests of the step under way, in the order of the batch."""
        return self._step.requests

    def pending(self, request: str) -> int:
        """Accepted tokens of ``request`` that are records and not yet state."""
        return self._pending.get(request, 0)

    def begin(self, requests: Sequence[str], gone: Iterable[str] = ()) -> None:
        """A step of ``requests``, in the order of the batch; those ``gone`` have ended or lost their blocks.

        A request that is gone and in the batch again starts anew.
        """
        for request in gone:
            self._pending.pop(request, None)
            if (pair := self._pairs.pop(request, None)) is not None:
                self.rows.release(pair)
        self._step = _Step(list(requests))

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Before the layers run: the state of batch row r goes from column s to column t, pending records folded in.

        ``moves`` holds (r, s, t).
        """
        counts = [self._pending.pop(self._step.requests[row], 0) for row, _, _ in moves]
        self._fold([(*move, count) for move, count in zip(moves, counts, strict=True)])

    def boundary(self, cuts: Sequence[tuple[int, int, int, int]]) -> None:
        """After sampling: the state after n tokens of batch row r's window goes from column s to column t.

        ``cuts`` holds (r, s, t, n). Rows without a window are left alone: their state is where it belongs. Where s = t
        all accepted tokens are folded, and nothing stays pending.
        """
        cuts = [cut for cut in cuts if cut[0] in self._step.windows]
        self._fold(cuts)
        for row, source, target, _ in cuts:
            if source == target:
                del self._step.windows[row]

    def accept(self, counts: Sequence[int]) -> None:
        """After sampling and after ``boundary``: how many tokens of each batch row were accepted."""
        for row, request in self._step.windows.items():
            self._pending[request] = int(counts[row])
        self._step = _Step(self._step.requests)

    def settle(self, layer: str, rows: Sequence[int], blocks: Tensor) -> None:
        """A layer is about to run batch ``rows`` without windows, in ``blocks``: fold what is pending there."""
        if self._step.settle is None:
            late = [row for row in rows if self.pending(self._step.requests[row])]
            counts = [self._pending.pop(self._step.requests[row]) for row in late]
            self._step.settle = late, self._read_rows(late), torch.tensor(counts, dtype=torch.int32)
        late, read_rows, pending = self._step.settle
        if late:
            place = blocks[[list(rows).index(row) for row in late]]
            self._by_layer[layer].layers[layer].fold(read_rows, pending, place, place)

    def advance(
        self,
        layer: str,
        rows: Sequence[int],
        x: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        *,
        blocks: Tensor,
        cu_seqlens: Tensor,
        out: Tensor,
    ) -> None:
        """Run the windows of batch ``rows`` [B] through ``layer``; write ``out`` [N, H, V].

        ``x`` [N, C] before the convolution, ``raw_g`` [N, H, K], ``raw_beta`` [N, H]; ``blocks`` [B] the running
        blocks in this layer's group; ``cu_seqlens`` [B+1].
        """
        if self._step.plan is None:
            self._step.plan = self._plan(rows, blocks, cu_seqlens)
        plan = replace(self._step.plan, slots=blocks.to(torch.int32))
        at = self._by_layer[layer].layers[layer]
        advance_window(
            x,
            at.conv_weight,
            at.conv_cache,
            raw_g,
            raw_beta,
            a_log=at.a_log,
            dt_bias=at.dt_bias,
            lower_bound=at.lower_bound,
            state=at.state,
            records=at.records,
            plan=plan,
            out=out,
        )

    def _plan(self, rows: Sequence[int], blocks: Tensor, cu_seqlens: Tensor) -> WindowPlan:
        requests = [self._step.requests[row] for row in rows]
        for request in requests:
            if request not in self._pairs:
                self._pairs[request] = self.rows.acquire()
        accepted = torch.tensor([self._pending.pop(request, 0) for request in requests], dtype=torch.int32)
        pairs = torch.tensor([self._pairs[request] for request in requests])
        self._step.windows = dict(zip(rows, requests, strict=True))
        return self.rows.plan(pairs, accepted, blocks, cu_seqlens, conv_dropped=CONV_DROPPED)

    def _read_rows(self, rows: Sequence[int]) -> Tensor:
        """The record rows of batch ``rows``; row 0 for a request that has none, whose count is then 0."""
        pairs = [self._pairs.get(self._step.requests[row], 0) for row in rows]
        return self.rows.read_rows(torch.tensor(pairs, dtype=torch.long))

    def _fold(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """For every (row, source column, target column, records): fold on the way, in every layer of every group."""
        if not moves:
            return
        rows, sources, targets, counts = (list(column) for column in zip(*moves, strict=True))
        read_rows, folded = self._read_rows(rows), torch.tensor(counts, dtype=torch.int32)
        for group in self.groups:
            source, target = group.table[rows, sources], group.table[rows, targets]
            for layer in group.layers.values():
                layer.fold(read_rows, folded, source, target)
