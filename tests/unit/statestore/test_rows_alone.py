# SPDX-License-Identifier: Apache-2.0
"""Rows that are read without the rest of their unit: checked by the unit's table, and that by the record."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from statestore.boundary import BoundaryRecord, RankEntry
from statestore.connector import loading
from statestore.digest import ML64, XXH3, row_digests, unit_digest
from statestore.reshard import ROW_DIGEST, Packing, plan_read, plan_write, row_bytes
from tests.property.reshard_cases import Case, geometry
from tests.unit.statestore.test_publish_load import LENGTH, Handoff

SHARED = {"head_v": 4, "latent_width": 64}
CASE = Case(
    geometry(**SHARED, tp=2),
    geometry(**SHARED, tp=4, dcp=2, interleave=8, block_size=32, conv_layout="DS"),
    LENGTH,
    Packing(),
)
"""Rows of 256 bytes in plain order: 48 in the first object, of which each DCP rank owns 24."""

ROW = row_bytes(CASE.source)


@pytest.fixture(params=[False, True], ids=["over the wire", "at home"])
def handoff(request: pytest.FixtureRequest) -> Handoff:
    return Handoff(CASE, shows_home=request.param)


def flip(at: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(data: np.ndarray) -> np.ndarray:
        data[at] ^= 0x10
        return data

    return change


def test_only_rows_that_are_owned_are_read(handoff: Handoff) -> None:
    record = handoff.publish()
    for rank in range(4):
        plan = plan_read(record, CASE.source, CASE.target, rank)
        rows = [piece for piece in plan.pieces if piece.tokens is not None]
        alone = sorted(len(piece.rows) for piece in rows if piece.rows is not None)
        assert alone == [24, 28 if rank % 2 == 0 else 24]
        assert plan.nbytes == plan.bytes_needed + LENGTH * ROW_DIGEST
        assert handoff.is_exact(rank, handoff.load(rank, record))


@pytest.mark.parametrize("local", [1, 40, 95])
def test_a_local_prefix_is_left_alone(handoff: Handoff, local: int) -> None:
    record = handoff.publish()
    for rank in range(4):
        caches = handoff.load(rank, record, local=local)
        expected = handoff._caches(CASE.target)
        expected.lay_out(handoff.world, rank, expected.tables(LENGTH, 5), local)
        assert (caches.memory == expected.memory).all()


@pytest.mark.parametrize(
    ("at", "outcomes"),
    [
        # Token 9 is the odd ranks', token 3 the even ones'; nobody else reads the row.
        (9 * ROW + 5, ["exact", "digest", "exact", "digest"]),
        (3 * ROW, ["digest", "exact", "digest", "exact"]),
        # The table is everybody's, also where it says something of rows that are not wanted.
        (48 * ROW, ["digest"] * 4),
        (48 * ROW + 9 * ROW_DIGEST + 7, ["digest"] * 4),
    ],
)
def test_a_flipped_bit(handoff: Handoff, at: int, outcomes: list[str]) -> None:
    record = handoff.publish()
    handoff.damage("mla", flip(at))
    assert [handoff.outcome(rank, record) for rank in range(4)] == outcomes
    handoff.damage("mla", flip(at))
    assert [handoff.outcome(rank, record) for rank in range(4)] == ["exact"] * 4


def test_rows_that_traded_places(handoff: Handoff) -> None:
    """Each is a row of this object, with its digest in the table."""
    record = handoff.publish()

    def trade(data: np.ndarray) -> np.ndarray:
        rows = data[: 48 * ROW].reshape(48, ROW)
        rows[[2, 4]] = rows[[4, 2]]
        return data

    handoff.damage("mla", trade)
    assert [handoff.outcome(rank, record) for rank in range(4)] == ["digest", "exact"] * 2
    assert "row 2 has another digest" in handoff.refused("digest")


def test_a_row_with_its_digest(handoff: Handoff) -> None:
    """A table that fits the rows is not the record's."""
    record = handoff.publish()

    def change(data: np.ndarray) -> np.ndarray:
        data[0] ^= 1
        data[48 * ROW :] = row_digests(data[: 48 * ROW].reshape(48, ROW)).reshape(-1)
        return data

    handoff.damage("mla", change)
    assert "the record says" in handoff.refused("digest")
    assert handoff.outcome(1, record) == "digest"


def test_a_null_row_with_right_digests(handoff: Handoff) -> None:
    record = handoff.publish()
    entries = list(record.ranks[0].objects)
    plan = plan_write(CASE.source, 0, LENGTH, CASE.packing)[1]

    def zero(data: np.ndarray) -> np.ndarray:
        data[3 * ROW + ROW // 2 : 4 * ROW] = 0  # token 3, the second layer
        data[48 * ROW :] = row_digests(data[: 48 * ROW].reshape(48, ROW)).reshape(-1)
        (unit,) = plan.units
        entries[1] = dataclasses.replace(entries[1], digests=(unit_digest(data[plan.table_of(unit)]),))
        return data

    handoff.damage("mla", zero)
    lie = dataclasses.replace(record, ranks=(RankEntry(0, "written", tuple(entries)), record.ranks[1]))
    assert "row 3, layer 4 is all zeros" in handoff.refused("null_state", record=lie)
    # Who does not own it does not read it.
    assert handoff.outcome(1, lie) == "exact"


def test_other_digests(handoff: Handoff) -> None:
    """A GPU's writer: ml64 of rows and table, checked here all the same; under the other's name refused."""
    record = handoff.publish()
    ranks = []
    for rank, of_rank in enumerate(record.ranks):
        kda, mla = of_rank.objects
        plan = plan_write(CASE.source, rank, LENGTH, CASE.packing)[1]
        data = handoff.store.objects[mla.key].data
        data[plan.payload :] = row_digests(data[: plan.payload].reshape(-1, ROW), ML64).reshape(-1)
        digests = tuple(unit_digest(data[plan.table_of(unit)], ML64) for unit in plan.units)
        ranks.append(
            RankEntry(rank, "written", (kda, dataclasses.replace(mla, digests=digests, digest=ML64)))
        )
    theirs = dataclasses.replace(record, ranks=tuple(ranks))
    assert [handoff.outcome(rank, theirs) for rank in range(4)] == ["exact"] * 4

    def named(record: BoundaryRecord, algorithm: str) -> BoundaryRecord:
        changed = [
            dataclasses.replace(
                of_rank,
                objects=(of_rank.objects[0], dataclasses.replace(of_rank.objects[1], digest=algorithm)),
            )
            for of_rank in record.ranks
        ]
        return dataclasses.replace(record, ranks=tuple(changed))

    assert handoff.outcome(0, named(theirs, XXH3)) == "digest"


def test_control_without_the_check_of_rows(handoff: Handoff, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the table that finds a wrong row."""
    record = handoff.publish()
    handoff.damage("mla", flip(3 * ROW))
    assert handoff.outcome(0, record) == "digest"
    monkeypatch.setattr(loading.Loader, "_check_some", lambda *_: None)
    assert handoff.outcome(0, record) == "wrong"
