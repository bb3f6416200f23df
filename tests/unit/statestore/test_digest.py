# SPDX-License-Identifier: Apache-2.0
"""Digests find damage wherever it is; the proof finds what a digest cannot: null and non-finite state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from statestore.digest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Digester,
    all_finite,
    combine,
    digest_pieces,
    is_null,
    null_parts,
    null_rows,
)
from statestore.geometry import DTYPE_BYTES


@dataclass
class Cell:
    offsets: NDArray[np.int64]
    nbytes: NDArray[np.int64]


def cell(*pieces: tuple[int, int]) -> Cell:
    columns = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    return Cell(columns[:, 0], columns[:, 1])


@pytest.fixture
def data() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, 3 * CHUNK_BYTES + 12345, dtype=np.uint8)


def test_known_value() -> None:
    """Pins the algorithm: a record written today must be readable after an upgrade of the library."""
    assert digest_pieces(b"deltaserve", cell((0, 10))) == xxhash.xxh3_128_digest(b"deltaserve")
    assert combine([]).hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_do_not_change_a_digest(threads: int, data: NDArray[np.uint8]) -> None:
    digester = Digester(threads)
    chunks = [xxhash.xxh3_128_digest(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)]
    assert digester.buffer(data) == combine(chunks)
    assert len(digester.buffer(data)) == DIGEST_BYTES
    cells = [cell((at * 100, 50), (at, 7)) for at in range(20)]
    assert digester.cells(data, cells) == [digest_pieces(data, one) for one in cells]
    digester.close()


def test_digest_is_over_the_sequence_not_the_places(data: NDArray[np.uint8]) -> None:
    staged = np.concatenate((data[500:700], data[40:50], data[1000:1100]))
    assert digest_pieces(data, cell((500, 200), (40, 10), (1000, 100))) == digest_pieces(
        staged, cell((0, 310))
    )
    # Negative control: the order of the pieces counts.
    assert digest_pieces(data, cell((40, 10), (500, 200), (1000, 100))) != digest_pieces(
        staged, cell((0, 310))
    )


@pytest.mark.parametrize("at", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 12344])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_shows(data: NDArray[np.uint8], at: int, bit: int) -> None:
    digester = Digester(2)
    before = digester.buffer(data)
    data[at] ^= 1 << bit
    assert digester.buffer(data) != before
    data[at] ^= 1 << bit
    assert digester.buffer(data) == before
    digester.close()


def test_truncation_and_swapped_chunks_show(data: NDArray[np.uint8]) -> None:
    digester = Digester(2)
    before = digester.buffer(data)
    assert digester.buffer(data[:-1]) != before
    swapped = data.copy()
    swapped[:CHUNK_BYTES], swapped[CHUNK_BYTES : 2 * CHUNK_BYTES] = (
        data[CHUNK_BYTES : 2 * CHUNK_BYTES],
        data[:CHUNK_BYTES],
    )
    assert digester.buffer(swapped) != before
    digester.close()


def test_a_piece_outside_the_buffer_is_refused() -> None:
    for piece in ((0, 11), (10, 1), (-1, 2)):
        with pytest.raises(ValueError, match="outside the buffer"):
            digest_pieces(b"0123456789", cell(piece))


def test_a_strided_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        Digester(1).buffer(np.zeros((4, 4), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="threads=0"):
        Digester(0)


def test_arrays_of_any_type_are_bytes() -> None:
    numbers = np.arange(1000, dtype=np.float32).reshape(10, 100)
    digester = Digester(1)
    assert digester.buffer(numbers) == digester.buffer(numbers.tobytes())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1 << 20])
def test_null_buffers(size: int) -> None:
    assert is_null(bytes(size))
    for at in {0, size // 2, size - 1} if size else ():
        damaged = bytearray(size)
        damaged[at] = 1
        assert not is_null(damaged)


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
def test_not_finite_numbers_are_found(dtype: str, lead: int) -> None:
    """Infinities and NaN, at the ends and in the middle, also when the buffer is not aligned."""
    width = DTYPE_BYTES[dtype]
    count = 200_000
    good = bytearray(lead) + bytearray(LARGEST[dtype] * count)
    assert all_finite(memoryview(good)[lead:], dtype)
    for bad in NOT_FINITE[dtype]:
        for at in (0, count // 2, count - 1):
            damaged = bytearray(good)
            damaged[lead + at * width : lead + (at + 1) * width] = bad
            assert not all_finite(memoryview(damaged)[lead:], dtype)


def test_finite_refuses_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="dtype 'int8' is unknown"):
        all_finite(b"12", "int8")
    with pytest.raises(ValueError, match="whole number"):
        all_finite(b"123", "bfloat16")


def test_proof_names_the_layers_that_fail() -> None:
    state = np.random.default_rng(1).standard_normal((5, 100)).astype(np.float32)
    parts = [(layer * 400, 400) for layer in range(5)]
    assert null_parts(state, parts, "float32") == []
    state[1] = 0
    state[3, 99] = np.nan
    state[4, 0] = np.inf
    assert null_parts(state, parts, "float32") == [1, 3, 4]
    assert null_parts(state, [(0, 0)], "float32") == [0]
    with pytest.raises(ValueError, match="outside the buffer"):
        null_parts(state, [(1999, 4)], "float32")


def test_null_rows_are_counted() -> None:
    rows = np.random.default_rng(2).integers(1, 256, (50, 48), dtype=np.uint8)
    assert null_rows(rows, 48) == 0
    rows[[3, 49]] = 0
    rows[10, :47] = 0
    assert null_rows(rows, 48) == 2
    assert null_rows(b"", 48) == 0
    with pytest.raises(ValueError, match="whole number of rows"):
        null_rows(bytes(47), 48)
