# SPDX-License-Identifier: Apache-2.0
"""Geometries for the property tests: small in bytes, complete in shapes."""

from __future__ import annotations

import dataclasses
import math
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


@st.composite
def kda_pairs(draw: st.DrawFn) -> tuple[Geometry, Geometry, int, int]:
    """(prefill, decode, prefill history column, decode history column)."""
    a, b = draw(st.sampled_from(TP_SIZES)), draw(st.sampled_from(TP_SIZES))
    step = math.lcm(a, b)
    heads = step * draw(st.integers(-(-LEAST_HEADS // step), MOST_HEADS // step))
    shared = {
        "num_heads": heads,
        "head_k": draw(st.integers(1, 3)),
        "head_v": draw(st.integers(1, 3)),
        "conv_width": draw(st.integers(2, 5)),
        "kda_layers": tuple(sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=2)))),
        "mla_layers": (10,),
    }
    sides, histories = [], []
    for tp in (a, b):
        num_spec = draw(st.integers(0, 4))
        sides.append(
            geometry(
                **shared,
                tp=tp,
                dcp=draw(st.sampled_from([c for c in DCP_SIZES if tp % c == 0])),
                num_spec=num_spec,
                conv_layout=draw(st.sampled_from(["SD", "DS"])),
                block_size=draw(st.integers(1, 64)),
            )
        )
        histories.append(draw(st.integers(0, num_spec)))
    return sides[0], sides[1], histories[0], histories[1]


@st.composite
def mla_cases(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `check_mla`."""
    sides = []
    shared = {
        "mla_layers": tuple(sorted(draw(st.sets(st.integers(4, 9), min_size=1, max_size=2)))),
        "kv_cache_dtype": draw(st.sampled_from(["bfloat16", "float8_e4m3"])),
        "latent_width": draw(st.integers(2, 5)),
    }
    for role in ("prefill", "decode"):
        tp = draw(st.sampled_from(TP_SIZES))
        dcps = [c for c in DCP_SIZES if tp % c == 0]
        dcp = draw(st.sampled_from(dcps)) if role == "decode" else draw(st.sampled_from([1, 1, *dcps]))
        block_size = draw(st.one_of(st.integers(1, 12), st.sampled_from([16, 24, 32, 48, 64])))
        divisors = [i for i in range(1, block_size + 1) if block_size % i == 0]
        sides.append(
            geometry(
                **shared, tp=tp, dcp=dcp, block_size=block_size, interleave=draw(st.sampled_from(divisors))
            )
        )
    src, dst = sides
    start = draw(st.one_of(st.just(0), st.integers(0, 80)))
    stop = start + draw(st.one_of(st.integers(0, 40), st.integers(0, 300)))
    packing = draw(
        st.one_of(
            st.just(Packing.for_reader(dst)),
            st.just(Packing()),
            st.builds(Packing, st.sampled_from(DCP_SIZES), st.integers(1, 20)),
        )
    )
    want = None
    if draw(st.booleans()):
        low = draw(st.integers(start, stop))
        want = (low, draw(st.integers(low, stop)))
    return {
        "src": src,
        "dst": dst,
        "start": start,
        "stop": stop,
        "packing": packing,
        "want": want,
        "max_gap": draw(st.sampled_from([0, 0, 1, 5])),
        "cell_rows": draw(st.sampled_from([None, None, 1, 4, 16, 1024])),
    }
