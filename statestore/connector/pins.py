# SPDX-License-Identifier: Apache-2.0
"""Pins: cache blocks that ranks are reading for a publish, kept from reuse until every rank has reported.

A pinned block has one more reference in vLLM's block pool. So it outlives its request (finished, aborted, preempted)
and the recycling of KDA states (align mode gives a state's block back two steps later); the prefix cache may share it
meanwhile, because nobody writes into a block that has been filled.

Read from vLLM 0.32.0: `KVCacheManager.get_blocks(request_id).blocks`, one list of `KVCacheBlock` a cache group, and
`KVCacheManager.block_pool` with `touch` and `free_blocks`. `bind` refuses, at start, a vLLM without them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from deltaserve.telemetry import HANDOFF


class Pins:
    """The pinned blocks of every link that is out, by the link's name; used on the engine thread only."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._blocks: dict[Hashable, list[Any]] = {}

    def __bool__(self) -> bool:
        """Whether anything is pinned."""
        return bool(self._blocks)

    def bind(self, cache_manager: Any) -> None:
        """Take vLLM's cache manager. Raises RuntimeError when it does not look as described above."""
        pool = getattr(cache_manager, "block_pool", None)
        wanted = [(cache_manager, "get_blocks"), (pool, "touch"), (pool, "free_blocks")]
        missing = [name for owner, name in wanted if not callable(getattr(owner, name, None))]
        if missing:
            raise RuntimeError(
                f"vLLM's KV cache manager has no {', '.join(missing)}; install vLLM 0.32.0 or 0.33.0, for which "
                "this connector was written"
            )
        self._manager = cache_manager

    def pin(self, name: Hashable, request_id: str, spans: list[tuple[int, int]]) -> None:
        """Pin blocks [first, last] of the request in every group, as `spans` says. The null block is never pinned."""
        groups = self._manager.get_blocks(request_id).blocks
        blocks = [
            block
            for group, (first, last) in zip(groups, spans, strict=True)
            for block in group[first : last + 1]
            if not block.is_null
        ]
        self._manager.block_pool.touch(blocks)
        self._blocks[name] = blocks
        HANDOFF.pinned(len(blocks))

    def unpin(self, name: Hashable) -> None:
        """Give the blocks back, the last first, as vLLM frees a request's."""
        blocks = self._blocks.pop(name)
        self._manager.block_pool.free_blocks(reversed(blocks))
        HANDOFF.pinned(-len(blocks))
