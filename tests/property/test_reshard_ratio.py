# SPDX-License-Identifier: Apache-2.0
"""Bytes moved for a needed byte, of the caches of real models: at most 1.02 in any pair of layouts.

Plans alone, no bytes: those of tests/property/test_reshard_plans.py are carried out, on shapes of a few bytes, where
what a plan may read beside the needed is counted exactly. Here the shapes are those of models, and every byte that a
plan reads counts, tables included. Needed are the rank's heads, and the rows that it owns and does not hold yet.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from statestore.boundary import BoundaryRecord, ObjectEntry
from statestore.geometry import Geometry
from statestore.reshard import Packing, Piece, head_bytes, plan_read, plan_read_chain, plan_write, row_bytes
from statestore.reshard import plan as plan_module
from tests.property.reshard_cases import AMPLE_PAGE, DCP_SIZES, TP_SIZES, Case, geometry
from tests.property.reshard_reference import owners
from tests.property.reshard_worker import TALLIES, Tally, check, record_of

RATIO = 1.02
SHARED: dict[str, Any] = {"head_k": 128, "head_v": 128, "latent_width": 576, "page_bytes": AMPLE_PAGE}
MODELS = {
    "K3": geometry(**SHARED, num_heads=96, kda_layers=tuple(range(0, 69)), mla_layers=tuple(range(69, 93))),
    "Kimi Linear": geometry(
        **SHARED, num_heads=32, kda_layers=tuple(range(0, 20)), mla_layers=tuple(range(20, 27))
    ),
    "demo": geometry(
        **SHARED,
        num_heads=4,
        kda_layers=tuple(range(0, 6)),
        mla_layers=(6, 7),
        conv_dtype="float32",
        kv_cache_dtype="float32",
    ),
}


@dataclass
class Bytes:
    moved: int = 0
    needed: int = 0
    worst: float = 1.0
    """Of one rank."""


def record(case: Case) -> BoundaryRecord:
    """What ranks that wrote `case` would have committed."""
    ranks = []
    for rank in range(case.source.tp):
        plans = plan_write(case.source, rank, case.length, case.packing, case.base)
        ranks.append(
            [
                ObjectEntry(
                    f"{case.link}/{plan.group}/{rank}",
                    plan.group,
                    plan.nbytes,
                    ("0",) * len(plan.units),
                    plan.token_lo,
                    plan.token_hi,
                    True,
                )
                for plan in plans
            ]
        )
    return record_of(case, ranks)


def reckon(links: Sequence[Case]) -> Bytes:
    """Every rank of the reader; what it needs is counted by dealing tokens out."""
    case, found = links[-1], Bytes()
    target = case.target
    records = [record(link) for link in links]
    owned = owners(case.length, target.dcp, target.interleave)[case.local_tokens :]
    for rank in range(target.tp):
        if len(links) == 1:
            plan = plan_read(records[0], case.source, target, rank, case.local_tokens)
        else:
            plan = plan_read_chain(records, target, rank, case.local_tokens)
        needed = target.num_heads // target.tp * head_bytes(target)
        needed += int((owned == rank % target.dcp).sum()) * row_bytes(target)
        assert plan.bytes_needed == needed
        # What is really read, range by range.
        moved = sum(nbytes for read in plan.reads() for _, _, nbytes in read.ranges)
        assert moved == plan.nbytes
        found.moved, found.needed = found.moved + moved, found.needed + needed
        found.worst = max(found.worst, moved / needed)
    return found


def tell(family: str, links: Sequence[Case], found: Bytes) -> None:
    kind = "packed for the reader" if all(link.matching for link in links) else "packed for another"
    kind += ", local prefix" if links[-1].local_tokens else ""
    TALLIES.setdefault(f"{family} ({kind})", Tally()).add(
        links[-1].target.tp, found.moved, found.needed, found.worst
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dcp", DCP_SIZES)
def test_every_layout_of_a_model(model: str, dcp: int) -> None:
    """Every TP with every TP and DCP, packed for the reader and not, with a local prefix and without."""
    g = MODELS[model]
    sizes = [tp for tp in TP_SIZES if g.num_heads % tp == 0]
    pairs = itertools.product(sizes, (b for b in sizes if b % dcp == 0))
    for number, (a, b) in enumerate(pairs):
        interleave = (1, 16, 3, 48, 8)[number % 5]
        source = dataclasses.replace(g, tp=a, block_size=64, conv_layout=("SD", "DS")[number % 2])
        target = dataclasses.replace(g, tp=b, dcp=dcp, block_size=48, interleave=interleave, num_spec=3)
        length = (130, 900, 2600)[number % 3]
        packings = [
            Packing.for_reader(target),
            (Packing(), Packing(4, 1), Packing(8, 7), Packing(2, 16))[number % 4],
        ]
        for packing, local in itertools.product(
            packings, (0, (1, 17, length // 2, length - 5)[number // 2 % 4])
        ):
            case = Case(source, target, length, packing, local)
            found = reckon([case])
            assert found.worst <= RATIO, case
            if packing == packings[0] and not local:
                assert found.moved == found.needed
            tell(model, [case], found)


@st.composite
def real(draw: st.DrawFn, most_links: int = 4) -> tuple[Case, ...]:
    """A boundary or a chain of a real model: any layouts, blocks, speculation, packings and local prefix."""
    g = MODELS[draw(st.sampled_from(list(MODELS)))]
    sizes = [tp for tp in TP_SIZES if g.num_heads % tp == 0]

    def side(dcps: Sequence[int]) -> Geometry:
        tp = draw(st.sampled_from(sizes))
        block = draw(st.sampled_from([1, 6, 16, 48, 64, 384]))
        return dataclasses.replace(
            g,
            tp=tp,
            dcp=draw(st.sampled_from([c for c in dcps if tp % c == 0])),
            block_size=block,
            interleave=draw(st.sampled_from([i for i in range(1, block + 1) if block % i == 0])),
            num_spec=draw(st.integers(0, 4)),
            conv_layout=draw(st.sampled_from(["SD", "DS"])),
        )

    target = side(DCP_SIZES)
    links: list[Case] = []
    for link in range(draw(st.integers(1, most_links))):
        base = links[-1].length if links else 0
        length = base + draw(st.one_of(st.integers(1, 300), st.integers(1, 9000)))
        packing = draw(
            st.one_of(
                st.just(Packing.for_reader(target)),
                st.builds(Packing, st.sampled_from(DCP_SIZES), st.integers(1, 64)),
            )
        )
        links.append(Case(side([1, 1, *DCP_SIZES]), target, length, packing, 0, base, link))
    local = draw(st.one_of(st.just(0), st.integers(0, links[-1].length)))
    return tuple(dataclasses.replace(link, local_tokens=local) for link in links)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(real())
def test_any_layouts_of_a_model(links: tuple[Case, ...]) -> None:
    found = reckon(links)
    assert found.worst <= RATIO, links
    tell("models, random", links, found)


@pytest.mark.parametrize("dcp", [2, 8])
@pytest.mark.parametrize("packing", [Packing(), Packing(4, 5)])
@pytest.mark.parametrize("local", [0, 333])
def test_bytes_of_real_rows(dcp: int, packing: Packing, local: int) -> None:
    """The same carried out: rows of four layers, 4.6 KB a token, heads of 32 KB a layer."""
    g = geometry(num_heads=16, head_k=64, head_v=128, mla_layers=(4, 5, 6, 7), latent_width=576)
    source = dataclasses.replace(g, tp=4)
    target = dataclasses.replace(g, tp=8, dcp=dcp, interleave=1, conv_layout="DS", num_spec=2)
    check(Case(source, target, 1200, packing, local), tally="real rows", most=RATIO)


def _whole_units(*arguments: Any) -> Piece:
    entry, unit, digest, at, tokens, wanted, _ = arguments
    return Piece(entry, unit, digest, at, -1, tokens, wanted)


@pytest.mark.parametrize("model", MODELS)
def test_control_whole_units_move_more(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tables a reader of some rows reads their whole unit."""
    target = dataclasses.replace(MODELS[model], tp=4, dcp=4)
    case = Case(MODELS[model], target, 4001, Packing())
    assert reckon([case]).worst <= RATIO
    monkeypatch.setattr(plan_module, "_rows_piece", _whole_units)
    assert reckon([case]).worst > 1.05


def test_where_tables_weigh_more() -> None:
    """What docs/handoff.md says of rows that are too narrow: 8 bytes a row for each of the reader's DCP ranks."""
    narrow = geometry(num_heads=16, head_k=16, head_v=16, mla_layers=(4,), latent_width=576)
    target = dataclasses.replace(narrow, tp=8, dcp=8)
    found = reckon([Case(narrow, target, 4096, Packing())])
    rows = found.needed - 16 * head_bytes(narrow)
    assert found.moved - found.needed == 8 * 8 * 4096
    assert rows == 8 * 4096 // 8 * row_bytes(narrow)
    assert found.worst > RATIO
    assert reckon([Case(narrow, target, 4096, Packing(8, 1))]).worst == 1.0
    assert np.isclose(8 * 8 / row_bytes(narrow), 0.0556, atol=1e-4)
