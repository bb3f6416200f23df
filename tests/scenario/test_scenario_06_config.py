# SPDX-License-Identifier: Apache-2.0
"""Scenario 6, CONFIG DIGEST: state that means something else is refused by the field's name before a byte moves; state
that only lies elsewhere is mapped."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decode_worker import role as decode_role
from statestore.connector import loading
from statestore.reshard import plan
from tests.scenario.stack import Ask, Stack, Worker, failures, running

LENGTH = 70
REFUSED: dict[str, Any] = {
    "recurrent_dtype": "bfloat16",
    "conv_dtype": "bfloat16",
    "kv_cache_dtype": "float8_e4m3",
    "quantisation": "fp8",
    "conv_width": 5,
    "head_k": 8,
    "num_heads": 16,
    "latent_width": 12,
    "kda_layers": (0, 1, 3),
    "layout_version": 99,
}
MAPPED: dict[str, dict[str, Any]] = {
    "block size": {"engine": {"block_size": 16}},
    "larger blocks": {"engine": {"block_size": 64}},
    "interleave": {"tp": 4, "dcp": 4, "dcp_interleave": 8},
    "interleave 1": {"tp": 4, "dcp": 2, "dcp_interleave": 1},
    "tp": {"tp": 2},
}


@pytest.fixture
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    """A prefill worker whose records say that one field of its cache is another one."""
    name = request.param
    async with running() as made:
        prefill = Worker(made, "prefill", {})
        values = {name: REFUSED[name], "page_bytes": 1 << 20}
        prefill.published_geometry = dataclasses.replace(prefill.geometry, **values)
        await made.start(prefill)
        await made.add("decode")
        yield made


async def handed_over(stack: Stack) -> tuple[Ask, int]:
    """The request, and how often the decode worker read from the store."""
    stack.store.calls.clear()
    ask = await stack.run(stack.prompt(LENGTH))
    return ask, stack.store.calls["get"]


@pytest.mark.parametrize("pair", sorted(REFUSED), indirect=True)
async def test_another_meaning_is_refused_by_name(
    pair: Stack, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    field = request.node.callspec.params["pair"]
    before = failures("load", "geometry")
    ask, reads = await handed_over(pair)
    assert pair.is_right(ask)
    assert failures("load", "geometry") == before + 1
    assert reads == 0, "a byte moved before the refusal"
    assert f"geometry field {field} differs" in caplog.text
    assert pair.trace(ask)["failure"] == "geometry"


@pytest.mark.parametrize("layout", sorted(MAPPED))
async def test_another_place_is_mapped(layout: str) -> None:
    changes = dict(MAPPED[layout])
    async with running() as stack:
        await stack.add("prefill")
        await stack.add("decode", changes.pop("engine", None), **changes)
        ask = await stack.run(stack.prompt(LENGTH))
        assert stack.is_right(ask)
        assert stack.trace(ask)["from_store"] == LENGTH - 1


@pytest.mark.parametrize("pair", ["quantisation"], indirect=True)
async def test_control_without_the_comparison(pair: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (decode_role, plan, loading):
        monkeypatch.setattr(module, "compatible", lambda source, target: None, raising=False)
    ask, reads = await handed_over(pair)
    assert reads > 0
    assert pair.trace(ask)["from_store"] == LENGTH - 1
