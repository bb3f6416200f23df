# SPDX-License-Identifier: Apache-2.0
"""One rank's caches as vLLM allocates them, filled by plain loops.

A rank has slots of memory, one page a block and slot. Layer i of every KV cache group lies in slot i, so groups overlay
each other and a block id means something only with its group. Pages are padded; slots lie one after the other, or the
pages of a block lie together. What vLLM registers are views of that memory: bytes [blocks, 1, 1, page] for a KDA layer,
rows [blocks, 1, block_size, width] for an MLA layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from statestore.geometry import Geometry
from tests.property.reshard_reference import PATTERN, World, deal

TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    # vLLM keeps fp8 caches as bytes.
    "float8_e4m3": torch.uint8,
}
PAD = 24


@dataclass
class RankCaches:
    """Memory of one rank, and what vLLM tells a connector about it."""

    geometry: Geometry
    blocks: int
    block_major: bool = False
    """Pages of one block lie together."""
    kda_first: bool = True
    memory: NDArray[np.uint8] = field(init=False)
    caches: dict[str, torch.Tensor] = field(init=False)
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        g = self.geometry
        mla = [f"model.layers.{n}.attn" for n in g.mla_layers]
        kda = [f"model.layers.{n}.kda" for n in g.kda_layers]
        self.slots = max(len(mla), min(len(kda), 2))
        self.page = _page(g)
        self.memory = np.full(self.slots * self.blocks * self.page, PATTERN, np.uint8)
        kda_groups = [
            (_mamba(g, self.page), kda[at : at + self.slots]) for at in range(0, len(kda), self.slots)
        ]
        mla_group = [(_mla(g), mla)]
        groups = [*kda_groups, *mla_group] if self.kda_first else [*mla_group, *kda_groups]
        self.config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
        )
        self.caches = {
            name: self._view(slot, name.endswith("attn"))
            for _, names in groups
            for slot, name in enumerate(names)
        }

    @property
    def mla_group(self) -> int:
        return 0 if not self.kda_first else len(self.config.kv_cache_groups) - 1

    def _strides(self) -> tuple[int, int]:
        """Bytes from slot to slot and from block to block."""
        if self.block_major:
            return self.page, self.slots * self.page
        return self.blocks * self.page, self.page

    def _view(self, slot: int, is_mla: bool) -> torch.Tensor:
        g = self.geometry
        of_slot, of_block = self._strides()
        whole = torch.from_numpy(self.memory)
        if not is_mla:
            return whole.view(torch.int8).as_strided(
                (self.blocks, 1, 1, self.page), (of_block, self.page, self.page, 1), slot * of_slot
            )
        dtype = TORCH[g.kv_cache_dtype]
        size = dtype.itemsize
        return whole.view(dtype).as_strided(
            (self.blocks, 1, g.block_size, g.latent_width),
            (of_block // size, g.block_size * g.latent_width, g.latent_width, 1),
            slot * of_slot // size,
        )

    def tables(self, length: int, seed: int = 0) -> tuple[list[int], ...]:
        """Block ids of a sequence, as a job carries them: one running-state block a KDA group, the table for MLA.

        Shuffled and distinct over the groups, which share memory; never the null block 0.
        """
        g = self.geometry
        rows = -(-length // (g.block_size * g.dcp))
        ids = np.random.default_rng(seed).permutation(np.arange(1, self.blocks)).tolist()
        tables = []
        for number in range(len(self.config.kv_cache_groups)):
            count = rows if number == self.mla_group else 1
            tables.append(ids[:count])
            del ids[:count]
        return tuple(tables)

    def lay_out(self, world: World, rank: int, tables: tuple[list[int], ...], first_token: int = 0) -> None:
        """Write the rank's state of `world` into the memory; rows of tokens below `first_token` are left out."""
        g = self.geometry
        of_slot, of_block = self._strides()
        layer = 0
        for number, group in enumerate(self.config.kv_cache_groups):
            if number == self.mla_group:
                self._lay_out_rows(world, rank, tables[number], first_token)
                continue
            for slot in range(len(group.layer_names)):
                self._lay_out_state(world, rank, layer, slot * of_slot + tables[number][0] * of_block)
                layer += 1
        assert layer == len(g.kda_layers)

    def _put(self, at: int, element: NDArray[np.uint8]) -> None:
        self.memory[at : at + len(element)] = element

    def _lay_out_state(self, world: World, rank: int, layer: int, page: int) -> None:
        g = self.geometry
        heads = g.num_heads // g.tp
        columns = g.conv_width - 1 + g.num_spec
        channels = heads * (2 * g.head_k + g.head_v)
        size = world.conv[0].shape[-1]
        channel = 0
        for part, width in zip(world.conv, (g.head_k, g.head_k, g.head_v), strict=True):
            for mine in range(heads):
                for offset in range(width):
                    for column in range(g.conv_width - 1):
                        at = column * channels + channel
                        if g.conv_layout == "DS":
                            at = channel * columns + column
                        self._put(page + at * size, part[layer, rank * heads + mine, column, offset])
                    channel += 1
        at = page + columns * channels * size
        for mine in range(heads):
            for value in range(g.head_v):
                for key in range(g.head_k):
                    element = world.recurrent[layer, rank * heads + mine, value, key]
                    self._put(at, element)
                    at += len(element)

    def _lay_out_rows(self, world: World, rank: int, table: list[int], first_token: int) -> None:
        g = self.geometry
        of_slot, of_block = self._strides()
        size = world.rows.shape[-1] * g.latent_width
        for token, (owner, block, row) in enumerate(
            deal(world.rows.shape[1], g.dcp, g.interleave, g.block_size)
        ):
            if owner != rank % g.dcp or token < first_token:
                continue
            for slot in range(len(g.mla_layers)):
                at = slot * of_slot + table[block] * of_block + row * size
                self._put(at, world.rows[slot, token].reshape(-1))


def blocks_for(geometry: Geometry, length: int) -> int:
    """Blocks that hold one sequence of every group, the null block and two that stay unused."""
    groups = len(geometry.kda_layers)
    return -(-length // (geometry.block_size * geometry.dcp)) + groups + 3


def _page(g: Geometry) -> int:
    state = g.recurrent_rank_bytes + (g.conv_columns + g.num_spec) * g.conv_channels * g.conv_bytes
    need = max(state, g.block_size * g.latent_row_bytes)
    return -(-need // 8) * 8 + PAD


def _mamba(g: Geometry, page: int) -> MambaSpec:
    columns = g.conv_columns + g.num_spec
    conv = (g.conv_channels, columns) if g.conv_layout == "DS" else (columns, g.conv_channels)
    return MambaSpec(
        block_size=g.block_size,
        shapes=(conv, (g.heads_per_rank, g.head_v, g.head_k)),
        dtypes=(TORCH[g.conv_dtype], TORCH[g.recurrent_dtype]),
        page_size_padded=page,
    )


def _mla(g: Geometry) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=g.block_size, num_kv_heads=1, head_size=g.latent_width, dtype=TORCH[g.kv_cache_dtype]
    )
