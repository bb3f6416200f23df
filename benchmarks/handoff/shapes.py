# SPDX-License-Identifier: Apache-2.0
"""The state that moves: what one rank of Kimi K3 under TP 8 holds, with as many layers as give the size asked for.

Of K3's 96 heads a rank has 12: a KDA layer of it is 12 states of 128 x 128 fp32 and 3 convolution columns of
12 · 3 · 128 bf16 channels, 814,080 bytes; an MLA row is 576 bf16, 1,152 bytes a layer. 64 MiB are all 69 KDA layers,
and as many tokens' rows of all 24 MLA layers as the rest holds.

Caches are laid out as vLLM does it: padded pages, layer i of every KV cache group in slot i, blocks shared by the
groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from statestore.geometry import Geometry

MIB = 1 << 20
HEADS, HEAD_DIM, CONV_WIDTH, LATENT = 12, 128, 4, 576
BLOCK_SIZE = 1536
LAYERS = {1: (1, 1), 8: (9, 3), 64: (69, 24)}
"""By MiB of state: KDA and MLA layers."""

SETS = 2
"""Sequences whose state lies in a cache; repetitions take turns, so that what was left behind is another's."""

_POISON = 0xFF
"""Bytes of a cache block before its load: not a finite number in any dtype."""


@dataclass(frozen=True)
class Shape:
    """One size."""

    mib: int
    geometry: Geometry
    length: int
    """Tokens of the boundary."""

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.geometry.sizes.boundary(self.length)

    @property
    def parts(self) -> tuple[int, int]:
        """Bytes of KDA state and of MLA rows."""
        kda = self.geometry.sizes.kda_rank
        return kda, self.nbytes - kda


def shape_of(mib: int) -> Shape:
    """The shape of `mib` MiB of state. Raises ValueError for a size without one."""
    if mib not in LAYERS:
        raise ValueError(f"sizes: {mib} MiB has no shape; use {', '.join(map(str, LAYERS))}")
    kda, mla = LAYERS[mib]
    # As in K3 an MLA layer stands behind some KDA layers.
    layers = range(kda + mla)
    rows = tuple((number + 1) * len(layers) // mla - 1 for number in range(mla))
    geometry = Geometry(
        model_digest="be" * 16,
        quantisation="none",
        kda_layers=tuple(layer for layer in layers if layer not in rows),
        mla_layers=rows,
        num_heads=HEADS,
        head_k=HEAD_DIM,
        head_v=HEAD_DIM,
        conv_width=CONV_WIDTH,
        conv_layout="SD",
        num_spec=0,
        recurrent_dtype="float32",
        conv_dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        latent_width=LATENT,
        block_size=BLOCK_SIZE,
        page_bytes=BLOCK_SIZE * LATENT * 2,
        tp=1,
    )
    sizes = geometry.sizes
    return Shape(mib, geometry, (mib * MIB - sizes.kda_rank) // sizes.mla_token)


class World:
    """The state of one sequence, made from a seed: two processes make the same one."""

    def __init__(self, shape: Shape, seed: int) -> None:
        g = shape.geometry
        rng = np.random.default_rng([seed, shape.mib])
        conv = g.conv_columns * g.conv_channels
        self.states: list[npt.NDArray[np.uint8]] = []
        for _ in g.kda_layers:
            columns = torch.from_numpy(rng.standard_normal(conv, dtype=np.float32)).bfloat16()
            recurrent = rng.standard_normal(g.recurrent_rank_bytes // 4, dtype=np.float32)
            self.states.append(np.concatenate((columns.view(torch.uint8).numpy(), recurrent.view(np.uint8))))
        self.rows = [
            torch.from_numpy(rng.standard_normal((shape.length, LATENT), dtype=np.float32)).bfloat16()
            for _ in g.mla_layers
        ]


class Caches:
    """One rank's caches; `tables[i]` are the blocks of sequence i, as a job carries them."""

    def __init__(self, shape: Shape, device: str = "cpu") -> None:
        """On a GPU `memory` is a copy that is brought up (`fill`, `poison`) and down (`holds`), off the clock."""
        from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

        g = self.geometry = shape.geometry
        self.shape = shape
        kda = [f"model.layers.{n}.kda" for n in g.kda_layers]
        mla = [f"model.layers.{n}.attn" for n in g.mla_layers]
        slots = len(mla)
        groups = [kda[at : at + slots] for at in range(0, len(kda), slots)]
        need = -(-shape.length // BLOCK_SIZE)
        # The null block, and blocks of each sequence.
        self.blocks = 1 + SETS * (len(groups) + need)
        self.memory = np.zeros((slots, self.blocks, g.page_bytes), np.uint8)
        self.tables: list[tuple[list[int], ...]] = []
        free = iter(range(1, self.blocks))
        for _ in range(SETS):
            states = [[next(free)] for _ in groups]
            self.tables.append((*states, [next(free) for _ in range(need)]))
        state = MambaSpec(
            block_size=BLOCK_SIZE,
            shapes=((g.conv_columns, g.conv_channels), (HEADS, HEAD_DIM, HEAD_DIM)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=g.page_bytes,
        )
        rows = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16)
        self.config: Any = SimpleNamespace(
            kv_cache_groups=[
                *(SimpleNamespace(kv_cache_spec=state, layer_names=names) for names in groups),
                SimpleNamespace(kv_cache_spec=rows, layer_names=mla),
            ]
        )
        self._groups = groups
        self._host = torch.from_numpy(self.memory)
        whole = self._whole = self._host if device == "cpu" else self._host.to(device)
        self.tensors: dict[str, torch.Tensor] = {}
        for names in groups:
            for slot, name in enumerate(names):
                self.tensors[name] = whole[slot].view(torch.int8).unflatten(1, (1, 1, g.page_bytes))
        for slot, name in enumerate(mla):
            self.tensors[name] = whole[slot].view(torch.bfloat16).unflatten(1, (1, BLOCK_SIZE, LATENT))

    def fill(self, world: World, sequence: int) -> None:
        """Write a world into the blocks of a sequence, as a prefill's kernels would."""
        for page, state in zip(self._state_pages(sequence), world.states, strict=True):
            page[: len(state)] = state
        for slot, rows in enumerate(world.rows):
            for block, part in zip(self.tables[sequence][-1], rows.split(BLOCK_SIZE), strict=True):
                page = torch.from_numpy(self.memory[slot, block]).view(torch.bfloat16)
                page.view(BLOCK_SIZE, LATENT)[: len(part)] = part
        self._sync(self._whole, self._host)

    def poison(self, sequence: int) -> None:
        """Make the blocks of a sequence hold no state at all."""
        for table in self.tables[sequence]:
            self.memory[:, table] = _POISON
        self._sync(self._whole, self._host)

    def holds(self, world: World, sequence: int) -> bool:
        """Whether the blocks of a sequence hold exactly this world."""
        self._sync(self._host, self._whole)
        pages = zip(self._state_pages(sequence), world.states, strict=True)
        if not all(np.array_equal(page[: len(state)], state) for page, state in pages):
            return False
        for slot, rows in enumerate(world.rows):
            for block, part in zip(self.tables[sequence][-1], rows.split(BLOCK_SIZE), strict=True):
                page = torch.from_numpy(self.memory[slot, block]).view(torch.int16)
                if not torch.equal(page.view(BLOCK_SIZE, LATENT)[: len(part)], part.view(torch.int16)):
                    return False
        return True

    def _sync(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._whole is not self._host:
            target.copy_(source)
            torch.cuda.synchronize()

    def _state_pages(self, sequence: int) -> list[npt.NDArray[np.uint8]]:
        """Pages of the KDA layers, in the model's order."""
        return [
            self.memory[slot, self.tables[sequence][group][0]]
            for group, names in enumerate(self._groups)
            for slot in range(len(names))
        ]
