# SPDX-License-Identifier: Apache-2.0
"""Records of chains for tests: checkpoints and what rests on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry, boundary_id, object_key
from tests.support.records import DIGEST, MODEL


def prefix_of(length: int, story: int = 0) -> str:
    """A prefix hash; equal for equal lengths of one `story`."""
    return f"{story:016x}{length:016x}"


def link_record(
    epoch: Epoch,
    link: int,
    base: int,
    length: int,
    parents: Sequence[str] = (),
    *,
    reusable: bool = True,
    owner: str = "prefill-1",
    story: int = 0,
    ranks: int = 1,
    created: float = 1.5,
    geometry: str = "{}",
    model: str = MODEL,
    prefix: str = "",
) -> BoundaryRecord:
    """One committed link."""
    prefix = prefix or prefix_of(length, story)

    def entry(rank: int, group: str, nbytes: int, low: int) -> ObjectEntry:
        key = object_key(model, epoch, group, rank, link)  # type: ignore[arg-type]
        return ObjectEntry(key, group, nbytes, (DIGEST,), low, length, null_free=True)  # type: ignore[arg-type]

    return BoundaryRecord(
        id=boundary_id(model, prefix, epoch),
        model_digest=model,
        prefix_hash=prefix,
        length=length,
        epoch=epoch,
        owner=owner,
        geometry=geometry,
        created=created,
        state="committed",
        ranks=tuple(
            RankEntry(rank, "written", (entry(rank, "kda", 100, 0), entry(rank, "mla", 200, base)))
            for rank in range(ranks)
        ),
        base=base,
        parents=tuple(parents),
        link=link,
        reusable=reusable,
    )


def as_pending(record: BoundaryRecord, links: int = 64) -> BoundaryRecord:
    """The record as it is opened."""
    ranks = tuple(RankEntry(rank.rank) for rank in record.ranks)
    return replace(record, state="pending", ranks=ranks, links=links)


def chain_of(
    epoch: Epoch, lengths: Sequence[int], last_reusable: bool = False, **changes: object
) -> list[BoundaryRecord]:
    """Links of one epoch that rest on each other from token 0; the last one is the request's own."""
    links: list[BoundaryRecord] = []
    for number, length in enumerate(lengths):
        links.append(
            link_record(
                epoch,
                number,
                links[-1].length if links else 0,
                length,
                [record.id for record in links],
                reusable=last_reusable or number < len(lengths) - 1,
                **changes,  # type: ignore[arg-type]
            )
        )
    return links
