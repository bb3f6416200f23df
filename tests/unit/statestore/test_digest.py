# SPDX-License-Identifier: Apache-2.0
"""Digests find damage wherever it is; the scans find what a digest cannot: null and not finite state."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from statestore.digest import all_finite, first_not_finite, first_null, stream, unit_digest
from statestore.geometry import DTYPE_BYTES

Bytes = NDArray[np.uint8]


@pytest.fixture
def data() -> Bytes:
    return np.random.default_rng(7).integers(0, 256, (1 << 20) + 12345, dtype=np.uint8)


def test_known_value() -> None:
    """Pins the algorithm: a record written today must be readable after an upgrade of the library."""
    assert unit_digest(b"deltaserve") == xxhash.xxh3_128_hexdigest(b"deltaserve")
    assert unit_digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("at", [0, 1, 1 << 19, -1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_shows(data: Bytes, at: int, bit: int) -> None:
    before = unit_digest(data)
    data[at] ^= 1 << bit
    assert unit_digest(data) != before
    data[at] ^= 1 << bit
    assert unit_digest(data) == before


def test_truncation_and_order_show(data: Bytes) -> None:
    before = unit_digest(data)
    assert unit_digest(data[:-1]) != before
    assert unit_digest(np.concatenate((data[1000:2000], data[:1000], data[2000:]))) != before
    # Control: the same bytes in another array are the same.
    assert unit_digest(np.concatenate((data[:1000], data[1000:]))) == before


def test_arrays_of_any_type_are_bytes() -> None:
    numbers = np.arange(1000, dtype=np.float32).reshape(10, 100)
    assert unit_digest(numbers) == unit_digest(numbers.tobytes())


def test_a_strided_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        unit_digest(np.zeros((4, 4), np.uint8)[:, ::2])


@pytest.mark.parametrize("nbytes", [1, 7, 16, 17, 4096])
def test_null_parts_are_found(nbytes: int) -> None:
    """Wherever the one byte is that is not zero, also past the bytes that are looked at first."""
    for at in {0, nbytes // 2, nbytes - 1}:
        parts = np.zeros((5, nbytes), np.uint8)
        parts[:, at] = 1
        assert first_null(parts) is None
        parts[3, at] = 0
        assert first_null(parts) == 3
        parts[1, at] = 0
        assert first_null(parts) == 1


def test_null_parts_of_a_strided_view() -> None:
    whole = np.ones((4, 100), np.uint8)
    whole[2, 10:60] = 0
    assert first_null(whole) is None
    assert first_null(whole[:, 10:60]) == 2
    assert first_null(np.empty((0, 8), np.uint8)) is None
    assert first_null(np.empty((2, 0), np.uint8)) == 0


NOT_FINITE = {
    "float32": [b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\x01\x00\xc0\x7f"],
    "float16": [b"\x00\x7c", b"\x00\xfc", b"\x01\x7e"],
    "bfloat16": [b"\x80\x7f", b"\x80\xff", b"\xc1\x7f"],
    "float8_e4m3": [b"\x7f", b"\xff"],
    "float8_e5m2": [b"\x7c", b"\xfc", b"\x7e"],
}
LARGEST = {
    "float32": b"\xff\xff\x7f\x7f",
    "float16": b"\xff\x7b",
    "bfloat16": b"\x7f\x7f",
    "float8_e4m3": b"\x7e",
    "float8_e5m2": b"\x7b",
}


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
@pytest.mark.parametrize("lead", [0, 1, 4])
@pytest.mark.parametrize(("parts", "count"), [(1, 200_000), (40, 5_000), (3000, 4)])
def test_not_finite_numbers_are_found(dtype: str, lead: int, parts: int, count: int) -> None:
    """Infinities and NaN at the ends and in the middle, few long or many short parts, aligned or not."""
    width = DTYPE_BYTES[dtype]
    good = np.zeros((parts, lead + count * width + 3), np.uint8)
    state = good[:, lead : lead + count * width]
    state[:] = np.frombuffer(LARGEST[dtype] * count, np.uint8)
    assert first_not_finite(state, dtype) is None
    for bad in NOT_FINITE[dtype]:
        for part, at in ((0, 0), (parts // 2, count // 2), (parts - 1, count - 1)):
            kept = state[part, at * width : (at + 1) * width].copy()
            state[part, at * width : (at + 1) * width] = np.frombuffer(bad, np.uint8)
            assert first_not_finite(state, dtype) == part
            state[part, at * width : (at + 1) * width] = kept
    good[:, :lead] = 0xFF
    good[:, lead + count * width :] = 0xFF
    assert first_not_finite(state, dtype) is None, "looks outside its parts"


def test_finite_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
        first_not_finite(np.zeros((1, 2), np.uint8), "int8")
    with pytest.raises(ValueError, match="whole number"):
        first_not_finite(np.zeros((1, 3), np.uint8), "bfloat16")
    assert first_not_finite(np.zeros((0, 2), np.uint8), "bfloat16") is None


@pytest.mark.parametrize("piece", [1, 1000, 1 << 18, 1 << 21])
def test_a_digest_in_pieces_is_the_digest(data: Bytes, piece: int) -> None:
    if piece == 1:
        data = data[:5000]
    running = stream()
    for at in range(0, len(data), piece):
        running.update(data[at : at + piece])
    assert running.hexdigest() == unit_digest(data)
    # Control: a piece left out shows.
    assert running.hexdigest() != unit_digest(data[:-1])


@pytest.mark.parametrize(
    ("dtype", "exponent", "fraction"),
    [("float16", 5, 10), ("bfloat16", 8, 7), ("float8_e5m2", 5, 2)],
)
def test_every_number_of_a_small_dtype(dtype: str, exponent: int, fraction: int) -> None:
    """IEEE 754: not finite is an exponent of all ones, whatever the sign and the fraction."""
    width = (1 + exponent + fraction) // 8
    ones = (1 << exponent) - 1
    numbers = np.arange(1 << 8 * width, dtype=f"u{width}")
    expected = (numbers >> fraction & ones) != ones
    assert 0 < np.count_nonzero(~expected) < len(numbers) // 2
    found = [all_finite(numbers[n : n + 1].view(np.uint8), dtype) for n in range(len(numbers))]
    assert found == expected.tolist()
    # One among many that are finite is found as well.
    many = np.tile(numbers[expected][:64], 8)
    assert all_finite(many.view(np.uint8), dtype)
    for bad in numbers[~expected][:8]:
        many[100] = bad
        assert not all_finite(many.view(np.uint8), dtype)
        assert first_not_finite(many.view(np.uint8).reshape(8, -1), dtype) == 100 // 64


def test_e4m3_has_two_numbers_that_are_not_finite() -> None:
    numbers = np.arange(256, dtype=np.uint8)
    bad = [n for n in range(256) if not all_finite(numbers[n : n + 1], "float8_e4m3")]
    assert bad == [0x7F, 0xFF]


def test_numbers_may_lie_apart() -> None:
    """Parts of a larger array, of three dimensions, beginning at an odd byte."""
    raw = np.zeros(1 + 4 * 6 * 64, np.uint8)
    parts = raw[1:].reshape(4, 6, 64)[:, ::2, 8:24]
    assert all_finite(parts, "float32")
    assert all_finite(parts, "bfloat16")
    parts[2, 1, 4:8] = 0xFF
    assert not all_finite(parts, "float32")
    assert not all_finite(parts, "bfloat16")
    parts[2, 1, 4:8] = 0
    raw[1:].reshape(4, 6, 64)[2, 1, 8:24] = 0xFF
    assert all_finite(parts, "float32"), "looks beside the parts"
