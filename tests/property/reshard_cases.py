# SPDX-License-Identifier: Apache-2.0
"""Geometries for the property tests: small in bytes, complete in shapes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from statestore.geometry import Geometry
from statestore.reshard import Packing

TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
DCP_SIZES = (1, 2, 4, 8)
LEAST_HEADS, MOST_HEADS = 12, 96
AMPLE_PAGE = 1 << 30

BASE = Geometry(
    model_digest="d" * 32,
    quantisation="none",
    kda_layers=(0, 1, 3),
    mla_layers=(2, 4),
    num_heads=48,
    head_k=2,
    head_v=3,
    conv_width=4,
    conv_layout="SD",
    num_spec=0,
    recurrent_dtype="float32",
    conv_dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    latent_width=3,
    block_size=16,
    page_bytes=AMPLE_PAGE,
    tp=1,
)


def geometry(**changes: Any) -> Geometry:
    """`BASE` with other fields."""
    return dataclasses.replace(BASE, **changes)


@dataclass(frozen=True)
class Case:
    """A boundary of `length` tokens that `source` writes and `target` reads."""

    source: Geometry
    target: Geometry
    length: int
    packing: Packing
    local_tokens: int = 0
    base: int = 0
    """Rows of the tokens [0, base) lie in the boundaries before it."""
    link: int = 0
    """Its place in its chain."""

    @property
    def matching(self) -> bool:
        """Whether the rows are packed for the reader."""
        return self.packing == Packing.for_reader(self.target)


def _shared(draw: st.DrawFn, sizes: list[int], least: int, most: int) -> dict[str, Any]:
    """What all geometries of a case agree on; heads that all TP `sizes` divide."""
    step = math.lcm(*sizes)
    return {
        "num_heads": step * draw(st.integers(-(-least // step), max(most // step, -(-least // step)))),
        "head_k": draw(st.sampled_from([2, 4])),
        "head_v": draw(st.sampled_from([2, 4])),
        "conv_width": draw(st.integers(2, 5)),
        "kda_layers": tuple(sorted(draw(st.sets(st.integers(0, 3), min_size=1, max_size=2)))),
        "mla_layers": tuple(sorted(draw(st.sets(st.integers(4, 9), min_size=1, max_size=2)))),
        "recurrent_dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "conv_dtype": draw(st.sampled_from(["bfloat16", "float32"])),
        "kv_cache_dtype": draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3"])),
        "latent_width": draw(st.integers(2, 5)),
    }


def _packing(draw: st.DrawFn, target: Geometry) -> Packing:
    return draw(
        st.one_of(
            st.just(Packing.for_reader(target)),
            st.just(Packing()),
            st.builds(Packing, st.sampled_from(DCP_SIZES), st.integers(1, 20)),
        )
    )


# Writers seldom have DCP.
_WRITER_DCPS = [1, 1, 1, *DCP_SIZES]


def _side(draw: st.DrawFn, tp: int, shared: dict[str, Any], dcps: list[int]) -> Geometry:
    block_size = draw(st.one_of(st.integers(1, 12), st.sampled_from([16, 24, 32, 48, 64])))
    divisors = [i for i in range(1, block_size + 1) if block_size % i == 0]
    return geometry(
        **shared,
        tp=tp,
        dcp=draw(st.sampled_from([c for c in dcps if tp % c == 0])),
        interleave=draw(st.sampled_from(divisors)),
        block_size=block_size,
        num_spec=draw(st.integers(0, 4)),
        conv_layout=draw(st.sampled_from(["SD", "DS"])),
    )


@st.composite
def cases(draw: st.DrawFn, longest: int = 5000, small_tp: bool = False) -> Case:
    """Any pair of geometries that map, with every TP size, DCP on either side, and any packing.

    `small_tp`: at most 4 ranks a side, for tests that lay out whole caches with plain loops.
    """
    sizes = TP_SIZES[:4] if small_tp else TP_SIZES
    a, b = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
    shared = _shared(draw, [a, b], LEAST_HEADS, LEAST_HEADS if small_tp else MOST_HEADS)
    source = _side(draw, a, shared, _WRITER_DCPS)
    target = _side(draw, b, shared, list(DCP_SIZES))
    length = draw(st.one_of(st.integers(1, 40), st.integers(1, min(300, longest)), st.integers(1, longest)))
    packing = _packing(draw, target)
    local = draw(st.one_of(st.just(0), st.integers(0, length)))
    return Case(source, target, length, packing, local)


@st.composite
def chains(draw: st.DrawFn, longest: int = 4000, small_tp: bool = False) -> tuple[Case, ...]:
    """Two to five boundaries, each of a publisher with a layout of its own, that one target reads as a chain."""
    sizes = TP_SIZES[:4] if small_tp else (1, 2, 3, 4, 6, 8, 12)
    count = draw(st.integers(2, 5))
    publishers = [draw(st.sampled_from(sizes)) for _ in range(count)]
    reader = draw(st.sampled_from(sizes))
    shared = _shared(draw, [*publishers, reader], LEAST_HEADS, LEAST_HEADS if small_tp else 48)
    target = _side(draw, reader, shared, list(DCP_SIZES))
    steps = st.one_of(st.integers(1, 40), st.integers(1, longest // count))
    ends = list(itertools.accumulate(draw(steps) for _ in range(count)))
    matched = draw(st.booleans())
    local = draw(st.one_of(st.just(0), st.integers(0, ends[-1])))
    links = []
    for link, (tp, end) in enumerate(zip(publishers, ends, strict=True)):
        source = _side(draw, tp, shared, _WRITER_DCPS)
        packing = Packing.for_reader(target) if matched else _packing(draw, target)
        links.append(Case(source, target, end, packing, local, ends[link - 1] if link else 0, link))
    return tuple(links)
