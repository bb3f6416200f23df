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

    def __init__(self, heads: int, block_size: int, blocks: int, page: int) -> None:
        self.heads, self.block_size, self.blocks, self.page = heads, block_size, blocks, page
        # Every byte 0xFF: NaN wherever a float is read that was never written.
        self.memory: NDArray[np.uint8] = np.full(SLOTS * blocks * page, PATTERN, np.uint8)

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

    def rows(self, layer: int) -> Floats:
        """[blocks, block size, width] of an MLA layer (index among them), a view."""
        size = self.blocks * self.page
        pages = self.memory[layer * size : (layer + 1) * size].reshape(self.blocks, self.page)
        rows = pages[:, : self.block_size * ROW_WIDTH * 4].view(np.float32)
        return rows.reshape(self.blocks, self.block_size, ROW_WIDTH)

    def _page(self, slot: int, block: int) -> NDArray[np.uint8]:
        at = (slot * self.blocks + block) * self.page
        return self.memory[at : at + self.page]


def layer_name(kind: str, layer: int) -> str:
    """vLLM's name of a layer."""
    return f"model.layers.{layer}.{kind}"


def to_heads(conv: Floats, heads: int) -> Floats:
    """[W-1, q heads | k heads | v heads] as [heads, W-1, q | k | v of the head]."""
    return conv[:, _columns(heads)].transpose(1, 0, 2)


def from_heads(conv: Floats) -> Floats:
    """Inverse of `to_heads`."""
    found = np.empty((CONV_WIDTH - 1, conv.shape[0] * CHANNELS), np.float32)
    found[:, _columns(conv.shape[0])] = conv.transpose(1, 0, 2)
    return found


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
def dealt(length: int, dcp: int, interleave: int, block_size: int) -> NDArray[np.int64]:
    """[tokens, (owner, block-table index, row)], by dealing tokens out one at a time."""
    return np.array(deal(length, dcp, interleave, block_size), np.int64).reshape(length, 3)


def caches_config(heads: int, block_size: int, blocks: int, page: int) -> Any:
    """vLLM's KVCacheConfig of such memory: align-mode recurrent groups and one MLA group."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec, MLAAttentionSpec

    kda = MambaSpec(
        block_size=block_size,
        shapes=((CONV_WIDTH - 1, heads * CHANNELS), (heads, HEAD_V, HEAD_K)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=page,
        mamba_cache_mode="align",
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
