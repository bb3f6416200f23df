# SPDX-License-Identifier: Apache-2.0
"""Whole transfers of one handoff between paged caches and pinned memory, several ways, alone and beside decode steps.

The handoff is a TP8 rank's of Kimi K3 with a prompt of 8,192 tokens: 56 MB of KDA state and an eighth of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks.copies.caches import Caches, geometry
from benchmarks.copies.timing import DecodeLoad, Row, beside, wall
from statestore.checksum import finish
from statestore.gpu.launch import ShardKernels
from statestore.reshard import head_bytes, row_bytes

HEADS, KDA_LAYERS, MLA_LAYERS, TOKENS = 12, 69, 24, 8192
RANKS = 8


class Handoff:
    """One rank's share, in caches on the device and in pinned memory."""

    def __init__(self) -> None:
        g = self.geometry = geometry(HEADS, KDA_LAYERS, MLA_LAYERS)
        self.caches = Caches.random(g, 2, TOKENS, "cuda")
        self.kernels = ShardKernels(g, self.caches.states, self.caches.rows)
        self.tables = self.caches.tables(np.arange(0, TOKENS, RANKS))
        self.heads = torch.empty(HEADS * head_bytes(g) // 8, dtype=torch.int64, pin_memory=True)
        self.rows = torch.empty(TOKENS // RANKS * row_bytes(g) // 8, dtype=torch.int64, pin_memory=True)
        self.nbytes = 8 * (self.heads.numel() + self.rows.numel())

    def out(self) -> list[str]:
        """Gather on the device with digests, then one copy each."""
        digests = []
        for host, gather, size in (
            (self.heads, lambda to: self.kernels.gather_heads(([1],), 0, to), head_bytes(self.geometry)),
            (self.rows, lambda to: self.kernels.gather_rows(self.tables, to), self.rows.numel() * 8),
        ):
            staging = torch.empty(host.numel(), dtype=torch.int64, device="cuda")
            found = gather(staging)
            host.copy_(staging, non_blocking=True)
            digests += [finish(total, size) for total in found.sums]
        torch.cuda.current_stream().synchronize()
        return digests

    def straight_out(self) -> None:
        """The kernels write pinned memory themselves."""
        self.kernels.gather_heads(([1],), 0, self.heads)
        self.kernels.gather_rows(self.tables, self.rows)

    def back(self) -> None:
        """One copy each to the device, a check with digests, then scatter."""
        heads = self.heads.to("cuda", non_blocking=True)
        rows = self.rows.to("cuda", non_blocking=True)
        self.kernels.check_heads(heads)
        self.kernels.check_rows(rows)
        self.kernels.scatter_heads(([1],), 0, heads)
        self.kernels.scatter_rows(self.tables, rows)
        torch.cuda.current_stream().synchronize()

    def straight_back(self) -> None:
        """The kernels read pinned memory themselves; nothing is checked."""
        self.kernels.scatter_heads(([1],), 0, self.heads)
        self.kernels.scatter_rows(self.tables, self.rows)
        torch.cuda.current_stream().synchronize()

    def plain(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """The same bytes layer by layer, with torch's copies and without digests."""
        from statestore.connector.device_copies import DeviceCopies

        copies = DeviceCopies(self.geometry, self.caches.states, self.caches.rows)
        heads, rows = (host.view(torch.uint8).numpy() for host in (self.heads, self.rows))

        def out() -> None:
            copies.gather_heads(([1],), slice(0, HEADS), range(KDA_LAYERS), heads)
            copies.gather_rows(self.tables, rows)

        def back() -> None:
            copies.scatter_heads(([1],), slice(0, HEADS), heads)
            copies.scatter_rows(self.tables, rows)

        return out, back


def transfers() -> Iterator[Row]:
    """Each way, bytes counted once."""
    handoff = Handoff()
    plain_out, plain_back = handoff.plain()
    ways: list[tuple[str, Callable[[], object]]] = [
        ("out: kernels, one copy", handoff.out),
        ("out: kernels to the host", handoff.straight_out),
        ("out: torch, no digest", plain_out),
        ("back: copy, check, kernels", handoff.back),
        ("back: kernels from the host", handoff.straight_back),
        ("back: torch, no check", plain_back),
    ]
    for what, call in ways:
        yield Row(what, wall(call), handoff.nbytes)


def decode() -> Iterator[tuple[str, tuple[float, float, float]]]:
    """What transfers without pause cost decode steps."""
    handoff, load = Handoff(), DecodeLoad()
    plain_out, plain_back = handoff.plain()
    ways: list[tuple[str, Callable[[], object]]] = [
        ("nothing", lambda: torch.cuda._sleep(1000)),
        ("out: kernels, one copy", handoff.out),
        ("out: torch, no digest", plain_out),
        ("back: copy, check, kernels", handoff.back),
        ("back: torch, no check", plain_back),
    ]
    for what, call in ways:
        yield what, beside(load, call)
