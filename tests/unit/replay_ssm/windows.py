# SPDX-License-Identifier: Apache-2.0
"""Drives speculative windows through an implementation and, beside it, through the recurrence in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode_worker.replay_ssm.records import RecordRows, WindowPlan, WindowRecords
from tests.unit.reference import kda as reference

F64 = torch.float64
WIDTH = 4


def distance(a: Tensor, b: Tensor) -> float:
    """Relative error in the 2-norm; NaN counts as infinite."""
    a, b = a.cpu(), b.cpu()
    error = ((a.to(F64) - b.to(F64)).norm() / b.to(F64).norm().clamp_min(1e-30)).item()
    return float("inf") if error != error else error


@dataclass
class Expected:
    """What one request should be, token by token from the start."""

    state: Tensor
    history: Tensor


@dataclass
class Speculation:
    """A layer's tensors, requests that speculate on it, and the recurrence they are compared with.

    Slot 0 is poisoned, and so are the records. ``advance`` is the implementation, called like
    ``torch_path.advance_window``.
    """

    advance: Callable[..., None]
    requests: int = 4
    window: int = 8
    heads: int = 2
    dim: int = 16
    flush_at: int = 1
    lower_bound: float | None = -5.0
    dropped: int = 0
    seed: int = 0
    device: str = "cpu"
    slots: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = torch.Generator().manual_seed(self.seed)
        self.slots = self.slots or list(range(1, self.requests + 1))
        blocks = max(self.slots) + 2
        channels = 3 * self.heads * self.dim
        columns = WIDTH - 1 + self.window - self.dropped
        self.a_log = self.randn(self.heads) * 0.3
        self.dt_bias = self.randn(self.heads * self.dim) * 0.5 - (2 if self.lower_bound else 3)
        self.weight = self.randn(WIDTH, channels).t() * 0.4
        self.state = self.randn(blocks, self.heads, self.dim, self.dim) * 0.3
        self.conv = self.randn(blocks, columns, channels).transpose(1, 2)
        self.state[0] = float("nan")
        self.conv[0] = float("nan")
        self.rows = RecordRows(self.requests, self.window, flush_at=self.flush_at, device=self.device)
        self.records = WindowRecords.allocate(
            self.rows.rows,
            self.heads,
            self.dim,
            self.dim,
            self.rows.capacity,
            dtype=torch.float32,
            device=self.device,
        )
        self.records.u.fill_(float("nan"))
        self.records.key_gate.fill_(float("nan"))
        self.pairs = self.tensor([self.rows.acquire() for _ in range(self.requests)])
        self.accepted = torch.zeros(self.requests, dtype=torch.int32, device=self.device)
        self.expected = [
            Expected(self.state[s].cpu().to(F64), self.conv[s, :, : WIDTH - 1].cpu().t().to(F64))
            for s in self.slots
        ]
        self.plan: WindowPlan | None = None
        self.worst_out = 0.0
        self.windows = 0

    def tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.device)

    @property
    def gate(self) -> dict[str, object]:
        return {"a_log": self.a_log, "dt_bias": self.dt_bias, "lower_bound": self.lower_bound}

    def step(
        self, accept: list[int], lengths: list[int] | None = None, raw_g: float | None = None
    ) -> list[Tensor]:
        """One window a request; then request b keeps ``accept[b]`` of its positions. Return the outputs."""
        lengths = lengths or [self.window] * self.requests
        cu = torch.tensor([0, *lengths]).cumsum(0).tolist()
        tokens = cu[-1]
        x = self.randn(tokens, 3 * self.heads * self.dim)
        gates = self.randn(tokens, self.heads, self.dim)
        if raw_g is not None:
            gates = torch.full_like(gates, raw_g)
        beta = self.randn(tokens, self.heads)
        out = torch.full((tokens, self.heads, self.dim), float("nan"), device=self.device)
        self.plan = self.rows.plan(
            self.pairs, self.accepted, self.tensor(self.slots), self.tensor(cu), conv_dropped=self.dropped
        )
        self.advance(
            x,
            self.weight,
            self.conv,
            gates,
            beta,
            **self.gate,
            state=self.state,
            records=self.records,
            plan=self.plan,
            out=out,
        )
        outputs = []
        for b, wanted in enumerate(self.expected):
            lo, hi = cu[b], cu[b + 1]
            outputs.append(out[lo:hi])
            if self.slots[b] <= 0:
                continue
            y, _ = reference.conv(x[lo:hi].cpu(), self.weight.cpu(), wanted.history)
            q, k, v = y.view(-1, 3, self.heads, self.dim).unbind(1)
            o, states = reference.kda(
                q,
                k,
                v,
                gates[lo:hi].cpu(),
                beta[lo:hi].cpu(),
                self.a_log.cpu(),
                self.dt_bias.cpu(),
                self.lower_bound,
                wanted.state,
            )
            self.worst_out = max(self.worst_out, distance(out[lo:hi], o))
            self.windows += 1
            n = accept[b]
            if n:
                wanted.state = states[n - 1]
            wanted.history = torch.cat([wanted.history, x[lo:hi].cpu().to(F64)])[n : n + WIDTH - 1]
        self.accepted = self.tensor(accept)
        return outputs

    def flush(self, flush: Callable[..., None], targets: list[int] | None = None) -> None:
        """Fold everything that was accepted; afterwards slot and convolution hold what the recurrence says."""
        slots = self.tensor(self.slots)
        flush(
            **self.gate,
            state=self.state,
            conv_cache=self.conv,
            records=self.records,
            read_rows=self.rows.read_rows(self.pairs),
            counts=self.rows.pending(self.pairs, self.accepted),
            conv_first=(self.accepted - self.dropped).clamp_min(0),
            source_slots=slots,
            target_slots=slots if targets is None else self.tensor(targets),
            conv_width=WIDTH,
        )
        self.rows.flushed(self.pairs)
        self.accepted = torch.zeros_like(self.accepted)
        if targets is not None:
            self.slots = targets

    def worst_state(self) -> float:
        """Largest relative error of a request's state in its slot; meaningful after a flush."""
        return max(
            distance(self.state[s], e.state) for s, e in zip(self.slots, self.expected, strict=True) if s > 0
        )

    def worst_history(self) -> float:
        return max(
            distance(self.conv[s, :, : WIDTH - 1].t(), e.history)
            for s, e in zip(self.slots, self.expected, strict=True)
            if s > 0
        )

    def random_accept(self) -> list[int]:
        return torch.randint(0, self.window + 1, (self.requests,), generator=self.rng).tolist()
