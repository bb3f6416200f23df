# SPDX-License-Identifier: Apache-2.0
"""Fold-at-start between an engine's steps: blocks that fill up, states that move, requests that sit out or begin anew.

The engine here is vLLM's align mode in a few lines: a state per block, copied into the next block before a window that
may reach it, kept at every block boundary. What lies in blocks and records that are not in use is NaN. On a GPU, and
under Triton's interpreter (TRITON_INTERPRET=1) with the portable kernels.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from decode_worker.replay_ssm.gpu_engine import EngineRecords, LayerTensors
from decode_worker.replay_ssm.gpu_path import KernelConfig
from decode_worker.replay_ssm.records import WindowRecords
from tests.unit.reference import kda as reference
from tests.unit.replay_ssm.windows import F64, WIDTH, distance

pytest.importorskip("triton", reason="Triton is not part of a CPU installation")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
runs = pytest.mark.skipif(not (GPU or INTERPRETED), reason="no GPU, and TRITON_INTERPRET is not 1")

DIM, BLOCK, WINDOW = 128, 12, 4
DEVICE = "cuda" if GPU else "cpu"
PORTABLE = KernelConfig(kernel="portable", warps=2, registers=None, overlap=False)


@dataclass
class Request:
    """One request, and per layer the recurrence's state and history in float64."""

    row: int
    computed: int
    column: int
    wanted: list[tuple[torch.Tensor, torch.Tensor]]


class Engine:
    """Requests with a block table each on a group of layers."""

    def __init__(
        self, requests: int, layers: int, heads: int, *, align: bool = True, flush_at: int = 1
    ) -> None:
        self.rng = torch.Generator().manual_seed(5)
        self.heads, self.align = heads, align
        columns = 6
        blocks = 1 + requests * columns
        channels = 3 * heads * DIM
        self.table = torch.arange(1, blocks, dtype=torch.int32).view(requests, columns).to(DEVICE)
        self.layers = {}
        for i in range(layers):
            records = WindowRecords.allocate(
                2 * requests,
                heads,
                DIM,
                DIM,
                WINDOW + flush_at - 1,
                dtype=torch.float32,
                device=DEVICE,
            )
            records.u.fill_(float("nan"))
            records.key_gate.fill_(float("nan"))
            self.layers[f"layer {i}"] = LayerTensors(
                conv_weight=self.randn(WIDTH, channels).t() * 0.4,
                a_log=self.randn(heads) * 0.3,
                dt_bias=self.randn(heads * DIM) * 0.5 - 2,
                lower_bound=-5.0,
                state=torch.full((blocks, heads, DIM, DIM), float("nan"), device=DEVICE),
                conv=torch.full((blocks, WINDOW + 2, channels), float("nan"), device=DEVICE).transpose(1, 2),
                records=records,
            )
        self.group = EngineRecords(self.layers, WINDOW, flush_at=flush_at, config=None if GPU else PORTABLE)
        self.requests: dict[int, Request] = {}
        self.worst_out = 0.0
        self.boundaries = 0

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(DEVICE)

    def begin(self, row: int, computed: int) -> None:
        """A request whose prompt of ``computed`` tokens has been computed (its state is random)."""
        column = (computed - 1) // BLOCK if self.align else 0
        slot = self.table[row, column]
        wanted = []
        for layer in self.layers.values():
            layer.state[slot] = self.randn(self.heads, DIM, DIM) * 0.3
            layer.conv[slot] = float("nan")
            layer.conv[slot, :, : WIDTH - 1] = self.randn(3 * self.heads * DIM, WIDTH - 1)
            wanted.append(
                (layer.state[slot].cpu().to(F64), layer.conv[slot, :, : WIDTH - 1].t().cpu().to(F64))
            )
        self.requests[row] = Request(row, computed, column, wanted)
        self.group.forget(row)

    def _move(self, request: Request, column: int) -> None:
        source, target = self.table[request.row, request.column], self.table[request.row, column]
        for layer in self.layers.values():
            layer.state[target] = layer.state[source].clone()
            layer.conv[target] = float("nan")
            layer.conv[target, :, : WIDTH - 1] = layer.conv[source, :, : WIDTH - 1].clone()
        request.column = column

    def step(
        self, accept: dict[int, int], lengths: dict[int, int], *, strangers: int = 0, flush_now: bool = False
    ) -> None:
        """One window of each request in ``lengths``, behind ``strangers`` batch rows that have none."""
        batch = [self.requests[row] for row in lengths]
        windows = len(batch)
        slots = []
        for request in batch:
            column = (request.computed + lengths[request.row] - 1) // BLOCK if self.align else 0
            if column != request.column:
                self._move(request, column)
            slots.append(int(self.table[request.row, column]))
        cu = torch.tensor([0, *lengths.values()]).cumsum(0).to(DEVICE, torch.int32)

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        indices = tensor(list(range(strangers, strangers + windows))) if strangers else None
        self.group.plan(
            torch.tensor([99] * strangers + list(lengths), device=DEVICE),
            tensor(slots)[:, None].repeat(1, 2)[:, 0],
            cu,
            windows=windows,
            request_indices=indices,
            flush_now=flush_now,
        )
        tokens = int(cu[-1])
        after: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in batch]
        for number, (name, layer) in enumerate(self.layers.items()):
            x = self.randn(tokens, 3 * self.heads * DIM)
            g, beta = self.randn(1, tokens, self.heads, DIM), self.randn(1, tokens, self.heads)
            out = torch.full((1, tokens, self.heads, DIM), float("nan"), device=DEVICE)
            # As many rows as a captured graph would have: those without a window are padding.
            self.group.advance(name, x, g, beta, out, self.group.max_requests)
            for i, request in enumerate(batch):
                part = slice(int(cu[i]), int(cu[i + 1]))
                state, history = request.wanted[number]
                y, _ = reference.conv(x[part].cpu(), layer.conv_weight.cpu(), history)
                o, states = reference.kda(
                    *y.view(-1, 3, self.heads, DIM).unbind(1),
                    g[0, part].cpu(),
                    beta[0, part].cpu(),
                    layer.a_log.cpu(),
                    layer.dt_bias.cpu(),
                    layer.lower_bound,
                    state,
                )
                self.worst_out = max(self.worst_out, distance(out[0, part], o))
                rows = torch.cat([history, x[part].cpu().to(F64)])
                n = accept[request.row]
                request.wanted[number] = (states[n - 1], rows[n : n + WIDTH - 1])
                m = BLOCK - request.computed % BLOCK
                after[i].append((states[min(m, n) - 1], rows[min(m, n) :][: WIDTH - 1]))
        computed = [0] * strangers + [r.computed for r in batch]
        options = {
            "block_table": torch.cat([self.table[:1]] * strangers + [self.table[r.row][None] for r in batch]),
            "num_computed_tokens": tensor(computed),
            "mamba_block_size": BLOCK,
        }
        self.group.commit(
            tensor([0] * strangers + [accept[r.row] for r in batch]),
            tensor(slots),
            cu,
            request_indices=indices,
            **(options if self.align else {}),  # type: ignore[arg-type]
        )
        for i, request in enumerate(batch):
            before, request.computed = request.computed, request.computed + accept[request.row]
            if not self.align:
                continue
            request.column = (request.computed - 1) // BLOCK
            if request.computed // BLOCK > before // BLOCK:
                self.boundaries += 1
                slot = self.table[request.row, request.computed // BLOCK - 1]
                assert self.error(slot, after[i]) < 1e-6, "the state that the prefix cache keeps"

    def error(self, slot: torch.Tensor, wanted: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Largest relative error of a slot's state; infinite when the convolution's history differs at all."""
        worst = 0.0
        for layer, (state, history) in zip(self.layers.values(), wanted, strict=True):
            worst = max(worst, distance(layer.state[slot], state))
            if not torch.equal(layer.conv[slot, :, : WIDTH - 1].t().cpu().to(F64), history):
                return float("inf")
        return worst

    def worst(self) -> float:
        """Error of every request's running state."""
        return max(self.error(self.table[r.row, r.column], r.wanted) for r in self.requests.values())


@runs
@pytest.mark.parametrize("align", [True, False], ids=["align", "plain"])
@pytest.mark.parametrize("flush_at", [1, 5], ids=["start", "ring"])
def test_steps_of_an_engine(align: bool, flush_at: int) -> None:
    engine = Engine(3, 2, 3 if GPU else 1, align=align, flush_at=flush_at)
    engine.group.warm_up(align=align)
    for layer in engine.layers.values():
        for held in (layer.state, layer.conv, layer.records.u, layer.records.key_gate):
            assert held.isnan().all(), "a warm-up touches nothing"
    engine.begin(0, 5)
    engine.begin(2, 11)
    engine.step({0: 2, 2: 1}, {0: 4, 2: 4})
    engine.begin(1, 9)
    engine.step({1: 3, 2: 4, 0: 1}, {1: 3, 2: 4, 0: 1}, strangers=0 if INTERPRETED else 2)
    rounds = 0 if INTERPRETED else 12
    for _ in range(rounds):
        present = [r for r in range(3) if torch.rand(1, generator=engine.rng) < 0.8] or [1]
        lengths = {r: int(torch.randint(1, WINDOW + 1, (1,), generator=engine.rng)) for r in present}
        accept = {r: int(torch.randint(1, n + 1, (1,), generator=engine.rng)) for r, n in lengths.items()}
        engine.step(accept, lengths, strangers=1)
    assert engine.worst() > 1e-3, "records are pending: the control for what follows"
    engine.step({0: 1, 1: 1, 2: 2}, {0: 2, 1: 1, 2: 4}, flush_now=True)
    assert engine.worst() < 1e-6
    assert engine.worst_out < 1e-5
    assert not align or engine.boundaries >= 1
    for layer in engine.layers.values():
        assert layer.state[0].isnan().all()
        assert layer.conv[0].isnan().all()


@runs
def test_a_request_that_begins_in_a_row_with_pending_records_has_none() -> None:
    engine = Engine(1, 1, 1, align=False)
    engine.begin(0, 3)
    engine.step({0: 2}, {0: 4})
    engine.begin(0, 5)
    engine.step({0: 1}, {0: 2}, flush_now=True)
    assert engine.worst() < 1e-6
    engine.begin(0, 5)
    engine.group._pending += 1
    engine.step({0: 1}, {0: 2}, flush_now=True)
    assert not engine.worst() < 1e-6, "the control: its predecessor's records"


@runs
def test_a_ring_between_an_engines_steps() -> None:
    """A state stays as it is until 5 tokens have gathered, then the next window folds them; a request that begins in
    the same row meets no record of its predecessor."""
    engine = Engine(1, 1, 1, align=False, flush_at=5)
    engine.begin(0, 3)
    state = engine.layers["layer 0"].state
    before = state.clone()
    for n in (2, 2, 4):
        engine.step({0: n}, {0: 4})
        assert torch.equal(state[1], before[1])
    engine.step({0: 2}, {0: 2})
    assert not torch.equal(state[1], before[1])
    folded = state.clone()
    engine.step({0: 1}, {0: 4})
    assert torch.equal(state[1], folded[1])
    engine.begin(0, 5)
    engine.step({0: 1}, {0: 2})
    engine.step({0: 1}, {0: 2}, flush_now=True)
    assert engine.worst_out < 1e-5
    assert engine.worst() < 1e-6
    engine.begin(0, 5)
    engine.group._base += 1
    engine.step({0: 1}, {0: 2}, flush_now=True)
    assert not engine.worst() < 1e-6, "the control: a record of the predecessor"


def test_layers_that_differ_and_short_blocks_are_refused() -> None:
    engine = Engine(1, 2, 1)
    other = dict(engine.layers)
    first = other["layer 0"]
    other["layer 1"] = LayerTensors(**{**first.__dict__, "lower_bound": None})
    with pytest.raises(ValueError, match="layer 1 is laid out as"):
        EngineRecords(other, WINDOW)
    with pytest.raises(ValueError, match="at least one"):
        EngineRecords({}, WINDOW)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        EngineRecords(engine.layers, 9)
    with pytest.raises(ValueError, match="needs 5"):
        EngineRecords(engine.layers, WINDOW - 1)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="must hold a window"):
        engine.group.commit(one, one, one, block_table=one[None], num_computed_tokens=one, mamba_block_size=2)
    with pytest.raises(ValueError, match="made for 1 requests"):
        engine.group.plan(one, one, one, windows=2)
