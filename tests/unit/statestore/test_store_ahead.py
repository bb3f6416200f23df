# SPDX-License-Identifier: Apache-2.0
"""Store calls beside the work: pieces arrive in order, and both have ended, well or badly, when their `with` ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from statestore.connector.store_ahead import StreamedPut
from statestore.pool import KeyExists, PoolFull, PoolMissing
from tests.doubles.pool import PoolDouble, Store


def data(nbytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)


def pool(**fields: int) -> PoolDouble:
    return PoolDouble(Store(), **fields)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("state-")}


def test_pieces_become_one_object() -> None:
    it = pool()
    with it.staging(1000, 1.0) as staged, StreamedPut(it, "k", 1000, "") as put:
        staged[:] = data(1000)
        put.write([(600, staged[600:])])
        put.write([(0, staged[:600])])
        assert not put.sealed
        put.finish()
        assert put.placement().nbytes == 1000
        back = np.empty(1000, np.uint8)
        it.register(back)
        it.get_into("k", [back])
        assert (back == staged).all()
    assert put.sealed
    assert not threads()


def test_what_is_given_up_never_existed() -> None:
    it = pool()

    def give_up(staged: np.ndarray) -> None:
        with StreamedPut(it, "k", 1000, "") as put:
            put.write([(0, staged[:500])])
            raise RuntimeError("null state")

    with it.staging(1000, 1.0) as staged:
        with pytest.raises(RuntimeError, match="null state"):
            give_up(staged)
        with pytest.raises(PoolMissing):
            it.size("k")
        it.put("k", [staged], "")  # the room and the name are free again
    assert not threads()


def test_a_full_store_and_a_key_that_is_there() -> None:
    it = pool(segment_bytes=4096)

    def put_whole(key: str, staged: np.ndarray) -> None:
        with StreamedPut(it, key, staged.nbytes, "") as put:
            put.write([(0, staged)])
            put.finish()
            put.placement()

    with it.staging(8192, 1.0) as staged:
        with pytest.raises(PoolFull):
            put_whole("large", staged)
        it.put("k", [staged[:100]])
        with pytest.raises(KeyExists):
            put_whole("k", staged[:200])
    assert it.size("k") == 100, "somebody else's object stays"
    assert not threads()
