# SPDX-License-Identifier: Apache-2.0
"""Damage on purpose, for negative controls: `deltaserve verify --damage`, scenario tests. Off unless configured.

A worker whose configuration says `damage: flip` damages what it is about to load, in the store, before it reads; the
checks of the ordinary path must then find it. `damage: swap` puts another request's KDA state in its place; with
`verify: false` the answer must then differ, which proves that the answers lean on the state.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from statestore.boundary import BoundaryRecord
from statestore.connector.cache_view import Bytes
from statestore.pool import Pool
from statestore.reshard import Piece

_lock = threading.Lock()
_previous: dict[str, Bytes] = {}


def inject(kind: str, pool: Pool, record: BoundaryRecord, pieces: Sequence[Piece]) -> None:
    """Damage the first KDA object among `pieces`. Raises ValueError for an unknown kind."""
    entry = next(piece.entry for piece in pieces if piece.entry.group == "kda")
    with pool.staging(entry.nbytes, 10.0) as staging:
        pool.get_into(entry.key, [staging])
        if kind == "flip":
            # In the middle of the first head that this rank reads.
            unit = next(piece.unit for piece in pieces if piece.entry is entry)
            staging[unit.offset + unit.nbytes // 2] ^= 0x10
        elif kind == "swap":
            with _lock:
                own = np.array(staging)
                other = _previous.get(str(entry.nbytes))
                _previous[str(entry.nbytes)] = own
            if other is not None:
                staging[:] = other
        else:
            raise ValueError(f"damage: {kind!r} is unknown; use none, flip or swap")
        # Objects are immutable: replacing one takes removing it first.
        pool.remove([entry.key])
        pool.put(entry.key, [staging], preferred_segment=entry.segment)
