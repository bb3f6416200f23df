# SPDX-License-Identifier: Apache-2.0
"""The name of a token prefix: equal names mean equal tokens under equal salts, so no tenant reads another's state."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence


def prefix_hash(tokens: Sequence[int], cache_salt: str = "") -> str:
    """SHA-256 over the salt and the tokens (as little-endian 32-bit words), 32 hexadecimal digits.

    A cryptographic hash: a client chooses its tokens, and must not be able to choose another client's prefix.
    """
    return prefix_hashes(tokens, [len(tokens)], cache_salt)[len(tokens)]


def prefix_hashes(tokens: Sequence[int], lengths: Iterable[int], cache_salt: str = "") -> dict[int, str]:
    """`prefix_hash` of the first `length` tokens, for every length, in one pass.

    Raises ValueError for a length beyond the tokens.
    """
    words = array("I", tokens)
    data = memoryview(words).cast("B")
    digest = hashlib.sha256(len(cache_salt).to_bytes(4, "little") + cache_salt.encode())
    at, found = 0, {}
    for length in sorted(set(lengths)):
        if not 0 <= length <= len(words):
            raise ValueError(f"length: {length} is outside [0, {len(words)}]")
        digest.update(data[at * words.itemsize : length * words.itemsize])
        at = length
        found[length] = digest.copy().hexdigest()[:32]
    return found
