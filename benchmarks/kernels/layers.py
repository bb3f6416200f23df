# SPDX-License-Identifier: Apache-2.0
"""Inputs: enough layers' worth of state and tokens that a replay never finds them in the L2 cache."""

from __future__ import annotations

import torch
from torch import Tensor

from decode_worker.replay_ssm.records import RecordRows, WindowRecords

DIM = 128
"""K = V of K3 and Kimi-Linear."""

LOWER_BOUND = -5.0
ROTATION_BYTES = 400_000_000
"""State bytes between two uses of a byte: several times the L2 cache (60 MB)."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


class Layers:
    """Layers of H heads in front of B requests with windows of T positions, ``accepted`` of the last ones random.

    ``flush_at`` above one is the ring, after so many random steps that its fill is random too.
    """

    def __init__(self, heads: int, batch: int, window: int, flush_at: int = 1) -> None:
        self.heads, self.batch, self.window = heads, batch, window
        self.state_bytes = batch * heads * DIM * DIM * 4
        self.count = max(2, min(240, -(-ROTATION_BYTES // self.state_bytes)))
        channels = 3 * heads * DIM
        tokens = batch * window
        f32 = torch.float32
        n = range(self.count)
        rows = RecordRows(batch, window, flush_at=flush_at, device="cuda")
        self.state = [randn(batch + 1, heads, DIM, DIM, dtype=f32) for _ in n]
        self.records = [
            WindowRecords(
                randn(2 * batch, heads, rows.capacity, DIM, dtype=f32),
                randn(2 * batch, heads, rows.capacity, 2 * DIM),
            )
            for _ in n
        ]
        self.conv = [randn(batch + 1, 2 + window, channels).transpose(1, 2) for _ in n]
        self.x = [randn(tokens, channels) for _ in n]
        self.y = [randn(tokens, channels) for _ in n]
        self.raw_g = [randn(tokens, heads, DIM) for _ in n]
        self.raw_beta = [randn(tokens, 128)[:, :heads] for _ in n]
        self.out = [randn(tokens, heads, DIM) for _ in n]
        self.weight = (randn(4, channels) * 0.4).t()
        self.a_log = randn(heads, dtype=f32) * 0.3
        self.dt_bias = randn(heads * DIM, dtype=f32) * 0.5 - 2
        self.accepted = torch.randint(1, window + 1, (batch,), device="cuda", dtype=torch.int32)
        self.cu_seqlens = torch.arange(0, tokens + 1, window, device="cuda", dtype=torch.int32)
        self.slots = torch.arange(1, batch + 1, device="cuda", dtype=torch.int32)
        pairs = torch.arange(batch, device="cuda")
        for _ in range(0 if flush_at == 1 else 24):
            random = torch.randint(1, window + 1, (batch,), device="cuda", dtype=torch.int32)
            rows.plan(pairs, random, self.slots, self.cu_seqlens, conv_dropped=1)
        self.plan = rows.plan(pairs, self.accepted, self.slots, self.cu_seqlens, conv_dropped=1)

    def least_bytes(self) -> float:
        """What a step of one layer must move when the state is read once and written where it is due.

        State; records of the pending tokens read and of T written (u fp32, k and g bf16: 1 KiB a head); raw q|k|v, g
        and output; 3 columns of the convolution read and T+2 written.
        """
        per_head = self.batch * self.heads
        pending = float(self.plan.pending.sum()) / self.batch
        written = float((self.plan.pending >= self.plan.flush_at).sum()) / self.batch
        record = DIM * 4 + 2 * DIM * 2
        token = (3 * DIM + DIM + DIM) * 2
        columns = (3 + self.window + 2) * 3 * DIM * 2
        return (1 + written) * self.state_bytes + per_head * (
            (self.window + pending) * record + self.window * token + columns
        )
