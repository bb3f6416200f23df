# SPDX-License-Identifier: Apache-2.0
"""KDA state lands byte for byte where plain loops say, between any two layouts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from reshard_cases import DCP_SIZES, TP_SIZES, geometry, kda_pairs
from reshard_worker import check_kda, replace_ranges

from statestore.geometry import Geometry
from statestore.reshard import KdaSourceRead, conv_view, kda_read, kda_write
from statestore.reshard.kda import Part


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(kda_pairs())
def test_any_pair(pair: tuple[Geometry, Geometry, int, int]) -> None:
    src, dst, src_history, dst_history = pair
    check_kda(src, dst, src_history=src_history, dst_history=dst_history, tally="KDA random")


@pytest.mark.parametrize("layouts", list(itertools.product(("SD", "DS"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("num_heads", [48, 96])
def test_every_tp_pair(num_heads: int, layouts: tuple[str, str]) -> None:
    """All 64 pairs; 48 is the least number of heads that all sizes divide. Speculation differs."""
    shared = {"num_heads": num_heads, "kda_layers": (1,), "head_k": 1, "head_v": 2}
    for a, b in itertools.product(TP_SIZES, repeat=2):
        src = geometry(**shared, tp=a, conv_layout=layouts[0], num_spec=0)
        dst = geometry(
            **shared, tp=b, conv_layout=layouts[1], num_spec=3, dcp=max(c for c in DCP_SIZES if b % c == 0)
        )
        check_kda(src, dst, dst_history=b % 4, tally="KDA every TP pair")


def test_equal_tp_reads_one_range() -> None:
    geom = geometry(tp=4)
    for rank in range(4):
        (read,) = kda_read(geom, geom, rank)
        assert list(read.ranges) == [(0, 0, geom.sizes.kda_rank)]


def test_fewer_readers_read_one_range_a_source() -> None:
    src, dst = geometry(tp=8), geometry(tp=2)
    reads = kda_read(src, dst, 1)
    assert [read.src_rank for read in reads] == [4, 5, 6, 7]
    assert all(len(read.ranges) == 1 for read in reads)


def test_dcp_does_not_divide_heads() -> None:
    src = geometry(tp=2)
    plain, dcp = geometry(tp=8), geometry(tp=8, dcp=8)
    for rank in range(8):
        pairs = zip(kda_read(src, plain, rank), kda_read(src, dcp, rank), strict=True)
        assert all(list(x.ranges) == list(y.ranges) and x.dst_head == y.dst_head for x, y in pairs)


def _next_head(read: KdaSourceRead) -> KdaSourceRead:
    step = sum(read.layout.head_bytes[:1])
    return replace_ranges(read, source=read.ranges.source + step)


def _other_target_head(read: KdaSourceRead) -> KdaSourceRead:
    return dataclasses.replace(read, dst_head=read.dst_head - 1 if read.dst_head else 1)


def _drop_range(read: KdaSourceRead) -> KdaSourceRead:
    part = slice(0, len(read.ranges) - 1)
    return replace_ranges(
        read,
        source=read.ranges.source[part],
        target=read.ranges.target[part],
        nbytes=read.ranges.nbytes[part],
    )


def _twice(read: KdaSourceRead) -> KdaSourceRead:
    columns = {name: getattr(read.ranges, name) for name in ("source", "target", "nbytes")}
    return replace_ranges(read, **{name: np.concatenate((c, c[-1:])) for name, c in columns.items()})


def _neighbour_source(read: KdaSourceRead) -> KdaSourceRead:
    return dataclasses.replace(read, src_rank=(read.src_rank + 1) % 4)


def _swap_layers(read: KdaSourceRead) -> KdaSourceRead:
    return replace_ranges(read, source=read.ranges.source[::-1].copy())


@pytest.mark.parametrize(
    "tamper", [_next_head, _other_target_head, _drop_range, _twice, _neighbour_source, _swap_layers]
)
def test_property_notices_a_wrong_map(tamper: Callable[[KdaSourceRead], KdaSourceRead]) -> None:
    """Negative controls: the property holds for this pair, and fails for every damaged map."""
    src, dst = geometry(tp=4), geometry(tp=6, num_spec=2)
    check_kda(src, dst, dst_history=1)
    with pytest.raises((AssertionError, ValueError)):
        check_kda(src, dst, dst_history=1, tamper=tamper)


@pytest.mark.parametrize("wrong", [{"conv_layout": "SD"}, {"num_spec": 3}, {"num_spec": 0}])
def test_property_notices_a_wrong_conv_view(
    wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying bytes instead of columns, or in the other layout, does not pass."""
    src, dst = geometry(tp=2), geometry(tp=4, num_spec=2, conv_layout="DS")
    original = conv_view

    def other(geom: Geometry, *args: object, **kwargs: object) -> object:
        changed = dataclasses.replace(geom, **wrong) if geom == dst else geom
        return original(changed, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("statestore.reshard.kda.conv_view", other)
    with pytest.raises(AssertionError):
        check_kda(src, dst)


def test_property_notices_a_wrong_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that takes the columns one step late stores a speculative column."""
    src, dst = geometry(tp=2, num_spec=2), geometry(tp=4)
    monkeypatch.setattr("reshard_worker.kda_write", lambda geom, history: kda_write(geom, history + 1))
    with pytest.raises(AssertionError, match="convolution state differs"):
        check_kda(src, dst)


def test_conv_view_refuses_what_the_cache_lacks() -> None:
    geom = geometry(tp=4, num_spec=2)
    with pytest.raises(ValueError, match="history=3"):
        conv_view(geom, Part.CONV_Q, history=3)
    with pytest.raises(ValueError, match="heads"):
        conv_view(geom, Part.CONV_Q, head_lo=10, heads=3)
    with pytest.raises(ValueError, match="recurrent"):
        conv_view(geom, Part.RECURRENT)


def test_rank_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 4"):
        kda_read(geometry(tp=2), geometry(tp=4), 4)
