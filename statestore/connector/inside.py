# SPDX-License-Identifier: Apache-2.0
"""States that a forward pass takes on its way: a checkpoint without a second pass (docs/checkpoints.md).

Where the kernel can, vLLM does not end a prompt's last pass at the position from which others may go on: the state
there is stored into a block of its own while the pass runs on. The scheduler offers that block by name in the same step
(`SchedulerOutput.kv_connector_block_state.boundary_state_offloads`, vLLM 0.32.0 and 0.33.0), with the number of tokens
that its state stands for. Its place in the block table says something else: a slot there stands for whole blocks.
Plain data; nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0

Offer = tuple[int, int, int]
"""KV cache group, block, tokens whose state it holds once the step has been computed."""


@dataclass(frozen=True)
class Inside:
    """A state that a step takes before its end."""

    length: int
    """Tokens that it stands for."""
    blocks: dict[int, int]
    """Its block, by KV cache group."""


def last_inside(
    offers: Sequence[Offer], recurrent: Sequence[int], tables: Sequence[Sequence[int]], first: int, end: int
) -> Inside | None:
    """The last state that a step over the tokens [first, end) takes on its way; None when there is none.

    `recurrent`: the groups that hold states, all of which must have been offered it; `tables`: the request's block
    table a group, in which a block must be, because it is pinned there. An offer of `first` or of `end` tokens is the
    state that the step begins or ends with.
    """
    found: dict[int, dict[int, int]] = {}
    for group, block, length in offers:
        if first < length < end and block != NULL_BLOCK and block in tables[group]:
            found.setdefault(length, {})[group] = block
    whole = [length for length, blocks in found.items() if set(blocks) == set(recurrent)]
    return Inside(max(whole), found[max(whole)]) if whole else None
