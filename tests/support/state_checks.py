# SPDX-License-Identifier: Apache-2.0
"""What `statestore.connector.proofs` looks for, written as plainly as it can be: one look at whole state after another.

The reference that the proofs, which take one pass in pieces, are compared with.
"""

from __future__ import annotations

from statestore.connector.cache_view import Bytes
from statestore.connector.checks import VerificationFailed
from statestore.digest import first_not_finite, first_null, unit_digest
from statestore.geometry import Geometry
from statestore.reshard import head_bytes


def check_heads(data: Bytes, heads: int, geometry: Geometry, first_head: int = 0) -> None:
    """Raise when the state of a head in a layer is null or not finite; `data` is [heads, head bytes].

    `first_head`: what the first of them is called in the message.
    """
    g = geometry
    layers = len(g.kda_layers)
    recurrent_bytes = g.head_v * g.head_k * g.recurrent_bytes
    states = data.reshape(heads * layers, head_bytes(g) // layers)
    recurrent, conv = states[:, :recurrent_bytes], states[:, recurrent_bytes:]

    def where(index: int) -> str:
        head, layer = divmod(index, layers)
        return f"head {first_head + head}, layer {g.kda_layers[layer]}"

    null = first_null(recurrent)
    if null is not None:
        raise VerificationFailed("null_state", f"KDA state of {where(null)} is all zeros")
    for name, part, dtype in (
        ("recurrent", recurrent, g.recurrent_dtype),
        ("convolution", conv, g.conv_dtype),
    ):
        bad = first_not_finite(part, dtype)
        if bad is not None:
            raise VerificationFailed(
                "not_finite", f"KDA {name} state of {where(bad)} has a number that is not finite"
            )


def check_rows(data: Bytes, geometry: Geometry, finite: bool) -> None:
    """Raise when a token's latent row in a layer is null, or (`finite`) not finite; `data` is [tokens, row bytes]."""
    g = geometry
    layers = len(g.mla_layers)
    rows = data.reshape(-1, g.latent_row_bytes)
    null = first_null(rows)
    if null is not None:
        row, layer = divmod(null, layers)
        raise VerificationFailed("null_state", f"MLA row {row}, layer {g.mla_layers[layer]} is all zeros")
    bad = first_not_finite(rows, g.kv_cache_dtype) if finite else None
    if bad is not None:
        row, layer = divmod(bad, layers)
        raise VerificationFailed(
            "not_finite", f"MLA row {row}, layer {g.mla_layers[layer]} has a number that is not finite"
        )


def check_digest(data: Bytes, expected: str, what: str) -> None:
    """Raise when `data` is not what was written."""
    found = unit_digest(data)
    if found != expected:
        raise VerificationFailed("digest", f"{what}: digest {found}, the record says {expected}")
