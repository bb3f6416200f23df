# SPDX-License-Identifier: Apache-2.0
"""Metrics and logs. Names, units and labels are stable; docs/metrics.md has the table.

Labels are few and closed: a stage, a failure kind (statestore/connector/worker_half.py and the roles have the lists).
"""

from __future__ import annotations

import logging
import sys

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class HandoffMetrics:
    """The life of boundaries, as one worker sees it."""

    def __init__(self) -> None:
        self._published = Counter("deltaserve_boundaries_published_total", "boundaries committed")
        self._released = Counter(
            "deltaserve_boundaries_released_total", "boundaries released, objects and record gone"
        )
        self._swept = Counter("deltaserve_boundaries_swept_total", "boundaries of dead workers removed")
        self._loaded = Counter("deltaserve_boundaries_loaded_total", "boundaries verified and restored")
        self._failed = Counter(
            "deltaserve_boundary_failures_total", "publishes and loads that failed", ["stage", "kind"]
        )
        self._recomputed = Counter(
            "deltaserve_recomputed_tokens_total",
            "prompt tokens computed although they should have come from the store",
            ["reason"],
        )
        self._checkpoint_bytes = Gauge(
            "deltaserve_checkpoint_bytes", "checkpoints of this worker in the store"
        )
        self._checkpoints = Counter(
            "deltaserve_checkpoints_total",
            "checkpoints, by what became of them: committed, adopted (another worker had it), evicted",
            ["event"],
        )
        self._evicted_bytes = Counter("deltaserve_checkpoint_evicted_bytes_total", "checkpoints evicted")
        self._restored = Counter(
            "deltaserve_checkpoint_tokens_total",
            "prompt tokens restored from checkpoints instead of computed",
        )
        self._bytes = Counter("deltaserve_handoff_bytes_total", "state moved", ["stage"])
        self._seconds = Histogram(
            "deltaserve_handoff_seconds", "time of a publish or load", ["stage"], buckets=_SECONDS
        )

    def published(self, nbytes: int, seconds: float) -> None:
        """A boundary was committed `seconds` after its request arrived."""
        self._published.inc()
        self._bytes.labels("publish").inc(nbytes)
        self._seconds.labels("publish").observe(seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A boundary was restored; `seconds` of its slowest rank."""
        self._loaded.inc()
        self._bytes.labels("load").inc(nbytes)
        self._seconds.labels("load").observe(seconds)

    def released(self) -> None:
        """A boundary's objects and record are gone."""
        self._released.inc()

    def kept(self, nbytes: int, new: int = 0) -> None:
        """This worker has so many bytes of checkpoints in the store now; `new` were committed just now."""
        self._checkpoint_bytes.set(nbytes)
        self._checkpoints.labels("committed").inc(new)

    def adopted(self, number: int) -> None:
        """Checkpoints that others had committed; our own copies go."""
        self._checkpoints.labels("adopted").inc(number)

    def evicted(self, nbytes: int) -> None:
        """A checkpoint's objects and record are gone."""
        self._checkpoints.labels("evicted").inc()
        self._evicted_bytes.inc(nbytes)

    def restored(self, tokens: int) -> None:
        """Prompt tokens that came from checkpoints."""
        self._restored.inc(tokens)

    def swept(self) -> None:
        """A dead worker's boundary was removed."""
        self._swept.inc()

    def failed(self, stage: str, kind: str) -> None:
        """A publish or load failed."""
        self._failed.labels(stage, kind).inc()

    def recomputed(self, reason: str, tokens: int) -> None:
        """Prompt tokens that are computed although they should have come from the store."""
        self._recomputed.labels(reason).inc(tokens)


HANDOFF = HandoffMetrics()
"""This process's handoff metrics."""


def configure_logging(name: str) -> None:
    """One line a record on stderr: time, level, process name, message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)-7s {name} %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("vllm", "grpc", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
