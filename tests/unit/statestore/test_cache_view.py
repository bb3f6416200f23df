# SPDX-License-Identifier: Apache-2.0
"""The view of a rank's caches reads and writes the state and nothing else, or refuses caches that it does not know.

Between two geometries: tests/property/test_reshard_caches.py.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from statestore.connector.cache_view import CacheView
from statestore.connector.describe import NotHybrid
from statestore.connector.device_copies import KERNELS_VARIABLE
from statestore.connector.host_copies import HostCopies
from statestore.geometry import Geometry
from statestore.reshard import head_bytes, row_bytes
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import geometry
from tests.property.reshard_reference import World, owners

LENGTH = 40
LAYOUTS = [
    {"conv_layout": "SD", "num_spec": 0},
    {"conv_layout": "SD", "num_spec": 3},
    {"conv_layout": "DS", "num_spec": 0},
    {"conv_layout": "DS", "num_spec": 3},
    {"conv_layout": "DS", "num_spec": 1, "recurrent_dtype": "bfloat16", "kv_cache_dtype": "float8_e4m3"},
]


def rank_caches(g: Geometry, block_major: bool = False) -> RankCaches:
    return RankCaches(g, blocks_for(g, LENGTH), block_major)


def view_of(caches: RankCaches, **seen: Any) -> CacheView:
    return CacheView(caches.caches, caches.config, dataclasses.replace(caches.geometry, **seen))


def with_copies(view: CacheView, copies: str) -> CacheView:
    """A view whose caches are in host memory, or one that copies as if they were on a device."""
    assert view._host is not None
    if copies == "device":
        view._host = None
    return view


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("copies", ["host", "device"])
def test_some_heads_and_some_layers(layout: dict[str, Any], copies: str) -> None:
    g = geometry(tp=4, dcp=2, interleave=8, head_v=4, **layout)
    world = World.random(g, LENGTH)
    caches = rank_caches(g)
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 1, tables)
    view = with_copies(view_of(caches), copies)
    layers = len(g.kda_layers)
    out = np.full(2 * head_bytes(g), 0xEE, np.uint8)
    view.gatherer(tables, out, 3, 2)(range(1, layers))
    whole = np.frombuffer(world.head(15) + world.head(16), np.uint8).reshape(2, layers, -1)
    found = out.reshape(2, layers, -1)
    assert (found[:, 1:] == whole[:, 1:]).all()
    assert (found[:, 0] == 0xEE).all(), "what was not asked for stays"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("copies", ["host", "device"])
def test_gather_is_the_objects_bytes(layout: dict[str, Any], block_major: bool, copies: str) -> None:
    g = geometry(tp=4, dcp=2, interleave=8, head_v=4, **layout)
    world = World.random(g, LENGTH)
    caches = rank_caches(g, block_major)
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 3, tables)
    view = with_copies(view_of(caches), copies)
    heads = np.empty(g.heads_per_rank * head_bytes(g), np.uint8)
    view.gather_heads(tables, heads)
    assert heads.tobytes() == b"".join(world.head(head) for head in range(36, 48))
    mine = np.flatnonzero(owners(LENGTH, 2, 8) == 1)[::-1]
    rows = np.empty(len(mine) * row_bytes(g), np.uint8)
    view.gather_rows(tables, mine, rows)
    assert rows.tobytes() == b"".join(world.token(token) for token in mine)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("block_major", [False, True])
@pytest.mark.parametrize("copies", ["host", "device"])
def test_scatter_writes_the_state_and_nothing_else(
    layout: dict[str, Any], block_major: bool, copies: str
) -> None:
    """Padding, speculative columns, other blocks, the null block and other heads keep what they had."""
    g = geometry(tp=4, dcp=2, interleave=8, head_v=4, **layout)
    world = World.random(g, LENGTH)
    caches, expected = rank_caches(g, block_major), rank_caches(g, block_major)
    tables = caches.tables(LENGTH)
    expected.lay_out(world, 2, tables)
    view = with_copies(view_of(caches), copies)
    # The head in the middle first, then both sides: runs of heads from different writers.
    for first, count in ((5, 1), (0, 5), (6, 6)):
        data = b"".join(world.head(24 + head) for head in range(first, first + count))
        view.scatter_heads(tables, first, count, np.frombuffer(bytearray(data), np.uint8))
    mine = np.flatnonzero(owners(LENGTH, 2, 8) == 0)
    for tokens in (mine[10:], mine[:10]):
        data = b"".join(world.token(token) for token in tokens)
        view.scatter_rows(tables, tokens, np.frombuffer(bytearray(data), np.uint8))
    assert (caches.memory == expected.memory).all()
    # Control: one head less is seen.
    view.scatter_heads(tables, 0, 1, np.zeros(head_bytes(g), np.uint8))
    assert not (caches.memory == expected.memory).all()


@pytest.mark.parametrize("wrong", [{"conv_layout": "DS"}, {"num_spec": 1}, {"interleave": 4}], ids=str)
def test_a_wrong_geometry_gathers_other_bytes(wrong: dict[str, Any]) -> None:
    """Control: the comparison depends on every part of the layout."""
    g = geometry(tp=4, dcp=2, interleave=8, head_v=4, num_spec=2)
    world = World.random(g, LENGTH)
    caches = rank_caches(g)
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 0, tables)
    mine = np.flatnonzero(owners(LENGTH, 2, 8) == 0)
    gathered = []
    for view in (view_of(caches), view_of(caches, **wrong)):
        heads = np.empty(g.heads_per_rank * head_bytes(g), np.uint8)
        rows = np.empty(len(mine) * row_bytes(g), np.uint8)
        view.gather_heads(tables, heads)
        view.gather_rows(tables, mine, rows)
        gathered.append(heads.tobytes() + rows.tobytes())
    assert gathered[0] != gathered[1]


def test_staging_may_begin_at_any_byte() -> None:
    g = geometry(tp=4, head_v=4, kv_cache_dtype="float8_e4m3", latent_width=5)
    world = World.random(g, LENGTH)
    caches = rank_caches(g)
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 0, tables)
    staging = np.empty(1 + g.heads_per_rank * head_bytes(g), np.uint8)
    view_of(caches).gather_heads(tables, staging[1:])
    assert staging[1:].tobytes() == b"".join(world.head(head) for head in range(12))


def test_three_dimensional_rows_are_rows() -> None:
    """Some attention backends register latent rows without the axis of their one head."""
    g = geometry(tp=1, head_v=4)
    world = World.random(g, LENGTH)
    caches = rank_caches(g)
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 0, tables)
    caches.caches = {n: c.squeeze(1) if n.endswith("attn") else c for n, c in caches.caches.items()}
    rows = np.empty(LENGTH * row_bytes(g), np.uint8)
    view_of(caches).gather_rows(tables, np.arange(LENGTH), rows)
    assert rows.tobytes() == b"".join(world.token(token) for token in range(LENGTH))


def test_blocks_needed_counts_dcp() -> None:
    g = geometry(tp=4, dcp=4, head_v=4)
    caches = rank_caches(g)
    view = view_of(caches)
    mla = caches.mla_group
    assert view.block_count == caches.blocks
    assert view.blocks_needed(64) == {0: 1, 1: 1, mla: 1}
    assert view.blocks_needed(65) == {0: 1, 1: 1, mla: 2}


def test_a_table_that_is_too_short_is_refused() -> None:
    """Negative indices would wrap to another request's block."""
    g = geometry(tp=1, head_v=4)
    caches = rank_caches(g)
    tables = caches.tables(16)
    with pytest.raises(IndexError, match="block table has 1 blocks"):
        view_of(caches).gather_rows(tables, np.arange(17), np.empty(17 * row_bytes(g), np.uint8))


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ({"block_size": 32}, "expected blocks of"),
        ({"latent_width": 4}, "expected blocks of"),
        ({"num_heads": 96}, "layers.0.kda has pages of .* smaller than its state"),
    ],
)
def test_caches_of_another_shape_are_refused(seen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        view_of(rank_caches(geometry(tp=1, head_v=4)), **seen)


def test_a_model_that_is_not_hybrid_is_refused() -> None:
    caches = rank_caches(geometry(tp=1, head_v=4))
    caches.config = SimpleNamespace(kv_cache_groups=caches.config.kv_cache_groups[:1])
    with pytest.raises(NotHybrid, match="0 attention layers"):
        view_of(caches)


def test_no_fence_is_needed_on_a_cpu() -> None:
    assert view_of(rank_caches(geometry(tp=1, head_v=4))).fence() is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_layers_of_two_groups_have_rows_at_different_places(order: tuple[int, int]) -> None:
    rng = np.random.default_rng(7)
    layers = [torch.from_numpy(rng.integers(0, 255, (6, 8, 4), np.uint8)) for _ in range(2)]
    runs = (np.repeat([1, 4], 8), np.tile(np.arange(8), 2))
    scattered = (rng.permutation(16) % 5 + 1, rng.permutation(16) % 8)
    tables = [(runs, scattered)[which] for which in order]
    copies = HostCopies(geometry(), [], list(enumerate(layers)))
    out = np.zeros((16, 2, 4), np.uint8)
    copies.gather_rows(tables, out.reshape(-1))
    for layer, (ids, rows) in enumerate(tables):
        assert (out[:, layer] == layers[layer].numpy()[ids, rows]).all()
    targets = [torch.zeros_like(layer) for layer in layers]
    HostCopies(geometry(), [], list(enumerate(targets))).scatter_rows(tables, out.reshape(-1))
    for target, layer, (ids, rows) in zip(targets, layers, tables, strict=True):
        assert (target.numpy()[ids, rows] == layer.numpy()[ids, rows]).all()
        assert target.count_nonzero() <= 16 * 4, "and nothing else is written"


def test_a_choice_of_kernels_is_yes_or_no(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "0", "1"):
        monkeypatch.setenv(KERNELS_VARIABLE, value)
        view_of(rank_caches(geometry(tp=1, head_v=4)))
    monkeypatch.setenv(KERNELS_VARIABLE, "yes")
    with pytest.raises(ValueError, match="DELTASERVE_STATE_KERNELS='yes': 1 or nothing copies by kernels"):
        view_of(rank_caches(geometry(tp=1, head_v=4)))
