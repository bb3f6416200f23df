# SPDX-License-Identifier: Apache-2.0
"""A paged engine in small: requests that speculate over block tables, as vLLM's worker runs them in align mode.

What vLLM decides is decided here in its way: the column of a step, the move to it, the state copy at a boundary, with
the CPU engine's own forms of those two kernels. Every request has the recurrence in float64 beside it. Blocks that are
freed and pairs that are given back are poisoned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode_worker.replay_ssm.engine_steps import ReplayGroup, ReplayLayer, ReplaySteps
from decode_worker.replay_ssm.records import WindowRecords
from deltaserve.engine.cpu import replay, state_copies
from tests.unit.reference import kda as reference
from tests.unit.replay_ssm.windows import F64, WIDTH, distance

BLOCK, WINDOW, HEADS, DIM, COLUMNS, ROWS, BLOCKS = 8, 4, 2, 16, 40, 4, 64
CHANNELS = 3 * HEADS * DIM
NONE = torch.zeros(1, dtype=torch.int64)
"""Addresses of the states, which folding does not look at."""


def up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Inputs:
    """What one layer sees of one token: before the convolution, raw gate, raw beta."""

    x: Tensor
    g: Tensor
    beta: Tensor


@dataclass
class Request:
    """A request's accepted tokens, and for every layer the states after each of them."""

    blocks: list[list[int]]
    """Of every group, the block of every column; 0 where there is none."""
    tokens: list[dict[str, Inputs]] = field(default_factory=list)
    states: dict[str, list[Tensor]] = field(default_factory=dict)
    computed: int = 0
    column: int | None = None
    """The running column, as vLLM remembers it between two steps; None after a resume."""
    accepted: int = 1
    """What vLLM's batch says of the last step."""


@dataclass
class Work:
    """One request's part of a step: a window of ``length`` of which ``accept`` tokens count, or a prompt chunk."""

    request: str
    length: int
    accept: int | None = None


class PagedEngine:
    """Two groups, three layers."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        names = [["a", "b"], ["c"]]
        self.group_of = {name: g for g, group in enumerate(names) for name in group}
        self.layers = {name: self._layer() for name in self.group_of}
        self.groups = [
            ReplayGroup({n: self.layers[n] for n in group}, torch.zeros(ROWS, COLUMNS, dtype=torch.int32))
            for group in names
        ]
        self.steps = ReplaySteps(self.groups, max_requests=ROWS, window=WINDOW)
        self.free = list(range(BLOCKS - 1, 0, -1))
        self.requests: dict[str, Request] = {}
        self.batch: list[str] = []
        self.gone: set[str] = set()
        self.named: dict[tuple[str, int], list[int]] = {}
        """(request, boundary) -> the block of every group that the prefix cache names."""
        self.worst_out, self.worst_state, self.worst_history = 0.0, 0.0, 0.0
        self.windows = 0

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng)

    def _layer(self) -> ReplayLayer:
        records = WindowRecords.allocate(2 * ROWS, HEADS, DIM, DIM, WINDOW, dtype=torch.float32, device="cpu")
        records.u.fill_(float("nan"))
        records.key_gate.fill_(float("nan"))
        return ReplayLayer(
            torch.full((BLOCKS, HEADS, DIM, DIM), float("nan")),
            torch.full((BLOCKS, WIDTH - 1 + WINDOW - 1, CHANNELS), float("nan")).transpose(1, 2),
            self._randn(CHANNELS, WIDTH) * 0.4,
            self._randn(HEADS) * 0.3,
            self._randn(HEADS * DIM) * 0.5 - 2,
            -5.0,
            records,
        )

    def add(self, request: str) -> None:
        self.requests[request] = Request([[0] * COLUMNS for _ in self.groups])

    def tokens(self, n: int) -> list[dict[str, Inputs]]:
        return [
            {
                name: Inputs(self._randn(CHANNELS), self._randn(HEADS, DIM), self._randn(HEADS))
                for name in self.layers
            }
            for _ in range(n)
        ]

    def expected_state(self, request: str, layer: str, computed: int) -> tuple[Tensor, Tensor]:
        """State and convolution history [W-1, C] after ``computed`` tokens."""
        r = self.requests[request]
        rows = [torch.zeros(CHANNELS)] * (WIDTH - 1) + [t[layer].x for t in r.tokens[:computed]]
        return r.states[layer][computed - 1], torch.stack(rows[len(rows) - WIDTH + 1 :])

    def _reference(self, r: Request, new: Sequence[dict[str, Inputs]], name: str) -> tuple[Tensor, Tensor]:
        """Outputs and states of ``new`` tokens after the computed ones."""
        layer = self.layers[name]
        rows = [torch.zeros(CHANNELS)] * (WIDTH - 1) + [t[name].x for t in r.tokens[: r.computed]]
        x = torch.stack([t[name].x for t in new])
        y, _ = reference.conv(x, layer.conv_weight, torch.stack(rows[len(rows) - WIDTH + 1 :]))
        q, k, v = y.view(-1, 3, HEADS, DIM).unbind(1)
        start = r.states[name][r.computed - 1] if r.computed else torch.zeros(HEADS, DIM, DIM, dtype=F64)
        g, beta = (torch.stack([getattr(t[name], what) for t in new]) for what in ("g", "beta"))
        return reference.kda(q, k, v, g, beta, layer.a_log, layer.dt_bias, layer.lower_bound, start)

    def leave(self, request: str, *, keep: bool = False) -> None:
        """Preempt (``keep``) or end a request between two steps: its unnamed blocks are free at once."""
        r = self.requests[request]
        named = [{blocks[g] for blocks in self.named.values()} for g in range(len(self.groups))]
        for g in range(len(self.groups)):
            for block in {b for b in r.blocks[g] if b} - named[g]:
                self._release(block)
        r.blocks, r.column, r.accepted = [[0] * COLUMNS for _ in self.groups], None, 1
        self.gone.add(request)
        if not keep:
            del self.requests[request]

    def _release(self, block: int) -> None:
        for layer in self.layers.values():
            layer.state[block] = float("nan")
            layer.conv_cache[block] = float("nan")
        self.free.append(block)

    def resume(self, request: str, boundary: int) -> None:
        """Continue from a named boundary; tokens after it are a prompt once more."""
        r = self.requests[request]
        r.computed = boundary
        if boundary:
            for g, block in enumerate(self.named[request, boundary]):
                r.blocks[g][boundary // BLOCK - 1] = block

    def take_over(self, request: str, length: int) -> None:
        """A request whose state after ``length`` tokens was loaded into its block from elsewhere."""
        self.add(request)
        r = self.requests[request]
        new = self.tokens(length)
        for name in self.layers:
            _, states = self._reference(r, new, name)
            r.states[name] = list(states)
        r.tokens, r.computed = new, length
        column = up(length, BLOCK) - 1
        for g in range(len(self.groups)):
            r.blocks[g][column] = self.free.pop()
        for name, layer in self.layers.items():
            block = r.blocks[self.group_of[name]][column]
            state, history = self.expected_state(request, name, length)
            layer.state[block] = state.float()
            layer.conv_cache[block, :, : WIDTH - 1] = history.t()

    def step(self, work: Sequence[Work]) -> None:
        """One step of the engine; checks outputs and every boundary that it names."""
        self._poison_released_pairs()
        batch = [w.request for w in work]
        for w in work:
            r = self.requests[w.request]
            if w.request not in self.batch:
                r.accepted = 1  # vLLM's batch starts a row anew, also for a request that sat out a step
        self.batch = batch
        self.steps.begin(batch, self.gone)
        self.gone = set()
        replay.activate(self.steps)
        try:
            self._run(work)
        finally:
            replay.activate(None)

    def _run(self, work: Sequence[Work]) -> None:
        columns, sources, biases = [], [], []
        for row, w in enumerate(work):
            r = self.requests[w.request]
            column = up(r.computed + w.length, BLOCK) - 1
            source = (r.computed - 1) // BLOCK if r.column is None else r.column
            for g, group in enumerate(self.groups):
                r.blocks[g][column] = r.blocks[g][column] or self.free.pop()
                group.table[row] = torch.tensor(r.blocks[g], dtype=torch.int32)
            columns.append(column)
            sources.append(source)
            biases.append(r.accepted - 1)
            r.column = column
        pages = (NONE, COLUMNS, *[NONE] * 8)
        state_copies.precopy(
            torch.tensor(columns),
            torch.tensor(sources),
            torch.tensor(biases),
            *pages,
            None,
            len(work),
            1024,
            False,
            False,
        )
        new = [
            r.tokens[r.computed : r.computed + w.length]
            if (r := self.requests[w.request]).computed < len(r.tokens)
            else self.tokens(w.length)
            for w in work
        ]
        for name in self.layers:
            self._layer_step(name, work, new, columns)
        accepted = [w.length if w.accept is None else w.accept for w in work]
        counts = [1 if w.accept is None else w.accept for w in work]
        computed = [self.requests[w.request].computed for w in work]
        for w, tokens, n in zip(work, new, accepted, strict=True):
            r = self.requests[w.request]
            for name in self.layers:
                _, states = self._reference(r, tokens[:n], name)
                r.states[name] = r.states.get(name, [])[: r.computed] + list(states)
            r.tokens = r.tokens[: r.computed] + list(tokens[:n])
            r.computed += n
        out = torch.tensor(counts)
        state_copies.postprocess(
            torch.tensor(counts),
            torch.tensor(columns),
            torch.tensor([w.length for w in work]),
            torch.tensor(computed),
            torch.tensor([0 if w.accept is None else w.length - 1 for w in work]),
            *pages,
            out,
            None,
            len(work),
            BLOCK,
            1024,
            False,
        )
        self.steps.accept(counts)
        for row, w in enumerate(work):
            self.requests[w.request].accepted = int(out[row])
            self._name(w.request, computed[row])

    def _layer_step(
        self,
        name: str,
        work: Sequence[Work],
        new: Sequence[Sequence[dict[str, Inputs]]],
        columns: Sequence[int],
    ) -> None:
        blocks = torch.tensor(
            [
                self.requests[w.request].blocks[self.group_of[name]][c]
                for w, c in zip(work, columns, strict=True)
            ]
        )
        others = [row for row, w in enumerate(work) if w.accept is None]
        self.steps.settle(name, others, blocks[others])
        for row in others:
            self._prompt(name, self.requests[work[row].request], new[row], int(blocks[row]))
        rows = [row for row, w in enumerate(work) if w.accept is not None]
        if not rows:
            return
        tokens = [t[name] for row in rows for t in new[row]]
        lengths = [work[row].length for row in rows]
        out = torch.full((len(tokens), HEADS, DIM), float("nan"))
        self.steps.advance(
            name,
            rows,
            torch.stack([t.x for t in tokens]),
            torch.stack([t.g for t in tokens]),
            torch.stack([t.beta for t in tokens]),
            blocks=blocks[rows],
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
            out=out,
        )
        for row, found in zip(rows, out.split(lengths), strict=True):
            wanted, _ = self._reference(self.requests[work[row].request], new[row], name)
            self.worst_out = max(self.worst_out, distance(found, wanted))
            self.windows += 1

    def _prompt(self, name: str, r: Request, new: Sequence[dict[str, Inputs]], block: int) -> None:
        """What a prompt chunk's kernel does: continue from the block, and write the block."""
        layer = self.layers[name]
        if r.computed:
            self._compare(name, block, r, r.computed)
        _, states = self._reference(r, new, name)
        rows = [torch.zeros(CHANNELS)] * (WIDTH - 1) + [t[name].x for t in [*r.tokens[: r.computed], *new]]
        layer.state[block] = states[-1].float()
        layer.conv_cache[block, :, : WIDTH - 1] = torch.stack(rows[len(rows) - WIDTH + 1 :]).t()

    def _compare(self, name: str, block: int, r: Request, computed: int) -> None:
        layer = self.layers[name]
        rows = [torch.zeros(CHANNELS)] * (WIDTH - 1) + [t[name].x for t in r.tokens[:computed]]
        history = torch.stack(rows[len(rows) - WIDTH + 1 :])
        self.worst_state = max(self.worst_state, distance(layer.state[block], r.states[name][computed - 1]))
        found = layer.conv_cache[block, :, : WIDTH - 1].t()
        self.worst_history = max(self.worst_history, distance(found, history))

    def _name(self, request: str, before: int) -> None:
        """Check and name the boundary that the step crossed; blocks before it are no longer the request's."""
        r = self.requests[request]
        boundary = r.computed // BLOCK * BLOCK
        if boundary <= before or boundary == 0:
            return
        column = boundary // BLOCK - 1
        for name in self.layers:
            self._compare(name, r.blocks[self.group_of[name]][column], r, boundary)
        self.named[request, boundary] = [blocks[column] for blocks in r.blocks]
        for g in range(len(self.groups)):
            for old in range(column):
                if r.blocks[g][old] and (request, (old + 1) * BLOCK) in self.named:
                    self._release(r.blocks[g][old])
                    r.blocks[g][old] = 0
        for old in range(column):
            self.named.pop((request, (old + 1) * BLOCK), None)

    def _poison_released_pairs(self) -> None:
        for request in self.gone:
            if (pair := self.steps._pairs.get(request)) is not None:
                for layer in self.layers.values():
                    layer.records.u[2 * pair : 2 * pair + 2] = float("nan")
                    layer.records.key_gate[2 * pair : 2 * pair + 2] = float("inf")

    def settle_all(self) -> None:
        """Compare the running state of every request, by a last prompt chunk of one token."""
        for request in list(self.requests):
            self.step([Work(request, 1)])
