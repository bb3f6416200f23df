# SPDX-License-Identifier: Apache-2.0
"""Names of prefixes."""

from __future__ import annotations

import pytest

from statestore.prefix import prefix_hash, prefix_hashes

TOKENS = list(range(1000, 1100))


def test_one_pass_gives_the_hash_of_every_prefix() -> None:
    hashes = prefix_hashes(TOKENS, [100, 1, 64, 64, 0], "salt")
    assert list(hashes) == [0, 1, 64, 100]
    assert hashes == {length: prefix_hash(TOKENS[:length], "salt") for length in (0, 1, 64, 100)}
    assert len(set(hashes.values())) == 4


def test_the_name_is_kept() -> None:
    """Records in a ledger outlive a version: the same tokens must keep their name."""
    assert prefix_hash([1, 2, 3]) == "baed642339816affb3fe8719792d0e4c"


def test_salt_and_tokens_matter() -> None:
    assert prefix_hash(TOKENS, "a") != prefix_hash(TOKENS, "b")
    assert prefix_hash(TOKENS) != prefix_hash([*TOKENS[:-1], 7])
    # Neither can take the other's place: the salt's length is part of what is hashed.
    assert prefix_hash([0x61616161], "") != prefix_hash([], "aaaa")


def test_a_length_beyond_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="101"):
        prefix_hashes(TOKENS, [101])
