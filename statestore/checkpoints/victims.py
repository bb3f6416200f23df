# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint goes next where room is needed. docs/checkpoints.md, "Pins and eviction".

Selections only, from what the index and the budget know; whether a checkpoint really may go is the ledger's to say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from statestore.boundary import BoundaryRecord
from statestore.checkpoints.budget import Budget
from statestore.checkpoints.index import CheckpointIndex


def own_leaf(budget: Budget, index: CheckpointIndex, blocked: Collection[str]) -> BoundaryRecord | None:
    """The least recently used of this worker's checkpoints on which none rests; none of `blocked` (ids)."""
    leaves = (
        record for name, record in budget.checkpoints.items() if name not in blocked and index.is_leaf(name)
    )
    return min(leaves, key=lambda record: index.last_used(record.id), default=None)


def foreign_leaf(
    budget: Budget,
    index: CheckpointIndex,
    blocked: Collection[str],
    pins: Mapping[str, Sequence[str]] | None = None,
) -> BoundaryRecord | None:
    """Where others' checkpoints alone are above one of this worker's: the least recently used leaf among them.

    Of this worker's checkpoints the least recently used one counts whose descendants are all others', none of them in
    `blocked` (ids), so that it can be evicted when they have gone. `pins`: the ledger's child entries, by parent; then
    a checkpoint counts only if nothing but known checkpoints rests on it and its descendants.
    """
    own = budget.checkpoints
    for name in sorted(own.keys() - set(blocked), key=index.last_used):
        below = []
        for child in index.below(name):
            if child in own or child in blocked:
                break
            below.append(child)
        else:
            if below and not any(_pinned(one, index, pins or {}) for one in (name, *below)):
                leaves = [child for child in below if index.is_leaf(child)]
                return index.records[min(leaves, key=index.last_used)]
    return None


def _pinned(boundary: str, index: CheckpointIndex, pins: Mapping[str, Sequence[str]]) -> bool:
    """Whether something rests on it that is no known checkpoint: a publish on its way, or a request's boundary."""
    return any(child not in index.records for child in pins.get(boundary, ()))
