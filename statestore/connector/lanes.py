# SPDX-License-Identifier: Apache-2.0
"""Work on the pieces of one transfer, on several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

_Piece = TypeVar("_Piece")


def share(pieces: Sequence[_Piece], lanes: int, work: Callable[[_Piece], None]) -> None:
    """`work` on every piece, begun in their order, on the calling thread and `lanes` - 1 others. Raises what failed
    first, once all have ended; what has not begun by then is left out."""
    left = iter(pieces)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def lane() -> None:
        while not errors:
            with lock:
                piece = next(left, None)
            if piece is None:
                return
            try:
                work(piece)
            except BaseException as error:
                errors.append(error)

    helpers = [
        threading.Thread(target=lane, name="state-lane", daemon=True)
        for _ in range(min(lanes, len(pieces)) - 1)
    ]
    for helper in helpers:
        helper.start()
    lane()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
