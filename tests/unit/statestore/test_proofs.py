# SPDX-License-Identifier: Apache-2.0
"""One pass finds what the checks find, and gives the digests that they compare; damage in every tile and at edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from statestore.connector import proofs
from statestore.connector.checks import VerificationFailed
from statestore.connector.proofs import HeadsProof, RowsProof
from statestore.digest import row_digests, unit_digest
from statestore.reshard import Unit, head_bytes, row_bytes
from tests.property.reshard_cases import geometry
from tests.support.state_checks import check_heads, check_rows

G = geometry(tp=2, head_v=4, kda_layers=(0, 1, 2, 4, 5), mla_layers=(3, 6))
HEADS = 3
ROWS = 20
NAN = np.array([0xFF, 0x7F, 0xFF, 0x7F], np.uint8)
"""Not a number in float32, bfloat16 and float16."""


@pytest.fixture(autouse=True, params=[1, 1 << 9, 1 << 30], ids=["tiny", "some", "whole"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one layer or row, of some, and of everything."""
    monkeypatch.setattr(proofs, "_TILE", request.param)


def state(nbytes: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Numbers that are finite in every dtype here."""
    numbers = np.random.default_rng(seed).integers(0, 1 << 16, nbytes // 2, dtype=np.uint16) & 0x3FFF
    return numbers.view(np.uint8)


def found(proof: HeadsProof | RowsProof) -> tuple[str, str]:
    proof.take_all()
    return (proof.problem.kind, str(proof.problem)) if proof.problem else ("", "")


def expected(check: Any) -> tuple[str, str]:
    try:
        check()
    except VerificationFailed as failed:
        return failed.kind, str(failed)
    return "", ""


def test_digests_are_those_of_the_units() -> None:
    data = state(HEADS * head_bytes(G))
    proof = HeadsProof(data, HEADS, G, 5)
    assert found(proof) == ("", "")
    assert proof.digests() == tuple(unit_digest(head) for head in data.reshape(HEADS, -1))
    size = row_bytes(G)
    rows = state(ROWS * size)
    units = [Unit(0, 7 * size, 0, 7, 0), Unit(7 * size, 13 * size, 7, 13, 1)]
    of_rows = RowsProof(rows, units, G, finite=True)
    assert found(of_rows) == ("", "")
    table = row_digests(rows.reshape(ROWS, -1))
    assert (of_rows.table == table).all()
    assert of_rows.digests() == (unit_digest(table[:7]), unit_digest(table[7:]))
    rows[9 * size] ^= 1
    changed = RowsProof(rows, units, G, finite=True)
    changed.take_all()
    assert changed.digests()[0] == of_rows.digests()[0]
    assert changed.digests()[1] != of_rows.digests()[1]


@pytest.mark.parametrize("layer", range(5))
@pytest.mark.parametrize("head", range(HEADS))
@pytest.mark.parametrize("damage", ["null", "late", "nan", "conv nan"])
def test_heads(damage: str, head: int, layer: int) -> None:
    data = state(HEADS * head_bytes(G))
    one = data.reshape(HEADS, 5, -1)[head, layer]
    recurrent = G.head_v * G.head_k * G.recurrent_bytes
    if damage == "null":
        one[:recurrent] = 0
    elif damage == "late":
        one[: recurrent - 1] = 0  # all but the last byte: not null
        one[recurrent - 1] = 1
    elif damage == "nan":
        one[recurrent - 4 : recurrent] = NAN
    else:
        one[-4:] = NAN
    assert found(HeadsProof(data, HEADS, G, 7)) == expected(lambda: check_heads(data, HEADS, G, 7))
    assert (found(HeadsProof(data, HEADS, G))[0] == "") == (damage == "late")


@pytest.mark.parametrize("row", [0, 6, 7, ROWS - 1])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("damage", ["null", "nan"])
def test_rows(damage: str, finite: bool, layer: int, row: int) -> None:
    size = row_bytes(G)
    data = state(ROWS * size)
    one = data.reshape(ROWS, 2, -1)[row, layer]
    one[:] = 0
    if damage == "nan":
        one[-4:] = NAN
    units = [Unit(0, ROWS * size, 0, ROWS, 0)]
    assert found(RowsProof(data, units, G, finite)) == expected(lambda: check_rows(data, G, finite))
    assert (found(RowsProof(data, units, G, finite))[0] == "") == (damage == "nan" and not finite)
