# SPDX-License-Identifier: Apache-2.0
"""One rank's cache memory for the toy model, as vLLM allocates it, read and written by plain slicing.

Layer i of every KV cache group lies in slot i, one page a block and slot, so groups overlay each other and a block id
means something only with its group. Which rank holds a row is found by dealing tokens out, not by the product's maps.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.doubles.toy_model import (
    CHANNELS,
    CONV_WIDTH,
    HEAD_K,
    HEAD_V,
    KDA_LAYERS,
    MLA_LAYERS,
    ROW_WIDTH,
    Floats,
)
from tests.property.reshard_reference import PATTERN, deal

SLOTS = len(MLA_LAYERS)
Tables = tuple[list[int], ...]
"""Block table of a request, by group: two of KDA layers, one of MLA layers."""


def group_layers() -> list[tuple[str, tuple[int, ...]]]:
    """(kind, layers) of every KV cache group."""
    kda = [("kda", KDA_LAYERS[at : at + SLOTS]) for at in range(0, len(KDA_LAYERS), SLOTS)]
    return [*kda, ("mla", MLA_LAYERS)]


class RankMemory:
    """See the module's description."""

    def __init__(
        self, memory: NDArray[np.uint8], heads: int, block_size: int, blocks: int, page: int
    ) -> None:
        self.heads, self.block_size, self.blocks, self.page = heads, block_size, blocks, page
        self.memory = memory

    @staticmethod
    def state_bytes(heads: int) -> int:
        """Bytes of one layer's state on a rank."""
        return heads * 4 * ((CONV_WIDTH - 1) * CHANNELS + HEAD_V * HEAD_K)

    def caches(self) -> dict[str, torch.Tensor]:
        """What vLLM registers with a connector: views of the memory by layer name."""
        whole = torch.from_numpy(self.memory)
        found = {}
        for kind, layers in group_layers():
            for slot, layer in enumerate(layers):
                start = slot * self.blocks * self.page
                if kind == "kda":
                    found[layer_name(kind, layer)] = whole.view(torch.int8).as_strided(
                        (self.blocks, 1, 1, self.page), (self.page, self.page, self.page, 1), start
                    )
                else:
                    found[layer_name(kind, layer)] = whole.view(torch.float32).as_strided(
                        (self.blocks, 1, self.block_size, ROW_WIDTH),
                        (self.page // 4, self.block_size * ROW_WIDTH, ROW_WIDTH, 1),
                        start // 4,
                    )
        return found

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block in every slot."""
        for slot in range(SLOTS):
            self._page(slot, target)[:] = self._page(slot, source)

    def poison(self, block: int) -> None:
        """Fill a block with NaN, in every slot."""
        for slot in range(SLOTS):
            self._page(slot, block)[:] = PATTERN

    def state(self, layer: int, block: int) -> tuple[Floats, Floats]:
        """(recurrent [heads, V, K], conv [W-1, q heads | k heads | v heads]) of a KDA layer, views of the memory."""
        page = self._page(layer % SLOTS, block)
        columns = (CONV_WIDTH - 1) * self.heads * CHANNELS * 4
        end = self.state_bytes(self.heads)
        conv = page[:columns].view(np.float32).reshape(CONV_WIDTH - 1, self.heads * CHANNELS)
        return page[columns:end].view(np.float32).reshape(self.heads, HEAD_V, HEAD_K), conv

    def _page(self, slot: int, block: int) -> NDArray[np.uint8]:
        at = (slot * self.blocks + block) * self.page
        return self.memory[at : at + self.page]


class AllRanks:
    """The memory of every rank of an engine, and the state of a sequence put together from it and divided over it.

    Rank r holds heads [r·H/TP, (r+1)·H/TP), and the rows whose owner is r % DCP. A row that its replicas disagree about
    is read as NaN, so that the answer is one that no reference gives.
    """

    def __init__(self, tp: int, dcp: int, interleave: int, heads: int, block_size: int, blocks: int) -> None:
        """`heads`: of one rank; `block_size`: tokens of a block on one rank."""
        self.tp, self.dcp, self.interleave = tp, dcp, interleave
        self.heads, self.block_size, self.blocks = heads, block_size, blocks
        self.page = 8 * -(-max(RankMemory.state_bytes(heads), block_size * ROW_WIDTH * 4) // 8) + 24
        # Every byte 0xFF: NaN wherever a float is read that was never written.
        self._memory: NDArray[np.uint8] = np.full((tp, SLOTS * blocks * self.page), PATTERN, np.uint8)
        self.ranks = [RankMemory(memory, heads, block_size, blocks, self.page) for memory in self._memory]
        pages = self._memory.reshape(tp, SLOTS, blocks, self.page)
        rows = pages[..., : block_size * ROW_WIDTH * 4].view(np.float32)
        # [replicas, owners, slots, blocks, rows, width]
        self._rows = rows.reshape(tp // dcp, dcp, SLOTS, blocks, block_size, ROW_WIDTH)

    def states(self, tables: Tables, index: int) -> tuple[Floats, Floats]:
        """(recurrent [layers, H, V, K], conv [layers, H, W-1, channels]) of all heads, from a table's block `index`."""
        recurrent, conv = [], []
        for number in range(len(KDA_LAYERS)):
            its_recurrent, its_conv = self._state(number, tables[number // SLOTS][index])
            recurrent.append(its_recurrent.reshape(-1, HEAD_V, HEAD_K))
            columns = its_conv[:, :, _columns(self.heads)]
            conv.append(columns.transpose(0, 2, 1, 3).reshape(-1, CONV_WIDTH - 1, CHANNELS))
        return np.stack(recurrent), np.stack(conv)

    def write_states(self, tables: Tables, index: int, recurrent: Floats, conv: Floats) -> None:
        """Inverse of `states`."""
        for number in range(len(KDA_LAYERS)):
            its_recurrent, its_conv = self._state(number, tables[number // SLOTS][index])
            its_recurrent[:] = recurrent[number].reshape(its_recurrent.shape)
            columns = conv[number].reshape(self.tp, self.heads, CONV_WIDTH - 1, CHANNELS)
            its_conv[:, :, _columns(self.heads)] = columns.transpose(0, 2, 1, 3)

    def rows(self, tables: Tables, length: int) -> Floats:
        """[MLA layers, length, width] of the tokens [0, length)."""
        owner, block, row = self._places(tables, 0, length)
        found = np.empty((SLOTS, length, ROW_WIDTH), np.float32)
        for layer in range(SLOTS):
            replicas = self._rows[:, owner, layer, block, row]
            found[layer] = replicas[0]
            differ = (replicas.view(np.uint32) != replicas[:1].view(np.uint32)).any(axis=(0, 2))
            found[layer, differ] = np.nan
        return found

    def write_rows(self, tables: Tables, start: int, rows: Floats) -> None:
        """Write the rows [MLA layers, tokens, width] of the tokens from `start` on, on every rank that holds them."""
        owner, block, row = self._places(tables, start, start + rows.shape[1])
        for layer in range(SLOTS):
            self._rows[:, owner, layer, block, row] = rows[layer]

    def _places(self, tables: Tables, start: int, end: int) -> tuple[NDArray[np.int64], ...]:
        """(owner, block id, row) of the tokens [start, end)."""
        owner, index, row = _dealt(end, self.dcp, self.interleave, self.block_size)[start:].T
        return owner, np.array(tables[-1], np.int64)[index], row

    def _state(self, layer: int, block: int) -> tuple[Floats, Floats]:
        """(recurrent [ranks, heads, V, K], conv [ranks, W-1, channels]) of a KDA layer, views of the memory."""
        at = (layer % SLOTS * self.blocks + block) * self.page
        columns = (CONV_WIDTH - 1) * self.heads * CHANNELS * 4
        page = self._memory[:, at : at + RankMemory.state_bytes(self.heads)]
        conv = page[:, :columns].view(np.float32).reshape(self.tp, CONV_WIDTH - 1, -1)
        recurrent = page[:, columns:].view(np.float32).reshape(self.tp, self.heads, HEAD_V, HEAD_K)
        return recurrent, conv


def layer_name(kind: str, layer: int) -> str:
    """vLLM's name of a layer."""
    return f"model.layers.{layer}.{kind}"


@functools.lru_cache
def _columns(heads: int) -> NDArray[np.int64]:
    """[heads, q | k | v of the head]: where each channel lies among q heads | k heads | v heads."""
    found = np.empty((heads, CHANNELS), np.int64)
    column = at = 0
    for width in (HEAD_K, HEAD_K, HEAD_V):
        for head in range(heads):
            for channel in range(width):
                found[head, at + channel] = column
                column += 1
        at += width
    return found


@functools.lru_cache(1 << 12)
def _dealt(length: int, dcp: int, interleave: int, block_size: int) -> NDArray[np.int64]:
    """[tokens, (owner, block-table index, row)], by dealing tokens out one at a time."""
    return np.array(deal(length, dcp, interleave, block_size), np.int64).reshape(length, 3)


def caches_config(heads: int, block_size: int, blocks: int, page: int, checkpoint: int | None = None) -> Any:
    """vLLM's KVCacheConfig of such memory: align-mode recurrent groups and one MLA group; `checkpoint`: a state inside
    a pass can be taken at multiples of so many tokens."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

    kda = MambaSpec(
        block_size=block_size,
        shapes=((CONV_WIDTH - 1, heads * CHANNELS), (heads, HEAD_V, HEAD_K)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=int(checkpoint is not None),
        prefill_checkpoint_alignment=checkpoint,
    )
    mla = MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=ROW_WIDTH,
        dtype=torch.float32,
        page_size_padded=page,
    )
    groups = [
        KVCacheGroupSpec([layer_name(kind, layer) for layer in layers], kda if kind == "kda" else mla)
        for kind, layers in group_layers()
    ]
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
