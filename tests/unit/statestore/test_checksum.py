# SPDX-License-Identifier: Apache-2.0
"""`ml64` is what its description says, however its input is cut, and sees what happens to state."""

from __future__ import annotations

import numpy as np
import pytest

from statestore.checksum import GOLDEN, MULTIPLIER, SHIFT, TILE, Checksum, checksum, finish, finish_all

MASK = (1 << 64) - 1


def key(m: int) -> int:
    t = (m + 1) * GOLDEN & MASK
    t = (t ^ t >> 32) * MULTIPLIER & MASK
    return t ^ t >> 32 | 1


def by_hand(data: bytes, shift: int = SHIFT) -> str:
    """The description, word by word in Python's own numbers; `shift` 64 leaves words as they are."""
    total = len(data) * GOLDEN
    padded = data + bytes(-len(data) % 8)
    for i in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * i : 8 * i + 8], "little")
        total += (word ^ word >> shift) * key(i % TILE) * key(TILE + i // TILE)
    total &= MASK
    total = (total ^ total >> 33) * 0xFF51AFD7ED558CCD & MASK
    total = (total ^ total >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return f"{total ^ total >> 33:016x}"


def random(count: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).tobytes()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192 + 40])
def test_it_is_what_it_says(count: int) -> None:
    data = random(count)
    assert checksum(data) == by_hand(data)
    # Control: one bit, and one byte of zeros more, are another digest.
    assert checksum(bytes([data[0] ^ 1]) + data[1:]) != by_hand(data)
    assert checksum(data + b"\0") != by_hand(data)


def test_vectors_stay() -> None:
    """Records outlive versions: a change of the algorithm takes another name."""
    assert checksum(b"") == by_hand(b"")
    assert checksum(b"deltaserve") == by_hand(b"deltaserve") == "ef9e7e7c04c6b48e"
    assert checksum(bytes(range(256)) * 1024) == "977290d11655387c"


def test_pieces_give_the_digest_of_the_whole() -> None:
    data = random(600_001)
    cuts = np.random.default_rng(1)
    running, at = Checksum(), 0
    while at < len(data):
        step = int(cuts.integers(1, 40_000))
        running.update(data[at : at + step])
        at += step
    assert running.hexdigest() == checksum(data)
    # Asking does not end it.
    running.update(b"more")
    assert running.hexdigest() == checksum(data + b"more")


def test_more_tiles_than_are_kept_ready() -> None:
    data = np.zeros(8 * TILE * 4100, np.uint8)
    data[-8:] = np.frombuffer(b"lastword", np.uint8)
    word = int.from_bytes(b"lastword", "little")
    part = (word ^ word >> SHIFT) * key(TILE - 1) * key(TILE + 4099)
    one = Checksum()
    one._sum, one._nbytes = part & MASK, len(data)
    assert checksum(data) == one.hexdigest()


@pytest.mark.parametrize("bits", [[63, 31], [63], [15, 31, 47, 63]], ids=str)
def test_flipped_signs_of_all_numbers_are_seen(bits: list[int]) -> None:
    """Bits at the top of a word are worth little in a product mod 2^64; `SHIFT` brings them down."""
    words = np.frombuffer(random(4096), np.uint64)
    flipped = words ^ np.uint64(sum(1 << bit for bit in bits))
    assert checksum(words) != checksum(flipped)
    if bits == [63]:
        # Control: without the shift an even number of flipped top bits is no change at all.
        assert by_hand(words.tobytes(), 64) == by_hand(flipped.tobytes(), 64)


@pytest.mark.parametrize("apart", [1, TILE, TILE + 1, 5 * TILE])
def test_words_that_trade_places_are_seen(apart: int) -> None:
    words = np.frombuffer(random(8 * 8 * TILE), np.uint64).copy()
    before = checksum(words)
    words[[3, 3 + apart]] = words[[3 + apart, 3]]
    assert checksum(words) != before
    words[[3, 3 + apart]] = words[[3 + apart, 3]]
    assert checksum(words) == before


def test_a_buffer_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        checksum(np.zeros((8, 8), np.uint8)[:, ::2])


@pytest.mark.parametrize("nbytes", [8, 4608, (1 << 40) + 8])
def test_many_are_finished_as_one_is(nbytes: int) -> None:
    """Sums as devices give them: signed, of more than 64 bits where pieces were added up."""
    totals = [
        0,
        1,
        -1,
        MASK,
        MASK + 5,
        -(1 << 63),
        (1 << 70) + 3,
        *np.random.default_rng(2).integers(-(1 << 62), 1 << 62, 500).tolist(),
    ]
    found = finish_all(totals, nbytes)
    assert [f"{number:016x}" for number in found.tolist()] == [finish(total, nbytes) for total in totals]
    assert found.tolist() != finish_all(totals, nbytes + 8).tolist(), "the length counts"
    assert len(finish_all([], nbytes)) == 0
