# SPDX-License-Identifier: Apache-2.0
"""Damage on purpose, for negative controls: `deltaserve verify --damage`, scenario tests. Off unless configured.

A worker whose configuration names a kind damages what it is about to load, before it reads. With verification on, the
check named here must find it:

    kind       what is done                                                          found as
    flip       one bit of the stored KDA object, in the first head that is read      digest
    truncate   the stored object ends within the first head that is read             size
    foreign    the stored object becomes another request's of the same size          digest
    null       the stored object becomes zeros, and the record's digests match them  null_state
    stale      the record names an earlier epoch's object, whose digests match       epoch
    dtype      the record says another dtype of the recurrent state                  geometry
    each       one of those after the other                                          as above
    swap       like foreign, for a run with `verify: false`: the answer must then differ

`stale` and `foreign` need an earlier request; the first one is left as it is.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np

from statestore.boundary import BoundaryRecord, ObjectEntry
from statestore.connector.cache_view import Bytes
from statestore.digest import unit_digest
from statestore.pool import KeyExists, Pool
from statestore.reshard import Piece

FOUND = ("flip", "truncate", "foreign", "null", "stale", "dtype")
_TIMEOUT = 10.0

_lock = threading.Lock()
_whole = threading.Lock()
"""One injection at a time: `stale` puts back what the load beside it may be replacing."""
_earlier: dict[int, _Earlier] = {}
_turns = cycle(FOUND)


@dataclass(frozen=True)
class _Earlier:
    """What the last request's object held; kept by size."""

    entry: ObjectEntry
    data: Bytes


def inject(kind: str, pool: Pool, record: BoundaryRecord, pieces: Sequence[Piece]) -> BoundaryRecord:
    """Damage the first KDA object among `pieces`; returns the record to load by. Raises ValueError for another kind."""
    if kind not in (*FOUND, "each", "swap"):
        raise ValueError(f"damage: {kind!r} is unknown; use none, swap, each or one of {', '.join(FOUND)}")
    if kind == "each":
        with _lock:
            kind = next(_turns)
    if kind == "dtype":
        return replace(record, geometry=_other_dtype(record.geometry))
    first = next(piece for piece in pieces if piece.entry.group == "kda")
    entry = first.entry
    with _whole, pool.staging(entry.nbytes, _TIMEOUT) as data:
        pool.get_into(entry.key, [data])
        before = _remember(entry, np.array(data))
        if kind in ("foreign", "stale", "swap"):
            if before is None:
                return record
            data[:] = before.data
            if kind == "stale":
                # The earlier request may still hold its object; otherwise this one stays as long as the store.
                with contextlib.suppress(KeyExists):
                    pool.put(before.entry.key, [data], preferred_segment=entry.segment)
                covers = replace(before.entry, token_lo=entry.token_lo, token_hi=entry.token_hi)
                return _with_entry(record, entry, covers)
        elif kind == "flip":
            data[first.unit.offset + first.unit.nbytes // 2] ^= 0x10
        elif kind == "null":
            data[:] = 0
        # Objects are immutable: replacing one takes removing it first.
        pool.remove([entry.key])
        kept = data[: first.unit.offset + first.unit.nbytes // 2] if kind == "truncate" else data
        pool.put(entry.key, [kept], preferred_segment=entry.segment)
        if kind == "null":
            size = entry.nbytes // len(entry.digests)  # every unit of a KDA object is one head
            digest = unit_digest(data[:size], entry.digest)
            return _with_entry(record, entry, replace(entry, digests=(digest,) * len(entry.digests)))
    return record


def _remember(entry: ObjectEntry, data: Bytes) -> _Earlier | None:
    """Keep this object, and give the one before of its size."""
    with _lock:
        before = _earlier.get(entry.nbytes)
        _earlier[entry.nbytes] = _Earlier(entry, data)
    return before


def _with_entry(record: BoundaryRecord, old: ObjectEntry, new: ObjectEntry) -> BoundaryRecord:
    ranks = tuple(
        replace(rank, objects=tuple(new if entry is old or entry == old else entry for entry in rank.objects))
        for rank in record.ranks
    )
    return replace(record, ranks=ranks)


def _other_dtype(geometry: str) -> str:
    document = json.loads(geometry)
    document["recurrent_dtype"] = "bfloat16" if document["recurrent_dtype"] == "float32" else "float32"
    return json.dumps(document)
