# SPDX-License-Identifier: Apache-2.0
"""Every kernel's bytes and digests against plain indexing and the CPU's digest, with what must be seen as wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.copies.caches import Caches, geometry
from statestore.checksum import checksum, finish
from statestore.gpu.found import Found
from statestore.gpu.launch import ShardKernels, Tuning
from statestore.reshard import Packing, head_bytes, row_bytes, row_tokens

TOKENS = 200


def check_all(device: str) -> Iterator[tuple[str, str]]:
    """(what, "ok" or what is wrong) of every layout."""
    for layout, num_spec, kv, dcp in (
        ("SD", 0, "bfloat16", 1),
        ("SD", 3, "bfloat16", 2),
        ("DS", 0, "bfloat16", 4),
        ("DS", 3, "float8_e4m3", 8),
    ):
        g = geometry(3, 2, 2, layout=layout, num_spec=num_spec, kv=kv, block_size=32)
        name = f"{layout}, {num_spec} speculative columns, {kv}, packed for {dcp} ranks"
        try:
            check(Caches.random(g, 3, TOKENS, device), dcp)
            yield name, "ok"
        except AssertionError as error:
            yield name, f"WRONG: {error}"


def check(caches: Caches, dcp: int, tuning: Tuning | None = None) -> None:
    """Raises AssertionError naming what differs."""
    g, device = caches.geometry, caches.rows[0][1].device
    kernels = ShardKernels(g, caches.states, caches.rows, tuning)
    blocks = ([2],)
    heads = torch.full((2 * head_bytes(g) // 8,), -1, dtype=torch.int64, device=device)
    found = kernels.gather_heads(blocks, 1, heads)
    _same("gathered heads", heads.view(torch.uint8), caches.plain_heads(blocks, 1, 2).flatten())
    _digests("heads", found, heads, head_bytes(g))
    assert (found.null, found.not_finite, found.conv_not_finite) == (None, None, None), f"heads: {found}"
    assert kernels.check_heads(heads) == found, "check_heads differs from gather_heads"

    tokens = row_tokens(np.arange(TOKENS), Packing(dcp, 1))
    tables = caches.tables(tokens)
    rows = torch.full((TOKENS * row_bytes(g) // 8,), -1, dtype=torch.int64, device=device)
    units = np.stack([np.arange(TOKENS) // 64, np.arange(TOKENS) % 64])
    found = kernels.gather_rows(tables, rows, units)
    _same("gathered rows", rows.view(torch.uint8), caches.plain_rows(tables).flatten())
    _digests("rows", found, rows, 64 * row_bytes(g))
    assert (found.null, found.not_finite) == (None, None), f"rows: {found}"
    assert kernels.check_rows(rows, units) == found, "check_rows differs from gather_rows"

    # Elsewhere: what was scattered is what is gathered, and nothing beside it has changed.
    other = Caches.random(g, 3, TOKENS, str(device), seed=1)
    target = ShardKernels(g, other.states, other.rows)
    before = other.plain_heads(([2],), 0, 1).clone(), other.plain_heads(([1],), 0, g.heads_per_rank).clone()
    unwritten = [conv[2].clone() for _, conv, _ in other.states]
    target.scatter_heads(blocks, 1, heads)
    target.scatter_rows(tables, rows)
    _same("scattered heads", other.plain_heads(blocks, 1, 2).flatten(), heads.view(torch.uint8))
    _same("scattered rows", other.plain_rows(tables).flatten(), rows.view(torch.uint8))
    _same("other heads", other.plain_heads(([2],), 0, 1), before[0])
    _same("other blocks", other.plain_heads(([1],), 0, g.heads_per_rank), before[1])
    for (_, conv, _), old in zip(other.states, unwritten, strict=True):
        new = conv[2]
        if g.conv_layout == "DS":
            new, old = new.t(), old.t()
        _same("speculative columns", new[g.conv_columns :], old[g.conv_columns :])
    _damage(kernels, heads, rows)


def _damage(kernels: ShardKernels, heads: torch.Tensor, rows: torch.Tensor) -> None:
    """What is damaged, null or not finite must be seen."""
    g = kernels.geometry
    sound = kernels.check_heads(heads)
    size, width = head_bytes(g) // 8, head_bytes(g) // len(g.kda_layers) // 8
    recurrent = g.head_v * g.head_k * 4 // 8
    swapped = heads.clone()
    swapped[[5, size - 2]] = heads[[size - 2, 5]]
    assert kernels.check_heads(swapped).sums[0] != sound.sums[0], "two words that traded places are not seen"
    signs = heads.clone()
    signs[:1024] ^= -0x7FFFFFFF80000000
    assert kernels.check_heads(signs).sums[0] != sound.sums[0], "flipped signs are not seen"
    bad = heads.clone()
    bad[size + width : size + width + recurrent] = 0
    assert kernels.check_heads(bad).null == len(g.kda_layers) + 1, "a null state is not seen"
    bad = heads.clone()
    bad[size + 7] = 0x7F800000
    assert kernels.check_heads(bad).not_finite == len(g.kda_layers), "an infinite number is not seen"
    bad = heads.clone()
    bad[width - 1] = 0x7FC0 << 32
    assert kernels.check_heads(bad).conv_not_finite == 0, "a NaN of the convolution is not seen"
    row = g.latent_row_bytes // 8
    bad = rows.clone()
    bad[333 * row : 334 * row] = 0
    assert kernels.check_rows(bad).null == 333, "a null row is not seen"
    bad = rows.clone()
    bad[334 * row - 1] = 0x7F80_0000 if g.kv_cache_dtype == "bfloat16" else 0x7F << 24
    assert kernels.check_rows(bad).not_finite == 333, "a number that is not finite is not seen"


def _same(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
    one, other = (part.flatten().clone().view(torch.uint8) for part in (one, other))
    assert torch.equal(one, other), f"{what} differ in {int((one != other).sum())} of {one.numel()} bytes"


def _digests(what: str, found: Found, staging: torch.Tensor, unit: int) -> None:
    data = staging.cpu().numpy().view(np.uint8)
    for number, total in enumerate(found.sums):
        piece = data[number * unit : (number + 1) * unit]
        assert finish(total, len(piece)) == checksum(piece), f"digest of unit {number} of {what} differs"
