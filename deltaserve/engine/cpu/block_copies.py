# SPDX-License-Identifier: Apache-2.0
"""Whole-block copies of the KV cache, for a prefix that ends inside a block.

A request that continues such a prefix gets its own copy of the last block. The cache groups overlay each other: a
block's bytes hold a layer's latent rows for one group and another layer's recurrent state for the next, as views that
begin at the same address. vLLM 0.32 copies one view an address, the first it meets, and a recurrent state is shorter
than a page of latent rows: the rows behind it stay zero, and the answer changes without a word. Offering the views
longest first makes the one copy cover the page. (vLLM 0.33 has the same code; this package is for 0.32 on a CPU.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor


def block_bytes(cache: Tensor, num_blocks: int) -> int:
    """Bytes that ``cache`` [blocks, ...] keeps of one of ``num_blocks`` scheduler blocks."""
    return cache.numel() // num_blocks * cache.element_size()


def longest_first(copy: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's ``copy_kv_cache_blocks_inplace`` so that it meets the longest view of every address first."""

    def copy_kv_cache_blocks_inplace(
        kv_caches: Iterable[Tensor], num_blocks: int, kv_cache_block_copies: Sequence[Any]
    ) -> None:
        ordered = sorted(kv_caches, key=lambda cache: block_bytes(cache, num_blocks), reverse=True)
        copy(ordered, num_blocks, kv_cache_block_copies)

    return copy_kv_cache_blocks_inplace
