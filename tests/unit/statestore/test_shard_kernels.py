# SPDX-License-Identifier: Apache-2.0
"""The kernels against the CPU's copies and digests, bit for bit; on a GPU, or under Triton's interpreter
(TRITON_INTERPRET=1) on a CPU, which test_shard_kernels_interpreted.py runs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from statestore.checksum import checksum, finish
from statestore.connector import cache_view
from statestore.connector.cache_view import CacheView
from statestore.connector.device_copies import DeviceCopies
from statestore.connector.device_proofs import HeadSums, RowSums, heads_problem
from statestore.connector.loading import _runs
from statestore.connector.store_ahead import PIECE
from statestore.digest import ML64, XXH3
from statestore.geometry import Geometry
from statestore.reshard import (
    CHUNK,
    Packing,
    head_bytes,
    mla_units,
    plan_read_chain,
    row_bytes,
    row_tokens,
)
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import Case, geometry
from tests.property.reshard_reference import World, owners
from tests.unit.statestore import test_publish_load
from tests.unit.statestore.test_publish_load import Handoff

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
pytestmark = pytest.mark.skipif(not (GPU or INTERPRETED), reason="no GPU, and TRITON_INTERPRET is not 1")

LENGTH = 40
SMALL: dict[str, Any] = {"num_heads": 8, "head_k": 4, "head_v": 8, "latent_width": 36}
LAYOUTS: list[dict[str, Any]] = [
    {"conv_layout": "SD", "num_spec": 0},
    {"conv_layout": "DS", "num_spec": 3},
    {"conv_layout": "DS", "num_spec": 0, "conv_dtype": "float32"},
    {
        "conv_layout": "SD",
        "num_spec": 1,
        "recurrent_dtype": "bfloat16",
        "kv_cache_dtype": "float8_e4m3",
        "latent_width": 24,
    },
]


def device_view(caches: dict[str, torch.Tensor], config: Any, g: Geometry) -> CacheView:
    """A view whose copies are the kernels', also where the caches are host memory."""
    from statestore.gpu.launch import ShardKernels, refusal

    view = CacheView(caches, config, g)
    assert refusal(g, view._kda, view._mla) == ""
    view._host = None
    view._device = DeviceCopies(g, view._kda, view._mla, ShardKernels(g, view._kda, view._mla))
    return view


def on_device(caches: RankCaches) -> tuple[torch.Tensor, CacheView]:
    """The rank's memory where the kernels run, and a view of it."""
    memory = torch.from_numpy(caches.memory)
    memory = memory.cuda() if GPU else memory
    moved = {}
    for name, cache in caches.caches.items():
        moved[name] = memory.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return memory, device_view(moved, caches.config, caches.geometry)


@pytest.mark.parametrize(
    ("layout", "dcp", "interleave", "block_major"),
    [
        (LAYOUTS[0], 1, 1, False),
        (LAYOUTS[1], 2, 1, True),
        (LAYOUTS[2], 2, 8, False),
        (LAYOUTS[3], 4, 1, False),
        (LAYOUTS[1], 8, 1, False),
        (LAYOUTS[0], 8, 4, True),
    ],
)
def test_gather_scatter_and_digests_are_the_cpus(
    layout: dict[str, Any], dcp: int, interleave: int, block_major: bool
) -> None:
    g = geometry(tp=8, dcp=dcp, interleave=interleave, **{**SMALL, **layout})
    rank, world = 5, World.random(g, LENGTH)
    full, empty = (RankCaches(g, blocks_for(g, LENGTH), block_major) for _ in range(2))
    tables = full.tables(LENGTH)
    full.lay_out(world, rank, tables)
    _, view = on_device(full)
    head = np.zeros(head_bytes(g), np.uint8)
    found = view.prove_heads(tables, head, 0)
    assert head.tobytes() == world.head(rank)
    assert [finish(one, head_bytes(g)) for one in found.sums] == [checksum(world.head(rank))]

    mine = np.flatnonzero(owners(LENGTH, dcp, interleave) == rank % dcp)[::-1].copy()
    rows = np.zeros(len(mine) * row_bytes(g), np.uint8)
    units = np.stack([np.arange(len(mine)) // 3, np.arange(len(mine)) % 3])
    found_rows = view.prove_rows(tables, mine, rows, units)
    tokens = [world.token(int(token)) for token in mine]
    assert rows.tobytes() == b"".join(tokens)
    for number, total in enumerate(found_rows.sums):
        unit = b"".join(tokens[3 * number : 3 * number + 3])
        assert finish(total, len(unit)) == checksum(unit)

    memory, view = on_device(empty)
    looked, copy = view.check_heads(head)
    assert looked == found
    view.scatter_heads(tables, 0, 1, copy)
    view.scatter_rows(tables, mine, rows)
    assert (memory.cpu().numpy() == full.memory).all()
    # Control: a bit that is not what was gathered is another digest.
    head[-1] ^= 1
    assert view.check_heads(head)[0].sums != found.sums


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_of_layers_are_parts_of_heads_and_their_sums_add_up(layout: dict[str, Any]) -> None:
    g = geometry(tp=4, **{**SMALL, **layout})
    world, rank = World.random(g, LENGTH), 1
    caches = RankCaches(g, blocks_for(g, LENGTH))
    tables = caches.tables(LENGTH)
    caches.lay_out(world, rank, tables)
    _, view = on_device(caches)
    layers, size = len(g.kda_layers), head_bytes(g)
    each = size // layers
    sums = HeadSums(2, g)
    for group in (range(1), range(1, layers)):
        piece = np.zeros(2 * len(group) * each, np.uint8)
        found = view.prove_heads(tables, piece, 0, group)
        assert (found.null, found.not_finite, found.conv_not_finite) == (None, None, None)
        sums.add(0, found)
        for head, data in enumerate(piece.reshape(2, -1)):
            whole = world.head(2 * rank + head)
            assert data.tobytes() == whole[group.start * each : group.stop * each]
    wanted = tuple(checksum(world.head(2 * rank + head)) for head in range(2))
    assert sums.digests() == wanted
    # Control: the same layers in the places of others are another digest.
    sums = HeadSums(2, g)
    for group in (range(1), range(1)):
        sums.add(0, view.prove_heads(tables, np.zeros(2 * each, np.uint8), 0, group))
    assert sums.digests() != wanted


def test_a_null_layer_of_a_group_is_named() -> None:
    g = geometry(tp=4, **SMALL)
    caches = RankCaches(g, blocks_for(g, LENGTH))
    tables = caches.tables(LENGTH)
    caches.lay_out(World.random(g, LENGTH), 1, tables)
    _, view = on_device(caches)
    layers = len(g.kda_layers)
    group = range(layers - 2, layers)
    _, _, states = view._kda[layers - 1]
    states[tables[view._kda[layers - 1][0]][0], 1] = 0
    each = head_bytes(g) // layers
    found = view.prove_heads(tables, np.zeros(2 * 2 * each, np.uint8), 0, group)
    problem = heads_problem(found, g, 2, group)
    assert problem is not None
    assert str(problem) == f"KDA state of head 3, layer {g.kda_layers[-1]} is all zeros"


def test_what_no_state_can_be_is_found_and_where() -> None:
    g = geometry(tp=4, **SMALL)
    world = World.random(g, LENGTH)
    caches = RankCaches(g, blocks_for(g, LENGTH))
    tables = caches.tables(LENGTH)
    caches.lay_out(world, 1, tables)
    _, view = on_device(caches)
    heads = np.zeros(2 * head_bytes(g), np.uint8)
    sound = view.prove_heads(tables, heads, 0)
    assert (sound.null, sound.not_finite, sound.conv_not_finite) == (None, None, None)
    layers, layer = len(g.kda_layers), head_bytes(g) // len(g.kda_layers)
    recurrent = g.head_v * g.head_k * 4

    def look(at: int, change: bytes) -> Any:
        changed = heads.copy()
        changed[at : at + len(change)] = np.frombuffer(change, np.uint8)
        return view.check_heads(changed)[0]

    assert look(head_bytes(g) + layer, bytes(recurrent)).null == layers + 1
    # A state that begins with zeros is none of them.
    assert look(head_bytes(g) + layer, bytes(recurrent - 8)).null is None
    assert look(2 * layer + 4, b"\x00\x00\x80\x7f").not_finite == 2
    assert look(layer - 2, b"\xc0\x7f").conv_not_finite == 0
    assert look(layer - 2, b"\x7f\x7f").conv_not_finite is None

    rows = np.zeros(4 * row_bytes(g), np.uint8)
    view.prove_rows(tables, np.arange(4), rows, np.stack([np.zeros(4, int), np.arange(4)]))
    bad = rows.copy()
    bad[3 * g.latent_row_bytes : 4 * g.latent_row_bytes] = 0
    bad[5 * g.latent_row_bytes : 5 * g.latent_row_bytes + 2] = np.frombuffer(b"\x80\xff", np.uint8)
    found = view.check_rows(bad)[0]
    assert (found.null, found.not_finite) == (3, 5)
    found = view.check_rows(rows)[0]
    assert (found.null, found.not_finite) == (None, None)


def test_pieces_of_units_add_up() -> None:
    g = geometry(tp=1, **SMALL)
    world, length = World.random(g, LENGTH), LENGTH
    caches = RankCaches(g, blocks_for(g, length))
    tables = caches.tables(length)
    caches.lay_out(world, 0, tables)
    _, view = on_device(caches)
    tokens = row_tokens(np.arange(length), Packing(4, 1))
    units = mla_units(g, tokens, Packing(4, 1))
    sums, whole = RowSums(length, row_bytes(g)), [world.token(int(token)) for token in tokens]
    for low, high in ((0, 7), (7, 23), (23, length)):
        piece = np.zeros((high - low) * row_bytes(g), np.uint8)
        sums.add(low, view.prove_rows(tables, tokens[low:high], piece, sums.places(high - low)))
    table = b"".join(int(checksum(row), 16).to_bytes(8, "little") for row in whole)
    assert sums.table.tobytes() == table
    assert sums.digests(units) == tuple(checksum(table[8 * u.first : 8 * (u.first + u.count)]) for u in units)


@pytest.mark.parametrize(("writer", "reader"), [(ML64, ML64), (ML64, XXH3), (XXH3, ML64)])
@pytest.mark.skipif(GPU, reason="its caches are host memory")
def test_either_kind_reads_what_either_has_written(
    writer: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(
        geometry(tp=2, **SMALL),
        geometry(tp=4, dcp=2, interleave=8, block_size=32, conv_layout="DS", **SMALL),
        LENGTH,
        Packing(2, 8),
    )
    handoff = Handoff(case)

    def use(kind: str) -> None:
        view = device_view if kind == ML64 else cache_view.CacheView
        monkeypatch.setattr(test_publish_load, "CacheView", view)

    use(writer)
    record = handoff.publish()
    assert {entry.digest for entry in record.objects()} == {writer}
    use(reader)
    for rank in (0, 3):
        assert handoff.is_exact(rank, handoff.load(rank, record))

    def flip(data: np.ndarray) -> np.ndarray:
        data[len(data) // 3] ^= 1
        return data

    for group in ("mla", "kda"):
        handoff.damage(group, flip)
        handoff.refused("digest")
        handoff.damage(group, flip)
    assert handoff.outcome(0, record) == "exact"


@pytest.mark.skipif(GPU, reason="its caches are host memory")
def test_units_of_rows_are_checked_and_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls as bytes need, and the unit that is damaged is still the one that is named."""
    monkeypatch.setattr(test_publish_load, "CacheView", device_view)
    length = 2 * CHUNK + 30
    handoff = Handoff(Case(geometry(tp=1, **SMALL), geometry(tp=1, **SMALL), length, Packing(1, 1)))
    record = handoff.publish()
    pieces = plan_read_chain((record,), geometry(tp=1, **SMALL), 0, 0).pieces
    rows = [len(run) for run in _runs(pieces, PIECE, rows_together=True) if run[0].tokens is not None]
    assert rows == [3]
    assert [len(run) for run in _runs(pieces, PIECE) if run[0].tokens is not None] == [1, 1, 1]
    size = pieces[-1].row_bytes
    few = [len(run) for run in _runs(pieces, 2 * CHUNK * size, True) if run[0].tokens is not None]
    assert few == [2, 1], "the limit holds"
    assert handoff.is_exact(0, handoff.load(0, record))
    for row in (0, CHUNK, 2 * CHUNK + 29):

        def flip(data: np.ndarray, at: int = row * size + 3) -> np.ndarray:
            data[at] ^= 1
            return data

        handoff.damage("mla", flip)
        handoff.refused("digest")
        handoff.damage("mla", flip)
    assert handoff.outcome(0, record) == "exact"


def test_caches_that_are_not_whole_words_are_refused_by_name() -> None:
    from statestore.gpu.launch import refusal

    for changes, words in (({"head_k": 2}, "key channels"), ({"latent_width": 3}, "latent row")):
        g = geometry(tp=4, **{**SMALL, **changes})
        caches = RankCaches(g, blocks_for(g, LENGTH))
        view = CacheView(caches.caches, caches.config, g)
        assert words in refusal(g, view._kda, view._mla)
