# SPDX-License-Identifier: Apache-2.0
"""Which records join: the arithmetic of chains. Plain data, as `statestore.boundary`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from statestore.boundary import BoundaryInvalid, BoundaryRecord

MAX_PARENTS = 255
"""Longest chain that a record may rest on; a longer one starts anew from token 0."""


def check_chain(chain: Sequence[BoundaryRecord]) -> None:
    """Raises BoundaryInvalid unless the records' rows join from token 0, each resting on all before it."""
    if not chain or chain[0].base:
        raise BoundaryInvalid("chain", [record.id for record in chain], "must start at token 0")
    check_links(chain)
    for record in chain[:-1]:
        if not record.reusable:
            raise BoundaryInvalid("chain", record.id, "must not be a parent: it is no checkpoint")


def check_links(links: Sequence[BoundaryRecord]) -> None:
    """Raises BoundaryInvalid unless each record is the last parent of the next, and its rows end where those begin."""
    for one, two in pairwise(links):
        if two.parents != (*one.parents, one.id):
            raise BoundaryInvalid(f"{two.id}: parents", two.parents, f"must be those of {one.id}, and itself")
        if two.base != one.length:
            raise BoundaryInvalid(f"{two.id}: base", two.base, f"must be the length {one.length} of {one.id}")
        if two.model_digest != one.model_digest:
            raise BoundaryInvalid(f"{two.id}: model_digest", two.model_digest, "differs from its parent's")


def rest_on(parent: BoundaryRecord | None, links: Sequence[BoundaryRecord]) -> list[BoundaryRecord]:
    """`links` with the parents that they have when the first one rests on `parent`."""
    parents = (*parent.parents, parent.id) if parent is not None else ()
    chained = []
    for link in links:
        chained.append(replace(link, parents=parents))
        parents = (*parents, link.id)
    return chained


def adopt(
    links: Sequence[BoundaryRecord], existing: Sequence[BoundaryRecord]
) -> tuple[list[BoundaryRecord], list[BoundaryRecord]]:
    """Rest on the longest of the `existing` checkpoints that one of our links repeats.

    Returns (links that are left, with their new parents; links whose objects are not needed). The last link is the
    request's own and always left.
    """
    for number in range(len(links) - 2, -1, -1):
        link = links[number]
        for other in existing:
            if other.prefix_hash == link.prefix_hash and other.length == link.length:
                return rest_on(other, links[number + 1 :]), list(links[: number + 1])
    return list(links), []
