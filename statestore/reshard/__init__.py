# SPDX-License-Identifier: Apache-2.0
"""Index maps between two geometries: which byte a writing rank stores where, and a reading rank takes from where.

Two roles whose `Geometry` differs exchange state through objects of a pool. A writing rank stores at most two objects
a record, one a layer group; a reading rank takes only what it owns::

    kda   head-major   [heads of the rank][KDA layers] x ( recurrent [V, K] | conv [q|k|v part][W-1 columns][channels] )
          One head of all layers is one run of bytes, so a reader with another TP size takes whole runs: the unit of
          reading and of digests is one head. Never the speculative convolution columns, and the SD or DS layout of
          the cache does not show.
    mla   token-major  [tokens of the rank][MLA layers] x latent row
          MLA rows are the same on every TP rank, so the tokens are divided among the ranks that hold them
          (`written_tokens`): each is stored once. Inside an object the rows lie grouped by the DCP rank that will own
          them, in token order (`Packing`): a reading rank takes one run. Behind the rows lies a table with the digest
          of every row, `ROW_DIGEST` bytes each. The unit of digests is a run of at most `CHUNK` rows of one owner; its
          digest in the record is that of its part of the table.

Both orders make the unit of reading contiguous. A rank that needs a whole unit reads its rows and computes the table;
one that needs some of its rows (they were packed for another layout, or the rank holds a prefix already) reads those
and the unit's part of the table, when that is less. So bytes moved are bytes needed, but for `ROW_DIGEST` bytes a row
of the units that are read in part: docs/handoff.md has the sum.

The boundary record keeps base, length, packing and the writer's geometry: together they say everything about the inside
of its objects, and both sides compute it with the same function (`plan_write`). A record with a base holds the rows of
[base, length) only; the records of its chain hold the others (`plan_read_chain`), each in a layout of its own.

ownership.py says which rank owns a token and where it lies there; objects.py what an object holds; plan.py what one
rank writes and reads; compat.py whether two geometries map at all. All of it is plain data and numpy index arithmetic:
nothing imports an engine, torch or a store's client.
"""

from statestore.reshard.compat import GeometryMismatch, compatible, meaning, refusal
from statestore.reshard.objects import (
    CHUNK,
    ROW_DIGEST,
    SPLIT_TOKENS,
    Packing,
    Unit,
    head_bytes,
    heads_of,
    kda_units,
    mla_units,
    row_bytes,
    row_tokens,
    stored_row_bytes,
    written_tokens,
)
from statestore.reshard.ownership import (
    Ints,
    local_index,
    local_length,
    locate,
    owned_tokens,
    owner,
    place,
)
from statestore.reshard.plan import (
    ObjectPlan,
    ObjectRead,
    Piece,
    ReadPlan,
    RecordIncomplete,
    plan_read,
    plan_read_chain,
    plan_write,
)

__all__ = [
    "CHUNK",
    "ROW_DIGEST",
    "SPLIT_TOKENS",
    "GeometryMismatch",
    "Ints",
    "ObjectPlan",
    "ObjectRead",
    "Packing",
    "Piece",
    "ReadPlan",
    "RecordIncomplete",
    "Unit",
    "compatible",
    "head_bytes",
    "heads_of",
    "kda_units",
    "local_index",
    "local_length",
    "locate",
    "meaning",
    "mla_units",
    "owned_tokens",
    "owner",
    "place",
    "plan_read",
    "plan_read_chain",
    "plan_write",
    "refusal",
    "row_bytes",
    "row_tokens",
    "stored_row_bytes",
    "written_tokens",
]
