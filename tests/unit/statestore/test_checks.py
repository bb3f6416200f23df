# SPDX-License-Identifier: Apache-2.0
"""State that was never state is refused by kind, and the message names head, layer or row."""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from statestore.connector.checks import VerificationFailed, check_table
from statestore.digest import unit_digest
from statestore.geometry import DTYPE_BYTES, Geometry
from statestore.reshard import head_bytes, row_bytes
from tests.property.reshard_cases import geometry
from tests.property.reshard_reference import World
from tests.support.state_checks import check_digest, check_heads, check_rows

NAN = {
    "float32": b"\x00\x00\xc0\x7f",
    "bfloat16": b"\xc0\x7f",
    "float16": b"\x00\x7e",
    "float8_e4m3": b"\x7f",
    "float8_e5m2": b"\x7e",
}
G = geometry(tp=4, head_v=4)


def heads_of(g: Geometry, count: int = 3) -> NDArray[np.uint8]:
    world = World.random(g, 1)
    return np.frombuffer(bytearray(b"".join(world.head(head) for head in range(count))), np.uint8)


def rows_of(g: Geometry, count: int = 5) -> NDArray[np.uint8]:
    world = World.random(g, count)
    return np.frombuffer(bytearray(b"".join(world.token(token) for token in range(count))), np.uint8)


def layer_of(data: NDArray[np.uint8], g: Geometry, head: int, layer: int) -> NDArray[np.uint8]:
    """One head's state of one layer: recurrent, then convolution."""
    return data.reshape(-1, len(g.kda_layers), head_bytes(g) // len(g.kda_layers))[head, layer]


@pytest.mark.parametrize("head", [0, 1, 2])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_null_state_of_one_head_and_layer(head: int, layer: int) -> None:
    """Not only a null object: one head of one layer is enough, as when one rank missed one layer's copy."""
    data = heads_of(G)
    check_heads(data, 3, G)
    recurrent = G.head_v * G.head_k * G.recurrent_bytes
    state = layer_of(data, G, head, layer)
    state[1:recurrent] = 0
    check_heads(data, 3, G)
    state[0] = 0
    name = f"head {head + 7}, layer {G.kda_layers[layer]} is all zeros"
    with pytest.raises(VerificationFailed, match=name) as caught:
        check_heads(data, 3, G, first_head=7)
    assert caught.value.kind == "null_state"


def test_null_convolution_columns_are_state() -> None:
    """A prompt of one token has columns of zeros before it."""
    data = heads_of(G)
    recurrent = G.head_v * G.head_k * G.recurrent_bytes
    layer_of(data, G, 1, 1)[recurrent:] = 0
    check_heads(data, 3, G)


@pytest.mark.parametrize("dtype", sorted(NAN))
def test_a_number_that_is_not_finite(dtype: str) -> None:
    """In every dtype, in the recurrent part, the convolution columns and the latent rows."""
    assert set(NAN) == set(DTYPE_BYTES)
    g = dataclasses.replace(G, recurrent_dtype=dtype, conv_dtype=dtype, kv_cache_dtype=dtype)
    width = DTYPE_BYTES[dtype]
    recurrent = g.head_v * g.head_k * width
    for at, name in (
        (0, "recurrent"),
        (recurrent - width, "recurrent"),
        (recurrent, "convolution"),
        (-width, "conv"),
    ):
        data = heads_of(g)
        check_heads(data, 3, g)
        state = layer_of(data, g, 2, 1)
        state[at : at + width or None] = np.frombuffer(NAN[dtype], np.uint8)
        with pytest.raises(VerificationFailed, match=rf"{name}.* head 2, layer 1") as caught:
            check_heads(data, 3, g)
        assert caught.value.kind == "not_finite"
    rows = rows_of(g)
    check_rows(rows, g, finite=True)
    at = 3 * row_bytes(g) + g.latent_row_bytes
    rows[at : at + width] = np.frombuffer(NAN[dtype], np.uint8)
    check_rows(rows, g, finite=False)
    with pytest.raises(VerificationFailed, match="row 3, layer 4") as caught:
        check_rows(rows, g, finite=True)
    assert caught.value.kind == "not_finite"


def test_a_null_row_of_one_layer() -> None:
    rows = rows_of(G)
    start = 2 * row_bytes(G)
    rows[start + 1 : start + G.latent_row_bytes] = 0
    check_rows(rows, G, finite=False)
    rows[start] = 0
    with pytest.raises(VerificationFailed, match="row 2, layer 2 is all zeros") as caught:
        check_rows(rows, G, finite=False)
    assert caught.value.kind == "null_state"


def test_a_digest_that_differs() -> None:
    data = heads_of(G)
    expected = unit_digest(data)
    check_digest(data, expected, "object k")
    data[5] ^= 1
    with pytest.raises(VerificationFailed, match="object k: digest") as caught:
        check_digest(data, expected, "object k")
    assert caught.value.kind == "digest"


VIEW: Any = SimpleNamespace(block_count=10, blocks_needed=lambda length: {0: 1, 1: -(-length // 16)})


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        (([0], [4, 5]), "null_block"),
        (([3], [4, 0]), "null_block"),
        (([3], [4]), "block_table"),
        (([], [4, 5]), "block_table"),
        (([3],), "block_table"),
        (([3], [4, 10]), "block_table"),
        (([3], [4, -1]), "block_table"),
    ],
)
def test_tables_that_do_not_fit(blocks: tuple[list[int], ...], kind: str) -> None:
    check_table(VIEW, ([3], [4, 5]), 32, "publish")
    with pytest.raises(VerificationFailed, match="publish") as caught:
        check_table(VIEW, blocks, 32, "publish")
    assert caught.value.kind == kind


K3_RANK = dataclasses.replace(
    geometry(head_k=128, head_v=128, num_heads=96, tp=8),
    kda_layers=tuple(range(69)),
    mla_layers=tuple(range(69, 93)),
    latent_width=576,
)


def test_checks_of_a_k3_rank_are_quick() -> None:
    """56 MB of a K3 TP8 rank: under 20 ms of one core's time on a quiet machine; the bound here is for a busy one."""
    data = np.random.default_rng(0).integers(1, 0x40, 12 * head_bytes(K3_RANK), dtype=np.uint8)
    size = head_bytes(K3_RANK)
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        check_heads(data, 12, K3_RANK)
        for at in range(0, len(data), size):
            unit_digest(data[at : at + size])
        seconds.append(time.thread_time() - began)
    assert round(len(data) / 1e6) == 56
    print(f"checks and digests of {len(data)} bytes: {min(seconds) * 1e3:.1f} ms")
    assert min(seconds) < 0.1
