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

The looks at state are in `statestore.connector.proofs`, one pass with the digest; those at tables and epochs are here.
"""

from __future__ import annotations

from statestore.boundary import BoundaryRecord, object_key
from statestore.connector.cache_view import CacheView


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
