# SPDX-License-Identifier: Apache-2.0
"""What state must pass before it may be published, and again before it may be used.

A digest says that bytes arrived as they were written; it does not say that they were state when they were written: a
null block copies perfectly. So both sides also check the recurrent part of every head and layer: some byte is not
zero, and every number is finite. A state after one token or more is never zero: its update is a rank-one term with
beta > 0 and a normalised key.
"""

from __future__ import annotations

import numpy as np
import xxhash

from statestore.connector.cache_view import Bytes
from statestore.geometry import Geometry
from statestore.objects import head_bytes


class VerificationFailed(Exception):
    """State that must not be used. `kind` is the label of the counter: null_block, null_state, digest, record, ..."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def unit_digest(data: Bytes) -> str:
    """XXH3-128 of one unit's bytes, 32 hexadecimal digits. It finds damage, not malice."""
    return xxhash.xxh3_128_hexdigest(memoryview(data))


def check_table(blocks: tuple[list[int], ...], action: str) -> None:
    """Raise when a block to read or write is the null block 0, which belongs to no request."""
    if any(0 in table for table in blocks):
        raise VerificationFailed("null_block", f"a block to {action} is the null block: {blocks}")


def check_heads(data: Bytes, heads: int, geometry: Geometry) -> None:
    """Raise when a layer's recurrent state of any head in `data` [heads, head bytes] is null."""
    g = geometry
    per_head = data.reshape(heads, head_bytes(g))
    per_layer = per_head.reshape(heads, len(g.kda_layers), -1)
    recurrent_bytes = g.head_v * g.head_k * g.recurrent_bytes
    recurrent = np.ascontiguousarray(per_layer[:, :, :recurrent_bytes])
    nonzero = recurrent.view(np.uint32).any(axis=2)
    if not nonzero.all():
        head, layer = (int(i) for i in np.argwhere(~nonzero)[0])
        raise VerificationFailed(
            "null_state", f"KDA state of head {head} (of this rank), layer {g.kda_layers[layer]} is all zeros"
        )
    if g.recurrent_dtype == "float32" and not np.isfinite(recurrent.view(np.float32)).all():
        raise VerificationFailed("not_finite", "KDA state has a number that is not finite")


def check_digest(data: Bytes, expected: str, what: str) -> None:
    """Raise when `data` is not what was written."""
    found = unit_digest(data)
    if found != expected:
        raise VerificationFailed("digest", f"{what}: digest {found}, the record says {expected}")
