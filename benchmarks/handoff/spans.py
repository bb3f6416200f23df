# SPDX-License-Identifier: Apache-2.0
"""Where the time of a job goes: stages are recorded around the public calls that a publish or a load makes.

Stages may run at once (a put while the next piece is gathered), so their times may add up to more than the job's.
A stage's time is how long at least one call of it was running.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from statestore.connector.cache_view import CacheView

POOL_STAGES = {
    "reserve": "reserve",
    "write": "put",
    "seal": "seal",
    "get_into": "get",
    "get_ranges": "get",
}
"""Calls of `statestore.pool.Pool` and the stage that each is."""

CHECKS = {
    "unit_digest": "digest",
    "check_digest": "digest",
    "check_heads": "checks",
    "check_rows": "checks",
    "check_table": "checks",
}
"""Names in the modules of a publish or load, and the stage that each is."""


class Spans:
    """Recorded stages. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Record what runs inside."""
        began = time.monotonic()
        try:
            yield
        finally:
            ended = time.monotonic()
            with self._lock:
                self._spans.append((stage, began, ended))

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, recorded."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.span(stage):
                return call(*args, **kwargs)

        return run

    def take(self) -> dict[str, float]:
        """Seconds of every stage since the last look."""
        with self._lock:
            spans, self._spans = self._spans, []
        by_stage: dict[str, list[tuple[float, float]]] = {}
        for stage, began, ended in spans:
            by_stage.setdefault(stage, []).append((began, ended))
        return {stage: covered(parts) for stage, parts in by_stage.items()}


def covered(parts: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for began, ended in sorted(parts):
        total += max(0.0, ended - max(began, reached))
        reached = max(reached, ended)
    return total


class TimedPool:
    """A pool whose calls are recorded; everything else is the pool's own."""

    def __init__(self, pool: Any, spans: Spans) -> None:
        self._pool, self._spans = pool, spans

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._pool, name)
        return self._spans.timed(POOL_STAGES[name], value) if name in POOL_STAGES else value

    def put(self, *args: Any, **kwargs: Any) -> Any:
        """The pool's own put, over the recorded steps."""
        return type(self._pool).put(self, *args, **kwargs)


class TimedView(CacheView):
    """A cache view whose copies are recorded."""

    spans: Spans

    def gather_heads(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("gather"):
            super().gather_heads(*args, **kwargs)

    def gather_rows(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("gather"):
            super().gather_rows(*args, **kwargs)

    def scatter_heads(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("scatter"):
            super().scatter_heads(*args, **kwargs)

    def scatter_rows(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("scatter"):
            super().scatter_rows(*args, **kwargs)


@contextlib.contextmanager
def recorded_checks(module: ModuleType, spans: Spans) -> Iterator[None]:
    """Record digests and checks that `module` calls. Raises RuntimeError when it calls none by the known names."""
    known = [name for name in CHECKS if hasattr(module, name)]
    if not {"digest", "checks"} <= {CHECKS[name] for name in known}:
        raise RuntimeError(
            f"{module.__name__} calls none of {', '.join(CHECKS)} as digest and check; correct spans.CHECKS"
        )
    with contextlib.ExitStack() as stack:
        for name in known:
            stack.enter_context(
                mock.patch.object(module, name, spans.timed(CHECKS[name], getattr(module, name)))
            )
        yield
