# SPDX-License-Identifier: Apache-2.0
"""Coalescing ranges moves the same bytes, in as few ranges as the order allows."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from statestore.reshard import Ranges


def _columns(rows: list[tuple[int, int, int]]) -> Ranges:
    source, target, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Ranges(source, target, nbytes)


def _moves(ranges: Ranges) -> list[tuple[int, int]]:
    """(source byte, target byte) in order."""
    return [(at + i, to + i) for at, to, size in ranges for i in range(size)]


# Few values, so that neighbours often touch on one side only.
_row = st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 2))


@settings(max_examples=500, deadline=None, database=None)
@given(st.lists(_row, max_size=6))
def test_coalescing_keeps_every_byte_and_its_order(rows: list[tuple[int, int, int]]) -> None:
    ranges = _columns(rows)
    joined = ranges.coalesced()
    assert _moves(joined) == _moves(ranges)
    assert joined.total == ranges.total
    assert (joined.nbytes > 0).all()
    assert not any((a[0] + a[2], a[1] + a[2]) == (b[0], b[1]) for a, b in itertools.pairwise(joined)), (
        "two ranges that touch on both sides are left apart"
    )


def test_ranges_that_touch_on_one_side_stay_apart() -> None:
    assert list(_columns([(0, 0, 4), (4, 8, 4)]).coalesced()) == [(0, 0, 4), (4, 8, 4)]
    assert list(_columns([(0, 0, 4), (8, 4, 4)]).coalesced()) == [(0, 0, 4), (8, 4, 4)]
    assert list(_columns([(0, 0, 4), (4, 4, 4)]).coalesced()) == [(0, 0, 8)]
