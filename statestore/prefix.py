# SPDX-License-Identifier: Apache-2.0
"""The name of a token prefix: equal names mean equal tokens under equal salts, so no tenant reads another's state."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def prefix_hash(tokens: Sequence[int], cache_salt: str = "") -> str:
    """SHA-256 over the salt and the tokens (as little-endian 32-bit words), 32 hexadecimal digits.

    A cryptographic hash: a client chooses its tokens, and must not be able to choose another client's prefix.
    """
    digest = hashlib.sha256(len(cache_salt).to_bytes(4, "little") + cache_salt.encode())
    digest.update(array("I", tokens).tobytes())
    return digest.hexdigest()[:32]
