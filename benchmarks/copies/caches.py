# SPDX-License-Identifier: Apache-2.0
"""Paged caches of one rank, full of random finite state, as `statestore.connector.cache_view` sees vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from statestore.geometry import Geometry
from statestore.gpu.launch import Table
from statestore.reshard import locate

TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.uint8,
}


def geometry(
    heads: int,
    kda_layers: int,
    mla_layers: int,
    *,
    dcp: int = 1,
    interleave: int = 1,
    layout: str = "SD",
    num_spec: int = 0,
    kv: str = "bfloat16",
    head: int = 128,
    latent: int = 576,
    block_size: int = 64,
) -> Geometry:
    """One rank of the published models' shape, `heads` KDA heads a rank."""
    size = {"bfloat16": 2, "float8_e4m3": 1}[kv]
    state = heads * (head * head * 4 + (3 + num_spec) * 3 * head * 2)
    page = max(state, block_size * latent * size)
    return Geometry(
        model_digest="0" * 32,
        quantisation="none",
        kda_layers=tuple(range(kda_layers)),
        mla_layers=tuple(range(kda_layers, kda_layers + mla_layers)),
        num_heads=heads * dcp,
        head_k=head,
        head_v=head,
        conv_width=4,
        conv_layout=layout,  # type: ignore[arg-type]
        num_spec=num_spec,
        recurrent_dtype="float32",
        conv_dtype="bfloat16",
        kv_cache_dtype=kv,
        latent_width=latent,
        block_size=block_size,
        page_bytes=-(-page // 256) * 256,
        tp=dcp,
        dcp=dcp,
        interleave=interleave,
    )


@dataclass
class Caches:
    """Group 0 is KDA's, group 1 MLA's; a layer has memory of its own, block 0 is never used."""

    geometry: Geometry
    states: list[tuple[int, torch.Tensor, torch.Tensor]]
    rows: list[tuple[int, torch.Tensor]]

    @classmethod
    def random(cls, g: Geometry, states: int, tokens: int, device: str, seed: int = 0) -> Caches:
        """Room for `states` sequences' KDA state and for `tokens` tokens of this rank, all of it random and finite."""
        torch.manual_seed(seed)
        columns = g.conv_columns + g.num_spec
        conv_bytes = columns * g.conv_channels * g.conv_bytes
        shape = (g.conv_channels, columns) if g.conv_layout == "DS" else (columns, g.conv_channels)
        of_states = []
        for _ in g.kda_layers:
            pages = torch.empty(states + 1, g.page_bytes, dtype=torch.uint8, device=device)
            conv = pages[:, :conv_bytes].view(TYPES[g.conv_dtype]).unflatten(1, shape)
            recurrent = pages[:, conv_bytes : conv_bytes + g.recurrent_rank_bytes].view(torch.float32)
            recurrent = recurrent.unflatten(1, (g.heads_per_rank, g.head_v, g.head_k))
            conv.normal_()
            recurrent.normal_()
            of_states.append((0, conv, recurrent))
        of_rows = []
        for _ in g.mla_layers:
            blocks = -(-tokens // g.block_size) + 1
            cache = torch.empty(
                blocks, g.block_size, g.latent_width, dtype=TYPES[g.kv_cache_dtype], device=device
            )
            cache.random_(1, 0x7E) if cache.dtype == torch.uint8 else cache.normal_()
            of_rows.append((1, cache))
        return cls(g, of_states, of_rows)

    def tables(self, tokens: npt.NDArray[np.int64]) -> list[Table]:
        """Where these tokens of one long sequence lie, a layer; its blocks are shuffled."""
        count = self.rows[0][1].shape[0] - 1
        blocks = (np.random.default_rng(0).permutation(count) + 1).tolist()
        return [locate(self.geometry, tokens, blocks)] * len(self.rows)

    def plain_heads(self, blocks: tuple[list[int], ...], first: int, heads: int) -> torch.Tensor:
        """What `ShardKernels.gather_heads` gathers, by plain indexing: bytes [heads, layers, bytes]."""
        g = self.geometry
        layers = []
        for group, conv, recurrent in self.states:
            block = blocks[group][0]
            columns = (conv[block].t() if g.conv_layout == "DS" else conv[block])[: g.conv_columns]
            parts = [recurrent[block, first : first + heads].reshape(heads, -1).view(torch.uint8)]
            at = 0
            for width in (g.head_k, g.head_k, g.head_v):
                part = columns[:, at : at + g.heads_per_rank * width].unflatten(1, (-1, width))
                part = part[:, first : first + heads].transpose(0, 1).reshape(heads, -1)
                parts.append(part.view(torch.uint8))
                at += g.heads_per_rank * width
            layers.append(torch.cat(parts, 1))
        return torch.stack(layers, 1)

    def plain_rows(self, tables: list[Table]) -> torch.Tensor:
        """What `ShardKernels.gather_rows` gathers, by plain indexing: bytes [rows, layers, bytes]."""
        layers = []
        for (_, cache), table in zip(self.rows, tables, strict=True):
            ids, rows = (torch.from_numpy(part).to(cache.device) for part in table)
            layers.append(cache[ids, rows].view(torch.uint8))
        return torch.stack(layers, 1)
