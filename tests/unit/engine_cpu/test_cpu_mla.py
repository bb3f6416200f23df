# SPDX-License-Identifier: Apache-2.0
"""Latent attention against plain attention in float64, and the index maps and the merge of context parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deltaserve.engine.cpu import mla

HEADS, LATENT, ROPE, BLOCK = 3, 24, 8, 16
WIDTH = LATENT + ROPE
SCALE = 0.31
LENGTHS = [1, 15, 16, 17, 64, 65, 300]


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    scores = (q.double() @ k.double().T) * scale
    return scores.softmax(-1) @ v.double(), scores.logsumexp(-1)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def paged(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Scatter each request's rows over random blocks of a NaN-filled cache; return (cache, block_table)."""
    need = [-(-len(r) // BLOCK) for r in rows]
    cache = torch.full((sum(need) + 3, BLOCK, WIDTH), float("nan"))
    ids = (torch.randperm(sum(need) + 2) + 1).tolist()  # block 0 is the null block
    table = torch.zeros(len(rows), max(need), dtype=torch.int32)
    for r, row in enumerate(rows):
        for b in range(need[r]):
            block = ids.pop()
            table[r, b] = block
            part = row[b * BLOCK : (b + 1) * BLOCK]
            cache[block, : len(part)] = part
    return cache, table


@pytest.mark.parametrize("tile_bytes", [1 << 12, mla.TILE_BYTES])
@pytest.mark.parametrize("window", [1, 3])
def test_decode_equals_plain_attention(tile_bytes: int, window: int) -> None:
    lengths = [n + window - 1 for n in LENGTHS]
    rows = [torch.randn(n, WIDTH) for n in lengths]
    cache, table = paged(rows)
    q = torch.randn(len(rows) * window, HEADS, WIDTH)
    out, lse = mla.decode_attention(
        q, cache, table, lengths, scale=SCALE, latent_dim=LATENT, tile_bytes=tile_bytes
    )
    for r, row in enumerate(rows):
        for j in range(window):
            seen = row[: lengths[r] - (window - 1 - j)]
            o, expected_lse = plain(q[r * window + j], seen, seen[:, :LATENT])
            assert error(out[r * window + j], o) < 1e-5, (r, j)
            assert error(lse[r * window + j], expected_lse) < 1e-5
            if len(seen) > 1:  # control: one row less, or values from the wrong columns
                assert (
                    error(out[r * window + j], plain(q[r * window + j], seen[:-1], seen[:-1, :LATENT])[0])
                    > 1e-4
                )
                assert error(out[r * window + j], plain(q[r * window + j], seen, seen[:, ROPE:])[0]) > 1e-2


def test_decode_without_rows_gives_zeros() -> None:
    rows = [torch.randn(0, WIDTH), torch.randn(20, WIDTH)]
    cache, table = paged(rows)
    out, lse = mla.decode_attention(
        torch.randn(2, HEADS, WIDTH), cache, table, [0, 20], scale=SCALE, latent_dim=LATENT
    )
    assert torch.equal(out[0], torch.zeros(HEADS, LATENT))
    assert bool(lse[0].isneginf().all())
    assert bool(lse[1].isfinite().all())
    out, lse = mla.decode_attention(
        torch.randn(1, HEADS, WIDTH), cache, table, [0], scale=SCALE, latent_dim=LATENT
    )
    assert torch.equal(out[0], torch.zeros(HEADS, LATENT))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill_attention(causal: bool) -> None:
    queries, keys = [5, 1, 0, 70], [5, 1, 3, 70] if causal else [40, 0, 3, 9]
    cu_q, cu_k = [0, 5, 6, 6, 76], [0, *torch.tensor(keys).cumsum(0).tolist()]
    q, k = torch.randn(76, HEADS, WIDTH), torch.randn(cu_k[-1], HEADS, WIDTH)
    v = torch.randn(cu_k[-1], HEADS, LATENT)
    out, lse = mla.prefill_attention(q, k, v, cu_q, cu_k, scale=SCALE, causal=causal)
    for r, n in enumerate(queries):
        for i in range(n):
            t = cu_q[r] + i
            seen = slice(cu_k[r], cu_k[r] + i + 1) if causal else slice(cu_k[r], cu_k[r + 1])
            if seen.start == seen.stop:
                assert torch.equal(out[t], torch.zeros(HEADS, LATENT))
                assert bool(lse[:, t].isneginf().all())
                continue
            for h in range(HEADS):
                o, expected_lse = plain(q[t, h : h + 1], k[seen, h], v[seen, h])
                assert error(out[t, h], o[0]) < 1e-5
                assert abs(float(lse[h, t]) - float(expected_lse)) < 1e-5
    if causal:  # control: the same rows without the mask are not the same
        assert (
            error(mla.prefill_attention(q, k, v, cu_q, cu_k, scale=SCALE, causal=False)[0], out.double())
            > 1e-2
        )


def local_rows(length: int, ranks: int, rank: int, interleave: int) -> list[int]:
    return [t for t in range(length) if t // interleave % ranks == rank]


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_slots_of_all_ranks_hold_every_token_once(ranks: int, interleave: int) -> None:
    lengths = [1, 3, 70, 129]
    span = BLOCK * ranks
    need = [-(-n // span) for n in lengths]
    table = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    ids = iter(torch.randperm(sum(need)).add(1).tolist())
    for r, n in enumerate(need):
        for b in range(n):
            table[r, b] = next(ids)
    positions = torch.cat([torch.arange(n) for n in lengths])
    requests = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = [
        mla.slot_mapping(
            positions, requests, table, block_size=BLOCK, ranks=ranks, rank=d, interleave=interleave
        ).tolist()
        for d in range(ranks)
    ]
    start = 0
    for r, length in enumerate(lengths):
        for d in range(ranks):
            mine = [s for s in slots[d][start : start + length] if s != mla.PAD_SLOT]
            # A rank's tokens fill its blocks from the front, in order, with no gap.
            expected = [int(table[r, i // BLOCK]) * BLOCK + i % BLOCK for i in range(len(mine))]
            assert mine == expected
            owned = [t for t in range(length) if slots[d][start + t] != mla.PAD_SLOT]
            assert owned == local_rows(length, ranks, d, interleave)
        start += length
    if interleave < BLOCK:  # control: another interleave puts tokens elsewhere
        other = mla.slot_mapping(
            positions, requests, table, block_size=BLOCK, ranks=ranks, rank=0, interleave=2 * interleave
        )
        assert other.tolist() != slots[0]


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_merge_to_the_whole(base_e: bool, interleave: int) -> None:
    """Short requests leave ranks without tokens; what such a rank computed must not matter, even NaN."""
    ranks, lengths = 4, [1, 3, 17, 100]
    rows = [torch.randn(n, WIDTH) for n in lengths]
    q = torch.randn(len(rows), HEADS, WIDTH)
    outs, lses = [], []
    unit = 1.0 if base_e else 0.6931471805599453
    for d in range(ranks):
        mine = [row[local_rows(len(row), ranks, d, interleave)] for row in rows]
        cache, table = (
            paged(mine) if any(len(m) for m in mine) else (torch.zeros(1, BLOCK, WIDTH), torch.zeros(4, 1))
        )
        out, lse = mla.decode_attention(
            q, cache, table.int(), [len(m) for m in mine], scale=SCALE, latent_dim=LATENT
        )
        for r, m in enumerate(mine):
            if len(m) == 0:
                out[r] = float("nan")
        outs.append(out)
        lses.append(lse / unit)
    gathered = torch.stack(lses)
    assert bool(gathered[:, 0].isneginf().any()), "the case has an empty rank"
    merged = torch.zeros(len(rows), HEADS, LATENT)
    for d in range(ranks):
        part, lse = mla.merge_partial(outs[d].clone(), gathered, d, base_e=base_e)
        merged += part
    for r, row in enumerate(rows):
        o, expected_lse = plain(q[r], row, row[:, :LATENT])
        assert error(merged[r], o) < 1e-5
        assert error(lse[r] * unit, expected_lse) < 1e-5
    wrong = sum(mla.merge_partial(outs[d].clone(), gathered, d, base_e=not base_e)[0] for d in range(ranks))
    assert error(torch.as_tensor(wrong)[3], plain(q[3], rows[3], rows[3][:, :LATENT])[0]) > 1e-3


def test_gather_rows_from_any_start() -> None:
    rows = [torch.randn(40, WIDTH), torch.randn(5, WIDTH), torch.randn(64, WIDTH)]
    cache, table = paged(rows)
    cu, starts = [0, 20, 20, 50], [16, 0, 30]
    out = torch.full((50, WIDTH), float("nan"))
    mla.gather_rows(cache, out, table, cu, starts)
    assert torch.equal(out[:20], rows[0][16:36])
    assert torch.equal(out[20:50], rows[2][30:60])
    assert not torch.equal(out[:20], rows[0][:20])
    # More rows than the request has, as a rank gathers that owns fewer than the others: no error, the rest is right.
    mla.gather_rows(cache, out, table, [0, 50], [30])
    assert torch.equal(out[:10], rows[0][30:])
