# SPDX-License-Identifier: Apache-2.0
"""A prefix that ends inside a block is copied only after its rows have been computed.

A request whose cached prefix ends inside a block of attention rows gets its own copy of that block, made before the
step computes anything. vLLM 0.32 offers a block to others from the moment when it is scheduled. For whole blocks that
is right, because a layer writes its rows before it attends to them; a copy comes too early: it takes what the block
held before. The second of two requests that continue the same history at once, as n = 2 does, is then answered from
rows of nothing, without a word. vLLM lets such requests wait one step where the block holds a recurrent state; this
module does the same for attention rows.

    written this step   block -> position of the first token whose row this step computes (all of a block that is
                        itself a copy, or belongs to a request that starts in this step)
    must wait           the hit ends inside a block, and behind that position

Seen with vLLM 0.32.0 on a CPU. These methods of 0.33.0 are the same to the letter, so it is mended on every device.

Private names touched, of vLLM 0.32.0 and 0.33.0: `FullAttentionManager.cache_blocks`, `get_num_blocks_to_allocate`
(more blocks than there are means: not in this step), `new_step_starts`, `_has_partial_local_hit`, `req_to_blocks`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError

_WRITTEN = "deltaserve_written_this_step"
_EXPECTED = {
    "cache_blocks": ("self", "request", "num_tokens"),
    "get_num_blocks_to_allocate": (
        "self",
        "request_id",
        "num_tokens",
        "new_computed_blocks",
        "total_computed_tokens",
        "num_local_computed_tokens",
    ),
    "new_step_starts": ("self",),
    "_has_partial_local_hit": ("self", "new_computed_blocks", "num_local_computed_tokens"),
}


def note_written(manager: Any, request: Any, num_tokens: int) -> None:
    """Remember which blocks of ``request`` this step fills, up to its token ``num_tokens`` (exclusive)."""
    first = request.num_computed_tokens
    blocks = manager.req_to_blocks[request.request_id]
    written = manager.__dict__.setdefault(_WRITTEN, {})
    for block in blocks[first // manager.block_size : -(-num_tokens // manager.block_size)]:
        # Of two requests that share a block, the one that starts later decides.
        written[block.block_id] = min(first, written.get(block.block_id, first))


def must_wait(manager: Any, blocks: Sequence[Any], hit_tokens: int) -> bool:
    """Whether a hit of ``hit_tokens`` ends in a block whose rows before that point this step computes."""
    if not manager._has_partial_local_hit(blocks, hit_tokens):
        return False
    first = manager.__dict__.get(_WRITTEN, {}).get(blocks[-1].block_id)
    return first is not None and first < hit_tokens


def install(manager: Any = None) -> None:
    """Teach vLLM's cache manager of attention blocks. Raises UnsupportedVllmError when it has another shape."""
    if manager is None:
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        manager = FullAttentionManager
    if hasattr(manager.cache_blocks, "notes_written"):
        return
    for name, parameters in _EXPECTED.items():
        method = getattr(manager, name, None)
        found = tuple(inspect.signature(method).parameters) if method else ()
        if found[: len(parameters)] != parameters:
            raise UnsupportedVllmError(
                f"FullAttentionManager.{name} takes {found}, expected {parameters} first: this vLLM is neither 0.32.0 "
                "nor 0.33.0. Install the pinned version, or adapt deltaserve/engine/partial_hits.py"
            )
    cache, needed, starts = manager.cache_blocks, manager.get_num_blocks_to_allocate, manager.new_step_starts

    @functools.wraps(cache)
    def cache_blocks(self: Any, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        cache(self, request, num_tokens, *args, **kwargs)
        note_written(self, request, num_tokens)

    @functools.wraps(needed)
    def get_num_blocks_to_allocate(
        self: Any,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        if must_wait(self, new_computed_blocks, num_local_computed_tokens):
            return int(self.block_pool.num_gpu_blocks) + 1
        return int(
            needed(
                self,
                request_id,
                num_tokens,
                new_computed_blocks,
                total_computed_tokens,
                num_local_computed_tokens,
                *args,
                **kwargs,
            )
        )

    @functools.wraps(starts)
    def new_step_starts(self: Any) -> None:
        self.__dict__.pop(_WRITTEN, None)
        starts(self)

    cache_blocks.notes_written = True  # type: ignore[attr-defined]
    manager.cache_blocks = cache_blocks
    manager.get_num_blocks_to_allocate = get_num_blocks_to_allocate
    manager.new_step_starts = new_step_starts
