# SPDX-License-Identifier: Apache-2.0
"""Capacity planning says the bytes that the geometry says, and those of a formula written out here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.helm import capacity
from deploy.helm.capacity import SHAPES, kv_cache_bytes, plan, shape_of
from statestore.geometry import GeometryError
from tests.unit.deploy.rendering import EXAMPLES, ROOT, example

MODEL_OF = {"laptop-cpu": str(ROOT / "models" / "demo"), "h200x8": "kimi-linear", "k3-b300": "kimi-k3"}


@pytest.mark.parametrize(
    ("name", "layers", "latent"), [("kimi-k3", (69, 24, 96), 576), ("kimi-linear", (20, 7, 32), 576)]
)
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (8, 1), (8, 8)])
def test_the_bytes_are_those_of_the_formula(
    name: str, layers: tuple[int, int, int], latent: int, tp: int, dcp: int
) -> None:
    kda, mla, heads = layers
    found = plan(SHAPES[name], 8192, tp, dcp)
    # fp32 recurrent state [V, K] a head, and three bf16 columns of q, k and v.
    assert found.state == kda * heads * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert found.token == mla * latent * 2
    assert found.boundary == found.state + 8192 * found.token
    assert found.floors[100] == pytest.approx(found.boundary * 8 / 100e9)


def test_the_numbers_that_the_design_rests_on() -> None:
    k3, linear = plan(SHAPES["kimi-k3"], 8192, 8), plan(SHAPES["kimi-linear"], 8192)
    assert (k3.state, k3.token, k3.boundary) == (449_372_160, 27_648, 675_864_576)
    assert (linear.state, linear.token, linear.boundary) == (43_417_600, 8_064, 109_477_888)
    assert k3.floors == {100: pytest.approx(0.0541, abs=1e-4), 400: pytest.approx(0.0135, abs=1e-4)}
    assert plan(SHAPES["kimi-k3"], 8192, kv_dtype="float8_e4m3").token == 13_824


def test_dcp_divides_the_tokens_and_not_the_state() -> None:
    alone, divided = (plan(SHAPES["kimi-k3"], 120_000, 8, dcp) for dcp in (1, 8))
    saved = alone.rank_cache - divided.rank_cache
    assert saved == 120_000 * 27_648 * 7 // 8


def test_a_layout_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GeometryError, match="tp=5"):
        plan(SHAPES["kimi-k3"], 8192, tp=5)
    assert capacity.main(["--model", "kimi-linear", "--tp", "8", "--dcp", "3"]) == 2
    assert "dcp=3 does not divide tp=8" in capsys.readouterr().err


def test_a_device_without_room_is_refused() -> None:
    assert kv_cache_bytes(141, 92, 2) == int((0.95 * 141 - 46 - 12) * 2**30)
    with pytest.raises(ValueError, match="raise tp"):
        kv_cache_bytes(80, 92, 1)


def test_a_model_folder_gives_its_own_shape() -> None:
    shape = shape_of(str(ROOT / "models" / "demo"))
    assert (shape.kda_layers, shape.mla_layers, shape.heads, shape.latent_width) == (6, 2, 4, 576)


def test_the_report_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        capacity.main(["--tokens", "8192", "--dcp", "8", "--device-gib", "288", "--weights-gib", "600"]) == 0
    )
    text = capsys.readouterr().out
    for number in ("449,372,160", "56,171,520 a rank", "27,648", "676 MB", "54.1 ms", "13.5 ms"):
        assert number in text


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_lends_enough_for_its_longest_prompts(name: str) -> None:
    values = example(name)
    shape = shape_of(MODEL_OF[name])
    assert values["model"]["heads"] == shape.heads
    for pool in values["versions"][0]["pools"]:
        if pool["role"] == "decode":
            one = plan(shape, values["model"]["maxLen"], pool["tp"], pool.get("dcp", 1)).boundary
            assert pool["segmentBytes"] >= 8 * one, (
                f"{pool['name']}: room for {pool['segmentBytes'] / one:.1f} boundaries"
            )


def table_of(text: str) -> dict[str, list[str]]:
    """Rows of the table of capacities, by their first cell."""
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


def expected_table() -> dict[str, list[str]]:
    """The table that docs/operate.md must have."""
    shapes = (SHAPES["kimi-k3"], SHAPES["kimi-linear"])
    short, long = ([plan(shape, tokens, 8, 8) for shape in shapes] for tokens in (8192, 131_072))
    gigabytes = [f"{each.boundary / 1e6:,.0f} MB" for each in short]
    return {
        "KDA state of a sequence": [f"{each.state:,}" for each in short],
        "MLA rows of a token, bf16": [f"{each.token:,}" for each in short],
        "handoff of 8,192 tokens": gigabytes,
        "handoff of 131,072 tokens": [f"{each.boundary / 1e6:,.0f} MB" for each in long],
        "the same at 100 Gb/s, at least": [f"{each.floors[100] * 1e3:,.0f} ms" for each in long],
        "the same at 400 Gb/s, at least": [f"{each.floors[400] * 1e3:,.0f} ms" for each in long],
        "cache of a TP8 rank for one such sequence": [
            f"{plan(s, 131_072, 8).rank_cache / 1e6:,.0f} MB" for s in shapes
        ],
        "cache of a TP8+DCP8 rank for one such sequence": [
            f"{each.rank_cache / 1e6:,.0f} MB" for each in long
        ],
    }


def test_the_page_has_the_numbers_of_the_geometry() -> None:
    found = table_of(Path(ROOT / "docs" / "operate.md").read_text(encoding="utf-8"))
    for row, cells in expected_table().items():
        assert found.get(row) == cells, row


def test_a_wrong_number_on_the_page_is_found() -> None:
    text = Path(ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    damaged = table_of(re.sub("449,372,160", "449,372,161", text))
    assert any(damaged.get(row) != cells for row, cells in expected_table().items())
