# SPDX-License-Identifier: Apache-2.0
"""Digests of state, and what proves that state is not null.

A digest says that bytes arrived as they were written; it says nothing about what was written: a null block copies
perfectly. So every unit (`statestore.reshard.Unit`) has a digest, and both sides also look for parts that are all zero
and for numbers that are not finite; `statestore.connector.checks` says of which parts. A unit of rows has a table with
a digest of every row (`row_digests`), and its own digest is the table's: who reads some of its rows can check them.

There are two algorithms, and a record names the one of each object: XXH3-128 of state that was in host memory, `ml64`
(`statestore.checksum`) of state that a GPU gathered. Every reader knows both. They find damage, not malice: neither is
an authentication. Buffers are anything that gives a contiguous memoryview
(bytes, numpy arrays, CPU tensors through numpy). All functions run on the caller's thread, and numpy and xxhash release
the interpreter lock in the long loops.

What they cost is memory: in a core's cache digests take 20 to 45 GB/s and the checks 8 to 25, cold both take what the
memory gives (docs/performance.md). `stream` and `all_finite` are for callers that go over state once, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from statestore import checksum

Bytes = NDArray[np.uint8]

XXH3 = "xxh3-128"
ML64 = checksum.NAME
ALGORITHMS: dict[str, Callable[[], Any]] = {XXH3: xxhash.xxh3_128, ML64: checksum.Checksum}
"""By the name in a record: what makes a digest in progress."""

_SCAN_BYTES = 256 << 10
"""Numbers are checked in pieces of this size, so that temporaries stay in the cache of the core."""

_BOUNDS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    # e4m3 (the "fn" form) has no infinity and one NaN: all ones below the sign.
    "float8_e4m3": (np.uint8, 0x7F),
    "float8_e5m2": (np.uint8, 0x7C),
}
"""Integer view, and the least integer without a sign whose number is not finite: every larger one is not either."""

_HEAD_BYTES = 16
"""A part with a non-zero byte here is not null; only the others are read to their end."""


def unit_digest(buffer: object, algorithm: str = XXH3) -> str:
    """The digest of a contiguous buffer's bytes, in hexadecimal digits: 32 of XXH3-128, 16 of ml64.

    Raises TypeError without the buffer protocol, ValueError when the buffer is not contiguous or the algorithm unknown.
    """
    view = memoryview(buffer)  # type: ignore[arg-type]
    if not view.c_contiguous:
        raise ValueError("buffer is not contiguous; copy it into one that is before taking its digest")
    if algorithm == XXH3:
        return str(xxhash.xxh3_128_hexdigest(view))
    running = stream(algorithm)
    running.update(view)
    return str(running.hexdigest())


def row_digests(rows: Bytes, algorithm: str = XXH3) -> Bytes:
    """A digest of every row of `rows` [n, nbytes], as bytes [n, 8]: XXH3-64, or ml64.

    A row is contiguous. Raises ValueError when the algorithm is unknown.
    """
    if algorithm == XXH3:
        numbers = np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.dtype("<u8"), len(rows))
        return numbers.view(np.uint8).reshape(-1, 8)
    return digest_bytes([unit_digest(row, algorithm) for row in rows])


def digest_bytes(digests: Sequence[str]) -> Bytes:
    """Digests of 16 hexadecimal digits as the bytes [n, 8] that a table holds."""
    numbers = np.fromiter((int(digest, 16) for digest in digests), np.dtype("<u8"), len(digests))
    return numbers.view(np.uint8).reshape(-1, 8)


def first_null(parts: Bytes) -> int | None:
    """Index of the first of `parts` [n, nbytes] whose bytes are all zero; None without one. A part may be strided."""
    if parts.shape[1] == 0:
        return 0 if len(parts) else None
    # Real state shows itself in its first bytes.
    for index in np.flatnonzero(~parts[:, :_HEAD_BYTES].any(axis=1)).tolist():
        if not parts[index].any():
            return int(index)
    return None


def stream(algorithm: str = XXH3) -> Any:
    """A digest in progress: `update(buffer)` as often as needed, then `hexdigest()`, the `unit_digest` of it all.

    Raises ValueError naming an unknown algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"digest algorithm {algorithm!r} is unknown; this version has {', '.join(ALGORITHMS)}"
        )
    return ALGORITHMS[algorithm]()


def all_finite(numbers: NDArray[np.uint8], dtype: str) -> bool:
    """Whether no number is infinite or a NaN; `numbers` are bytes of any shape and strides but for the last axis.

    `dtype` is a name of `geometry.DTYPE_BYTES`. Raises ValueError for an unknown one, and for a last axis that is not
    a whole number of elements.
    """
    if dtype == "float32":
        return bool(np.isfinite(_as(numbers, np.float32, dtype)).all())
    if dtype not in _BOUNDS:
        raise ValueError(f"dtype {dtype!r} is unknown; use one of float32, {', '.join(_BOUNDS)}")
    unsigned, bound = _BOUNDS[dtype]
    if numbers.size == 0:
        return True
    # Two reductions and no temporary: among numbers without a sign the large ones are not finite, signed integers
    # show those; among numbers with a sign the same, and unsigned integers show them above all others.
    width = np.dtype(unsigned).itemsize
    signed = np.dtype(f"i{width}")
    negative = bound | 1 << (8 * width - 1)
    return bool(
        _as(numbers, signed.type, dtype).max() < bound and _as(numbers, unsigned, dtype).max() < negative
    )


def first_not_finite(parts: Bytes, dtype: str) -> int | None:
    """Index of the first of `parts` [n, nbytes] with an infinite number or a NaN; None without one.

    `dtype` is a name of `geometry.DTYPE_BYTES`; parts may begin at any byte. Raises ValueError for an unknown dtype and
    for parts that are not a whole number of elements.
    """
    all_finite(parts[:0], dtype)
    if parts.size == 0:
        return None
    # Whole parts at once while they are small, else pieces of one part.
    rows = max(1, _SCAN_BYTES // parts.shape[1])
    for low in range(0, len(parts), rows):
        for at in range(0, parts.shape[1], _SCAN_BYTES):
            if not all_finite(parts[low : low + rows, at : at + _SCAN_BYTES], dtype):
                return low + next(
                    n for n, part in enumerate(parts[low : low + rows]) if not all_finite(part, dtype)
                )
    return None


def _as(numbers: NDArray[np.uint8], kind: type[np.generic], dtype: str) -> NDArray[Any]:
    if numbers.shape[-1] % np.dtype(kind).itemsize:
        raise ValueError(f"parts of {numbers.shape[-1]} bytes are not a whole number of {dtype} elements")
    return numbers.view(kind)
