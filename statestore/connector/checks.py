# SPDX-License-Identifier: Apache-2.0
"""What state must pass before it may be published, and again before it may be used.

A digest says that bytes arrived as they were written; it does not say that they were state when they were written: a
null block copies perfectly. So both sides also check what no state can be:

    KDA recurrent state, of every head and layer    not all zero, every number finite
    KDA convolution columns                         every number finite (zero before the first tokens of a prompt)
    MLA latent row, of every token and layer        not all zero; the writer also: every number finite

A recurrent state after one token or more is never zero: its update is a rank-one term with beta > 0 and a normalised
key. A latent row is never zero: it is normalised. The reader leaves the numbers of latent rows to the writer and the
digest: a rank without DCP reads every row, and looking at every number would take it longer than the digest does.
"""

from __future__ import annotations

from statestore.boundary import BoundaryRecord, object_key
from statestore.connector.cache_view import Bytes, CacheView
from statestore.digest import first_not_finite, first_null, unit_digest
from statestore.geometry import Geometry
from statestore.reshard import head_bytes


class VerificationFailed(Exception):
    """State that must not be used. `kind` is the label of the counter: null_block, null_state, digest, record, ..."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def check_table(view: CacheView, blocks: tuple[list[int], ...], length: int, action: str) -> None:
    """Raise when the blocks of a job are not what `length` tokens need; checked before anything is read or written.

    Kinds: null_block (the null block 0 belongs to no request), block_table (too few blocks, or one that is not there).
    """
    if any(0 in table for table in blocks):
        raise VerificationFailed("null_block", f"a block to {action} is the null block: {blocks}")
    for group, count in view.blocks_needed(length).items():
        table = blocks[group] if group < len(blocks) else []
        if len(table) < count or not all(0 < block < view.block_count for block in table):
            raise VerificationFailed(
                "block_table",
                f"to {action} {length} tokens, group {group} needs {count} blocks below {view.block_count}, "
                f"not {table}",
            )


def check_epoch(record: BoundaryRecord) -> None:
    """Raise when the record names an object of another epoch: its bytes and digests may match, and be stale."""
    for rank in record.ranks:
        for entry in rank.objects:
            expected = object_key(record.model_digest, record.epoch, entry.group, rank.rank, record.link)
            if entry.key != expected:
                raise VerificationFailed("epoch", f"the record names {entry.key}; its epoch's is {expected}")


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
