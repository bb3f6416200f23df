# SPDX-License-Identifier: Apache-2.0
"""Where the records of speculative windows lie, and which of them a step folds.

A window of T positions leaves T records a layer, head and request: the correction u (fp32, [V]) and the key and raw
gate as the model gave them ([2 K] in the model's dtype), 1 KiB at K = V = 128 in bf16. The state itself is touched
only when records are folded.

Every request owns a pair of record rows. A step reads the pending records from one row; where it folds them into the
state, it writes its own records to the start of the other row, because several programs of one request read the old
ones while the new ones are written; where it does not fold (the ring, ``flush_at`` > 1), it appends behind them.

``flush_at`` = 1 is fold at start: whatever was accepted is folded by the next step. ``flush_at`` = L is the ring: the
state is read every step and written once L accepted tokens have gathered.

All bookkeeping that depends on how many tokens were accepted stays on the device: a step's plan is computed without a
synchronisation, once a step, and shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NULL_SLOT = 0
"""Slot 0 of a state cache is the null block: never read as state, never written."""


@dataclass(frozen=True)
class WindowPlan:
    """One step's windows; every tensor is int32 on the device of the state and has B entries unless said otherwise.

    A row whose slot is not positive is padding: zero output, nothing written.
    """

    cu_seqlens: Tensor
    """[B+1]: request b owns the tokens ``cu_seqlens[b]:cu_seqlens[b+1]``, at most ``window`` of them."""
    slots: Tensor
    """State and convolution slot."""
    read_rows: Tensor
    """Record row that holds the pending records."""
    write_rows: Tensor
    """Record row for this window's records."""
    pending: Tensor
    """Accepted records to take into account, from the start of the row."""
    write_at: Tensor
    """Position of this window's first record."""
    conv_first: Tensor
    """Column of the convolution cache at which the history of this window begins."""
    flush_at: int
    """The state is written where at least this many records are pending."""
    window: int
    """Most tokens of a window, T."""


@dataclass(frozen=True)
class WindowRecords:
    """One layer's records: ``u`` [rows, H, capacity, V] fp32, ``key_gate`` [rows, H, capacity, 2K], model dtype."""

    u: Tensor
    key_gate: Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WindowRecords:
        """Uninitialised records: what is not pending is never read."""
        return cls(
            torch.empty(rows, heads, capacity, value_dim, dtype=torch.float32, device=device),
            torch.empty(rows, heads, capacity, 2 * key_dim, dtype=dtype, device=device),
        )


class RecordRows:
    """The record rows of up to ``max_requests`` requests, and what is pending in each; shared by all layers."""

    def __init__(
        self, max_requests: int, window: int, *, flush_at: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        """Raise ``ValueError`` for a window or a threshold below one."""
        if window < 1 or flush_at < 1:
            raise ValueError(f"window={window}, flush_at={flush_at}: both must be at least 1")
        self.window = window
        self.flush_at = flush_at
        self.capacity = window + flush_at - 1
        self.rows = 2 * max_requests
        self._free = list(range(max_requests - 1, -1, -1))
        self._base = torch.zeros(max_requests, dtype=torch.int32, device=device)
        self._parity = torch.zeros(max_requests, dtype=torch.int32, device=device)

    def acquire(self) -> int:
        """A pair for a request that starts to speculate; nothing is pending in it, whatever its rows hold.

        Raise ``RuntimeError`` when every pair is taken.
        """
        if not self._free:
            raise RuntimeError(
                f"all {self.rows // 2} record pairs are in use: raise max_requests to the engine's max_num_seqs"
            )
        pair = self._free.pop()
        self._base[pair] = 0
        return pair

    def release(self, pair: int) -> None:
        """Return a pair. Its pending records are lost: flush them first if the state is still wanted."""
        if pair in self._free or not 0 <= pair < self.rows // 2:
            raise ValueError(f"record pair {pair} is not in use")
        self._free.append(pair)

    def pending(self, pairs: Tensor, accepted: Tensor) -> Tensor:
        """How many records [B] lie in the rows of ``pairs`` after ``accepted`` of the last window were kept."""
        return self._base[pairs] + accepted.to(torch.int32)

    def read_rows(self, pairs: Tensor) -> Tensor:
        """The record row [B] that holds each pair's pending records."""
        return (2 * pairs + self._parity[pairs]).to(torch.int32)

    def flushed(self, pairs: Tensor) -> None:
        """Every pending record of ``pairs`` has been folded."""
        self._base[pairs] = 0

    def plan(
        self,
        pairs: Tensor,
        accepted: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        *,
        conv_dropped: int = 0,
    ) -> WindowPlan:
        """This step's plan; afterwards the pairs stand at the state that the step leaves.

        ``pairs`` [B] int64, one request each; ``accepted`` [B] how many tokens of each request's last window were
        kept, 0 where there was none; ``slots`` [B]; ``cu_seqlens`` [B+1]. ``conv_dropped`` is 1 for a convolution
        cache of W-1+T-1 columns, which has dropped the column that only an empty acceptance would need.
        """
        accepted = accepted.to(torch.int32)
        pending = self.pending(pairs, accepted)
        read_rows = self.read_rows(pairs)
        flush = pending >= self.flush_at
        write_at = torch.where(flush, 0, pending)
        self._parity[pairs] ^= flush.to(torch.int32)
        self._base[pairs] = write_at
        return WindowPlan(
            cu_seqlens.to(torch.int32),
            slots.to(torch.int32),
            read_rows,
            self.read_rows(pairs),
            pending,
            write_at,
            (accepted - conv_dropped).clamp_min(0),
            self.flush_at,
            self.window,
        )
