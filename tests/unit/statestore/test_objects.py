# SPDX-License-Identifier: Apache-2.0
"""The layout of stored objects, pinned: what changes here needs another `geometry.LAYOUT_VERSION`.

Any other layout would pass the property tests too, as long as writer and reader agree; an older writer would not.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from statestore.boundary import Epoch, object_key
from statestore.geometry import LAYOUT_VERSION
from statestore.reshard import (
    CHUNK,
    ROW_DIGEST,
    Packing,
    Unit,
    head_bytes,
    heads_of,
    kda_units,
    mla_units,
    plan_write,
    row_bytes,
    row_tokens,
    stored_row_bytes,
    written_tokens,
)
from tests.property.reshard_cases import geometry

G = geometry(tp=4)


def test_the_version_of_this_layout() -> None:
    assert LAYOUT_VERSION == 2


def test_heads_lie_head_major() -> None:
    """Three layers of [V=3, K=2] fp32 and 3 columns of 2+2+3 bf16 channels a head; 12 heads a rank."""
    size = 3 * (3 * 2 * 4 + 3 * 7 * 2)
    assert head_bytes(G) == size == 198
    assert list(heads_of(G, 2)) == list(range(24, 36))
    units = kda_units(G, 2)
    assert units[:2] == (Unit(0, 198, 24, 1, 0), Unit(198, 198, 25, 1, 0))
    assert len(units) == 12


def test_rows_lie_token_major_and_grouped_by_owner() -> None:
    assert row_bytes(G) == 2 * 3 * 2
    tokens = np.arange(20)
    assert row_tokens(tokens, Packing(2, 4)).tolist() == [
        *[0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19],
        *[4, 5, 6, 7, 12, 13, 14, 15],
    ]
    assert mla_units(G, tokens, Packing(2, 4)) == (Unit(0, 144, 0, 12, 0), Unit(144, 96, 12, 8, 1))
    assert mla_units(G, np.arange(8), Packing(4, 4)) == (Unit(0, 48, 0, 4, 0), Unit(48, 48, 4, 4, 1))


def test_units_have_at_most_a_chunk_of_rows() -> None:
    assert CHUNK == 128
    counts = [unit.count for unit in mla_units(G, np.arange(300), Packing())]
    assert counts == [128, 128, 44]


def test_tokens_are_divided_among_the_ranks_that_hold_them() -> None:
    assert [len(written_tokens(G, 100, rank)) for rank in range(4)] == [16, 32, 32, 20]
    assert written_tokens(G, 100, 3).tolist() == list(range(80, 100))
    # A short boundary leaves ranks without a row.
    assert [len(written_tokens(G, 5, rank)) for rank in range(4)] == [0, 0, 0, 5]
    dcp = dataclasses.replace(G, dcp=2, interleave=4)
    assert written_tokens(dcp, 20, 0).tolist() == []
    assert written_tokens(dcp, 20, 2).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert written_tokens(dcp, 20, 3).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_a_rank_writes_at_most_two_objects() -> None:
    kda, mla = plan_write(G, 3, 100)
    assert (kda.group, kda.nbytes, kda.token_lo, kda.token_hi) == ("kda", 12 * 198, 0, 100)
    assert (mla.group, mla.nbytes, mla.token_lo, mla.token_hi) == ("mla", 20 * (12 + 8), 80, 100)
    assert [plan.group for plan in plan_write(G, 0, 5)] == ["kda"]
    assert [plan.group for plan in plan_write(dataclasses.replace(G, kda_layers=()), 3, 5)] == ["mla"]
    assert [plan.group for plan in plan_write(dataclasses.replace(G, mla_layers=()), 3, 5)] == ["kda"]


def test_behind_the_rows_lies_a_table() -> None:
    """8 bytes a row, in the rows' order; a unit's part of it is one run."""
    assert (ROW_DIGEST, stored_row_bytes(G)) == (8, 12 + 8)
    assert stored_row_bytes(dataclasses.replace(G, mla_layers=())) == 0
    kda, mla = plan_write(dataclasses.replace(G, tp=1), 0, 300, Packing(2, 4))
    assert (kda.payload, mla.payload, mla.nbytes) == (kda.nbytes, 300 * 12, 300 * 20)
    # 152 tokens of the first owner, 148 of the second.
    assert [unit.count for unit in mla.units] == [128, 24, 128, 20]
    assert [mla.table_of(unit) for unit in mla.units] == [
        slice(3600, 4624),
        slice(4624, 4816),
        slice(4816, 5840),
        slice(5840, 6000),
    ]


def test_keys_carry_the_epoch() -> None:
    assert object_key("ab" * 16, Epoch(0x1F, 3), "kda", 2) == "ds/abababababababab/1f-3/0/kda/2"
