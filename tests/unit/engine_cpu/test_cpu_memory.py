# SPDX-License-Identifier: Apache-2.0
"""Temporaries of the kernels stay bounded, whatever the number of prompts and their length."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deltaserve.engine.cpu import kda, mla
from deltaserve.engine.cpu.memory import keep_freed_memory

MIB = 1 << 20


class Peak(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.total = self.highest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            if not isinstance(x, Tensor):
                continue
            storage = x.untyped_storage()
            key = storage.data_ptr()
            if key in known or key in self.live:
                continue
            self.live[key] = storage.nbytes()
            self.total += storage.nbytes()
            self.highest = max(self.highest, self.total)
            weakref.finalize(storage, self.release, key)
        return result

    def release(self, key: int) -> None:
        self.total -= self.live.pop(key, 0)


def chunk_peak(prompts: int, length: int, tile_bytes: int) -> int:
    heads, dim = 2, 64
    t = prompts * length
    q, k, v, raw_g = (torch.randn(t, heads, dim) for _ in range(4))
    raw_beta, state, out = (
        torch.randn(t, heads),
        torch.zeros(prompts, heads, dim, dim),
        torch.empty(t, heads, dim),
    )
    spans = [(n * length, (n + 1) * length) for n in range(prompts)]
    gate = {"a_log": torch.zeros(heads), "dt_bias": torch.zeros(heads * dim), "lower_bound": -5.0}
    with Peak() as peak:
        kda.chunk_kda(
            q, k, v, raw_g, raw_beta, **gate, spans=spans, state=state, out=out, tile_bytes=tile_bytes
        )
    return peak.highest


def test_chunk_temporaries_do_not_grow_with_the_prompts() -> None:
    bound = MIB
    assert chunk_peak(1, 512, bound) < 1.5 * bound
    assert chunk_peak(8, 512, bound) < 1.5 * bound
    assert chunk_peak(8, 512, 1 << 40) > 4 * bound, "control: one tile for everything is far over the bound"


def test_attention_never_holds_a_score_matrix() -> None:
    heads, width, value, tokens = 2, 48, 32, 2048
    q, k, v = (torch.randn(tokens, heads, w) for w in (width, width, value))
    with Peak() as peak:
        mla.prefill_attention(q, k, v, [0, tokens], [0, tokens], scale=0.1, causal=True)
    scores = 4 * heads * tokens * tokens
    assert peak.highest < scores / 8
    with Peak() as plain:
        torch.softmax(q.transpose(0, 1) @ k.permute(1, 2, 0), -1)
    assert plain.highest >= scores


def test_decode_gathers_tile_by_tile() -> None:
    requests, block, width, rows = 8, 128, 72, 8192
    blocks = rows // block
    cache = torch.randn(blocks, block, width)
    table = torch.stack([torch.randperm(blocks) for _ in range(requests)]).int()
    q = torch.randn(requests, 2, width)
    whole = 4 * requests * rows * width
    for tile, most in ((MIB, 4 * MIB), (1 << 40, 2 * whole)):
        with Peak() as peak:
            mla.decode_attention(
                q, cache, table, [rows] * requests, scale=0.1, latent_dim=64, tile_bytes=tile
            )
        assert peak.highest < most
    assert peak.highest > whole, "control: one tile holds every row of every request"


def test_the_c_library_accepts_the_settings() -> None:
    assert keep_freed_memory()
