# SPDX-License-Identifier: Apache-2.0
"""Digests of state, and the proof that state is not null.

A digest says that bytes arrived as they were written; it says nothing about what was written: a null block copies
perfectly. So a shard carries both: XXH3-128 digests of its cells (see `statestore.reshard`), and a proof, taken by
the writer and again by the reader, that every layer has at least one non-zero byte and that all its numbers are
finite.

XXH3-128 finds damage, not malice: it is no authentication. What is hashed is the logical sequence of bytes of a cell,
so that writer and reader agree although the bytes lie at different offsets. `combine` turns the digests of the
parts, in order, into one of the whole. Buffers are anything that gives a contiguous memoryview (bytes, numpy
arrays, CPU tensors through numpy). Hashing releases the interpreter lock and runs in parallel over cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

DIGEST_BYTES = 16
"""Length of a digest."""

CHUNK_BYTES = 4 << 20
"""A contiguous buffer is hashed in chunks of this size, in parallel; part of the definition of its digest."""

_PARALLEL_BYTES = 256 << 10
"""Cells whose pieces are smaller on average are hashed on the caller's thread: threads would spend
their time passing the interpreter lock around."""

_SCAN_BYTES = 256 << 10
"""Numbers are checked in pieces of this size, so that temporaries stay in the cache of the core."""

_EXPONENT: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    # e4m3 (the "fn" form) has no infinity and one NaN: all ones below the sign.
    "float8_e4m3": (np.uint8, 0x7F),
    "float8_e5m2": (np.uint8, 0x7C),
}
"""Integer view and the bits that are all ones exactly in numbers that are not finite."""

Item = TypeVar("Item")


class Pieces(Protocol):
    """Byte ranges in order; `statestore.reshard.Cell` is one."""

    @property
    def offsets(self) -> NDArray[np.int64]: ...

    @property
    def nbytes(self) -> NDArray[np.int64]: ...


def as_bytes(buffer: object) -> memoryview:
    """A flat view of unsigned bytes. Raises TypeError without the buffer protocol, ValueError when not contiguous."""
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("buffer is not contiguous; copy it into one that is before taking its digest")
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B")


def combine(digests: Iterable[bytes]) -> bytes:
    """The digest of the whole from the digests of its parts, in their order."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def digest_pieces(buffer: object, pieces: Pieces) -> bytes:
    """Digest of the pieces' bytes as one sequence. Raises ValueError when a piece lies outside the buffer."""
    view = as_bytes(buffer)
    hasher = xxhash.xxh3_128()
    for offset, nbytes in zip(pieces.offsets.tolist(), pieces.nbytes.tolist(), strict=True):
        # A slice past the end would be shorter without a word, and a truncated object would pass unseen.
        if offset < 0 or offset + nbytes > len(view):
            raise ValueError(
                f"piece [{offset}, {offset + nbytes}) lies outside the buffer of {len(view)} bytes"
            )
        hasher.update(view[offset : offset + nbytes])
    return hasher.digest()


class Digester:
    """Takes digests on threads of its own; safe to share. `close` ends the threads.

    `threads`: how many; one hashes on the caller's thread.
    """

    def __init__(self, threads: int = 4) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads} must be at least 1")
        self._pool = ThreadPoolExecutor(threads, "digest") if threads > 1 else None

    def buffer(self, buffer: object) -> bytes:
        """Digest of one contiguous buffer: `combine` of the digests of its chunks of `CHUNK_BYTES`."""
        view = as_bytes(buffer)
        starts = range(0, len(view), CHUNK_BYTES)
        return combine(self._map(lambda at: xxhash.xxh3_128_digest(view[at : at + CHUNK_BYTES]), starts))

    def cells(self, buffer: object, cells: Sequence[Pieces]) -> list[bytes]:
        """Digest of each cell of the buffer. Raises ValueError when one lies outside it."""
        view = as_bytes(buffer)
        pieces = sum(len(cell.nbytes) for cell in cells)
        if sum(int(cell.nbytes.sum()) for cell in cells) < pieces * _PARALLEL_BYTES:
            return [digest_pieces(view, cell) for cell in cells]
        return self._map(lambda cell: digest_pieces(view, cell), cells)

    def _map(self, function: Callable[[Item], bytes], items: Sequence[Item]) -> list[bytes]:
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """Wait for what runs and end the threads."""
        if self._pool is not None:
            self._pool.shutdown()


def all_finite(buffer: object, dtype: str) -> bool:
    """Whether no number in the buffer is infinite or NaN; `dtype` is a name of `geometry.DTYPE_BYTES`.

    Raises ValueError for an unknown dtype and for a buffer that is not a whole number of elements.
    """
    if dtype not in _EXPONENT:
        raise ValueError(f"dtype {dtype!r} is unknown; use one of {', '.join(_EXPONENT)}")
    kind, mask = _EXPONENT[dtype]
    raw = np.frombuffer(as_bytes(buffer), dtype=np.uint8)
    width = np.dtype(kind).itemsize
    if len(raw) % width:
        raise ValueError(f"buffer of {len(raw)} bytes is not a whole number of {dtype} elements")
    # State may begin at any byte of a staging buffer; numpy handles the unaligned view.
    step = _SCAN_BYTES // width
    numbers = raw.view(np.float32 if dtype == "float32" else np.float16 if dtype == "float16" else kind)
    for at in range(0, len(numbers), step):
        piece = numbers[at : at + step]
        if piece.dtype.kind == "f":
            if not np.isfinite(piece).all():
                return False
        elif ((piece & mask) == mask).any():
            return False
    return True


def is_null(buffer: object) -> bool:
    """Whether every byte is zero; an empty buffer is null."""
    raw = np.frombuffer(as_bytes(buffer), dtype=np.uint8)
    whole = len(raw) // 8 * 8
    # Eight bytes at a time; any real state ends the search in its first piece.
    words = raw[:whole].view(np.uint64)
    step = _SCAN_BYTES // 8
    return not any(words[at : at + step].any() for at in range(0, len(words), step)) and not raw[whole:].any()


def null_parts(buffer: object, parts: Sequence[tuple[int, int]], dtype: str) -> list[int]:
    """The proof: indices of the parts (offset, nbytes) that are all zero or hold a number that is not finite.

    Give one part a layer; an empty result proves all of them. Raises ValueError for a part outside the buffer.
    """
    view = as_bytes(buffer)
    bad = []
    for index, (offset, nbytes) in enumerate(parts):
        if offset < 0 or offset + nbytes > len(view):
            raise ValueError(
                f"part [{offset}, {offset + nbytes}) lies outside the buffer of {len(view)} bytes"
            )
        part = view[offset : offset + nbytes]
        if is_null(part) or not all_finite(part, dtype):
            bad.append(index)
    return bad


def null_rows(buffer: object, row_bytes: int) -> int:
    """How many rows of `row_bytes` bytes are all zero: a token whose latent row is, was never computed.

    Raises ValueError for a buffer that is not a whole number of rows.
    """
    raw = np.frombuffer(as_bytes(buffer), dtype=np.uint8)
    if row_bytes < 1 or len(raw) % row_bytes:
        raise ValueError(f"buffer of {len(raw)} bytes is not a whole number of rows of {row_bytes} bytes")
    rows = raw.reshape(-1, row_bytes)
    # Real rows show themselves in their first bytes; only the others are read to the end.
    suspects = rows[~rows[:, :16].any(axis=1)]
    return int((~suspects.any(axis=1)).sum())
