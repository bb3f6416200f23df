# SPDX-License-Identifier: Apache-2.0
"""Index maps between two geometries: which byte a prefill rank writes where, and a decode rank reads from where.

Two roles whose `Geometry` differs exchange state through objects of a store. A prefill rank s of a writes at
most two objects for a boundary, one per layer group; a decode rank d of b reads only what it owns.

Object "kda" of rank s, layers in model order (layout in `reshard.kda`)::

    for each KDA layer:
        recurrent  [H/a, V, K]               recurrent dtype, heads of the rank in order
        conv q     [H/a, W-1, K]             conv dtype; the last W-1 RAW columns, oldest first
        conv k     [H/a, W-1, K]
        conv v     [H/a, W-1, V]

A range of heads of one part is one contiguous run. Speculative columns are never stored, and the SD or DS layout
of the cache does not show: the object looks the same from either.

Object "mla" of rank s (layout in `reshard.mla`)::

    for each MLA layer:
        rows       [tokens of the rank, latent_width]   kv cache dtype, row-major

MLA is the same on every prefill TP rank, so the tokens [start, stop) of a handover are divided among the ranks:
contiguous, balanced, in multiples of 16 but for the last. The order of rows inside an object follows its
`Packing`: with Packing(1, 1) ascending by token; with Packing(c, i) grouped by the reader's DCP owner
(t // i) % c, ascending inside a group, so that a decode rank reads one contiguous run a layer. The boundary record
keeps `start`, `stop`, the packing and the writer's geometry: together they say everything about an object's
inside. A rank without tokens (or without layers of a group) writes no object for that group.

Verification works in cells, the smallest parts that carry a digest: one head of all KDA layers and parts, or up
to `CELL_ROWS` MLA rows of one owner, of all MLA layers. A decode rank always reads whole cells and so can
check the digest of everything it reads, though it never reads a whole object.

Everything here is plain data and numpy index arithmetic; nothing imports an engine, torch or a store's client.
"""

from statestore.reshard.compat import GeometryMismatch, compatible
from statestore.reshard.kda import (
    ConvView,
    KdaLayout,
    KdaRead,
    KdaSourceRead,
    KdaWrite,
    Part,
    conv_view,
    kda_read,
    kda_write,
)
from statestore.reshard.mla import (
    CELL_ROWS,
    MlaLayout,
    MlaShard,
    MlaSourceRead,
    Packing,
    mla_ranges,
    mla_read,
    mla_shard,
)
from statestore.reshard.ownership import local_index, local_length, owned_tokens, owner, place, slots
from statestore.reshard.plan import ReadPlan, WritePlan, plan_read, plan_write
from statestore.reshard.ranges import Cell, Ranges

__all__ = [
    "CELL_ROWS",
    "Cell",
    "ConvView",
    "GeometryMismatch",
    "KdaLayout",
    "KdaRead",
    "KdaSourceRead",
    "KdaWrite",
    "MlaLayout",
    "MlaShard",
    "MlaSourceRead",
    "Packing",
    "Part",
    "Ranges",
    "ReadPlan",
    "WritePlan",
    "compatible",
    "conv_view",
    "kda_read",
    "kda_write",
    "local_index",
    "local_length",
    "mla_ranges",
    "mla_read",
    "mla_shard",
    "owned_tokens",
    "owner",
    "place",
    "plan_read",
    "plan_write",
    "slots",
]
