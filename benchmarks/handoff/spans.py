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

import torch

from benchmarks.intervals import covered
from statestore.connector.cache_view import CacheView
from statestore.gpu.found import Found

POOL_STAGES = {
    "reserve_all": "reserve",
    "write": "put",
    "complete": "put",
    "get_into": "get",
    "get_ranges": "get",
}
"""Calls of `statestore.pool.Pool` and the stage that each is."""

FUNCTIONS = {"copy_from_home": "get"}
"""Functions that a load calls, and the stage that each is."""

PROOFS = ("HeadsProof", "RowsProof")
"""Classes that it uses; their `take` is a proof: digest and checks in one pass."""


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


class TimedPool:
    """A pool whose calls are recorded; everything else is the pool's own."""

    def __init__(self, pool: Any, spans: Spans) -> None:
        self._pool, self._spans = pool, spans

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._pool, name)
        return self._spans.timed(POOL_STAGES[name], value) if name in POOL_STAGES else value

    @contextlib.contextmanager
    def at_home(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """See `Pool`; finding out is recorded, the time of the `with` is not."""
        with contextlib.ExitStack() as stack:
            with self._spans.span("get"):
                home = stack.enter_context(self._pool.at_home(*args, **kwargs))
            yield home


class TimedView(CacheView):
    """A cache view whose copies are recorded."""

    spans: Spans

    def gatherer(self, *args: Any, **kwargs: Any) -> Callable[[range], None]:
        """See `CacheView`."""
        return self.spans.timed("gather", super().gatherer(*args, **kwargs))

    def gather_rows(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("gather"):
            super().gather_rows(*args, **kwargs)

    def prove_heads(self, *args: Any, **kwargs: Any) -> Found:
        """See `CacheView`; with the digest, which a device takes on the way."""
        with self.spans.span("gather"):
            return super().prove_heads(*args, **kwargs)

    def prove_rows(self, *args: Any, **kwargs: Any) -> Found:
        """The same."""
        with self.spans.span("gather"):
            return super().prove_rows(*args, **kwargs)

    def check_heads(self, *args: Any, **kwargs: Any) -> tuple[Found, torch.Tensor]:
        """See `CacheView`; with the copy to the device."""
        with self.spans.span("proof"):
            return super().check_heads(*args, **kwargs)

    def check_rows(self, *args: Any, **kwargs: Any) -> tuple[Found, torch.Tensor]:
        """The same."""
        with self.spans.span("proof"):
            return super().check_rows(*args, **kwargs)

    def scatter_heads(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("scatter"):
            super().scatter_heads(*args, **kwargs)

    def scatter_rows(self, *args: Any, **kwargs: Any) -> None:
        """See `CacheView`."""
        with self.spans.span("scatter"):
            super().scatter_rows(*args, **kwargs)


@contextlib.contextmanager
def recorded_proofs(module: ModuleType, spans: Spans) -> Iterator[None]:
    """Record digests and checks that `module` makes. Raises RuntimeError when it makes none by the known names."""
    known: dict[str, Any] = {
        name: spans.timed(stage, getattr(module, name))
        for name, stage in FUNCTIONS.items()
        if hasattr(module, name)
    }
    for name in PROOFS:
        if hasattr(module, name):
            proof = getattr(module, name)
            known[name] = type(name, (proof,), {"take": _timed_method(proof.take, spans)})
    if not known:
        raise RuntimeError(f"{module.__name__} proves nothing by the names of {__name__}; correct them")
    with contextlib.ExitStack() as stack:
        for name, value in known.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _timed_method(method: Callable[..., Any], spans: Spans) -> Callable[..., Any]:
    """A method, recorded; a bound one would lose its object."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with spans.span("proof"):
            return method(self, *args, **kwargs)

    return run
