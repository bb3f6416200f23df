# SPDX-License-Identifier: Apache-2.0
"""What is gathered from a GPU's caches is what is gathered from host memory, bit for bit, and scatter writes no more.

The copies themselves are tested on the CPU in test_cache_view.py; here they run where streams and devices are real.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from statestore.connector.cache_view import CacheView
from statestore.connector.device_copies import Spares, pin
from statestore.pool import PoolUnavailable
from statestore.reshard import head_bytes, row_bytes
from statestore.staging import Staging
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import geometry
from tests.property.reshard_reference import World, owners

LENGTH = 40
LAYOUTS = [
    {"conv_layout": "SD", "num_spec": 0},
    {"conv_layout": "DS", "num_spec": 3},
    {"conv_layout": "SD", "num_spec": 1, "recurrent_dtype": "bfloat16", "kv_cache_dtype": "float8_e4m3"},
]


class _Anything:
    """A pool that takes any memory, and has no late calls."""

    def register(self, buffer: Any) -> None:
        pass

    def unregister(self, buffer: Any) -> None:
        pass

    def busy(self, buffer: Any) -> bool:
        return False


def on_device(caches: RankCaches) -> tuple[torch.Tensor, CacheView]:
    """A copy of the rank's memory on the GPU, and its caches there."""
    memory = torch.from_numpy(caches.memory).cuda()
    moved = {}
    for name, cache in caches.caches.items():
        whole = memory.view(cache.dtype)
        moved[name] = whole.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    return memory, CacheView(moved, caches.config, caches.geometry)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("block_major", [False, True])
def test_device_and_host_agree(
    layout: dict[str, Any], block_major: bool, request: pytest.FixtureRequest
) -> None:
    g = geometry(tp=4, dcp=2, interleave=8, head_v=4, **layout)
    world = World.random(g, LENGTH)
    full, empty = (RankCaches(g, blocks_for(g, LENGTH), block_major) for _ in range(2))
    tables = full.tables(LENGTH)
    full.lay_out(world, 3, tables)
    staging = Staging(_Anything(), 1 << 20, partial(pin, torch.device("cuda:0")))  # type: ignore[arg-type]
    request.addfinalizer(staging.close)
    mine = np.flatnonzero(owners(LENGTH, 2, 8) == 1)[::-1].copy()
    heads = staging.acquire(g.heads_per_rank * head_bytes(g), 1.0).view
    rows = staging.acquire(len(mine) * row_bytes(g), 1.0).view

    _, view = on_device(full)
    assert not view.on_host
    view.fence().synchronize()
    view.gather_heads(tables, heads)
    view.gather_rows(tables, mine, rows)
    assert heads.tobytes() == b"".join(world.head(head) for head in range(36, 48))
    assert rows.tobytes() == b"".join(world.token(token) for token in mine)

    memory, view = on_device(empty)
    view.scatter_heads(tables, 0, g.heads_per_rank, heads)
    view.scatter_rows(tables, mine, rows)
    assert (memory.cpu().numpy() == full.memory).all()
    # Control: one byte elsewhere is seen.
    memory[0] ^= 1
    assert not (memory.cpu().numpy() == full.memory).all()


class _Refuses(_Anything):
    """A pool that is away."""

    def register(self, buffer: Any) -> None:
        raise PoolUnavailable("away")


@pytest.mark.parametrize("pool", [_Anything(), _Refuses()], ids=["closed", "refused"])
def test_pinned_memory_is_given_back(pool: _Anything) -> None:
    pinned: list[int] = []

    def lock(memory: Any) -> Any:
        pinned.append(memory.nbytes)
        return pinned.clear

    if isinstance(pool, _Refuses):
        with pytest.raises(PoolUnavailable):
            Staging(pool, 1 << 16, lock)  # type: ignore[arg-type]
    else:
        staging = Staging(pool, 1 << 16, lock)  # type: ignore[arg-type]
        assert pinned == [1 << 16]
        staging.close()
    assert pinned == []


def test_streams_are_as_many_as_their_users_at_once() -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    spares = Spares(make)
    used = []
    for _ in range(3):
        # Threads that come and go one after the other use the same one.
        thread = threading.Thread(target=lambda: used.append(_use(spares)))
        thread.start()
        thread.join()
    assert (used, made) == ([0, 0, 0], [0])
    with spares.one() as first, spares.one() as second:
        assert {first, second} == {0, 1}
    with contextlib.suppress(KeyError), spares.one():
        raise KeyError
    with spares.one(), spares.one(), spares.one() as third:
        assert third == 2
    assert made == [0, 1, 2]


def _use(spares: Spares[int]) -> int:
    with spares.one() as mine:
        return mine


@pytest.mark.parametrize("parts", [2, 4])
def test_kernel_blocks_smaller_than_the_managers_are_its_blocks(parts: int) -> None:
    g = geometry(tp=1, head_v=4)
    caches = RankCaches(g, blocks_for(g, LENGTH), False)
    tables = caches.tables(LENGTH)
    caches.lay_out(World.random(g, LENGTH), 0, tables)
    small = dict(caches.caches)
    for name in [name for name in small if name.endswith("attn")]:
        dense = small[name].squeeze(1).contiguous()
        small[name] = dense.view(-1, g.block_size // parts, g.latent_width)
    tokens = np.arange(LENGTH)
    found = []
    for registered in (caches.caches, small):
        rows = np.empty(LENGTH * row_bytes(g), np.uint8)
        CacheView(registered, caches.config, g).gather_rows(tables, tokens, rows)
        found.append(rows.tobytes())
    assert found[0] == found[1]
    # Control: kernel blocks in another order are other rows.
    flipped = {name: cache.flip(0) if name.endswith("attn") else cache for name, cache in small.items()}
    rows = np.empty(LENGTH * row_bytes(g), np.uint8)
    CacheView(flipped, caches.config, g).gather_rows(tables, tokens, rows)
    assert rows.tobytes() != found[0]
