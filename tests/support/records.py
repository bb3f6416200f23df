# SPDX-License-Identifier: Apache-2.0
"""Boundary records for tests."""

from __future__ import annotations

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry, boundary_id, object_key

MODEL = "ab" * 16
DIGEST = "0123456789abcdef" * 2


def entry(epoch: Epoch, rank: int, group: str = "kda", nbytes: int = 100, segment: str = "") -> ObjectEntry:
    """One object of a rank."""
    key = object_key(MODEL, epoch, group, rank)  # type: ignore[arg-type]
    return ObjectEntry(key, group, nbytes, (DIGEST, DIGEST), 0, 1, null_free=True, segment=segment)  # type: ignore[arg-type]


def written(epoch: Epoch, rank: int) -> RankEntry:
    """A rank that has written a kda object of 100 and an mla object of 200 bytes."""
    return RankEntry(rank, "written", (entry(epoch, rank), entry(epoch, rank, "mla", 200)))


def pending(
    epoch: Epoch,
    ranks: int = 1,
    owner: str = "prefill-1",
    length: int = 32,
    prefix: str = "cd" * 16,
    created: float = 1.5,
) -> BoundaryRecord:
    """A record whose ranks have written nothing."""
    return BoundaryRecord(
        id=boundary_id(MODEL, prefix, epoch),
        model_digest=MODEL,
        prefix_hash=prefix,
        length=length,
        epoch=epoch,
        owner=owner,
        geometry="{}",
        created=created,
        ranks=tuple(RankEntry(rank) for rank in range(ranks)),
    )


def committed(epoch: Epoch, ranks: int = 1, **changes: object) -> BoundaryRecord:
    """The record of `pending`, with every rank written, committed."""
    record = pending(epoch, ranks, **changes)  # type: ignore[arg-type]
    return record.committed(written(epoch, rank) for rank in range(ranks))
