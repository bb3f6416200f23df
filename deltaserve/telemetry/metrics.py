# SPDX-License-Identifier: Apache-2.0
"""The workers' metrics. Names, units and labels are stable; docs/metrics.md has the table, and a test compares them.

Labels are few and closed: a stage, a failure kind (statestore/connector/worker_half.py and the roles have the lists).
The ranks report to the service with the engine's steps, so one process has the numbers of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from deltaserve import __version__

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STAGES = ("publish", "load", "answer")
"""A prompt's boundary, its load, and the end of an answer that is kept as a checkpoint."""
RECORD_KINDS = ("pending", "request", "checkpoint")


class HandoffMetrics:
    """The life of boundaries, as one worker sees it."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        counter, gauge = _makers(registry)
        self._opened = counter(
            "deltaserve_boundaries_opened_total", "publishes begun: room promised, record opened"
        )
        self._published = counter(
            "deltaserve_boundaries_published_total", "publishes whose every rank has written its shards"
        )
        self._committed = counter(
            "deltaserve_boundaries_committed_total", "boundaries made visible by one transaction"
        )
        self._released = counter(
            "deltaserve_boundaries_released_total", "boundaries released, objects and record gone"
        )
        self._swept = counter("deltaserve_boundaries_swept_total", "boundaries of dead workers removed")
        self._loaded = counter(
            "deltaserve_boundaries_loaded_total", "boundaries that every rank has restored into its cache"
        )
        self._verified = counter(
            "deltaserve_boundaries_verified_total",
            "loaded boundaries of which every rank checked size, digest and non-null before use",
        )
        self._failed = counter(
            "deltaserve_boundary_failures_total", "publishes and loads that failed", ["stage", "kind"]
        )
        self._recomputed = counter(
            "deltaserve_recomputed_tokens_total",
            "prompt tokens computed although they should have come from the store",
            ["reason"],
        )
        self._records = gauge(
            "deltaserve_boundary_records",
            "records of this worker in the ledger: pending, of a request, checkpoints",
            ["kind"],
        )
        self._pinned = gauge(
            "deltaserve_pinned_blocks", "cache blocks that ranks are reading for a publish, kept from reuse"
        )
        self._store_used = gauge(
            "deltaserve_store_used_bytes", "bytes that this worker has written or promised to write"
        )
        self._store_capacity = gauge(
            "deltaserve_store_capacity_bytes", "bytes that this worker lends to the store"
        )
        self._checkpoint_bytes = gauge(
            "deltaserve_checkpoint_bytes", "checkpoints of this worker in the store"
        )
        self._checkpoints = counter(
            "deltaserve_checkpoints_total",
            "checkpoints, by what became of them: committed, adopted (another worker had it), evicted",
            ["event"],
        )
        self._evicted_bytes = counter("deltaserve_checkpoint_evicted_bytes_total", "checkpoints evicted")
        self._restored = counter(
            "deltaserve_checkpoint_tokens_total",
            "prompt tokens restored from checkpoints instead of computed",
        )
        self._passes = counter(
            "deltaserve_prefill_passes_total", "forward passes that computed tokens of published prompts"
        )
        self._prefilled = counter(
            "deltaserve_prefill_tokens_total",
            "tokens of published prompts that those passes computed: once, or again",
            ["kind"],
        )
        self._bytes = counter("deltaserve_handoff_bytes_total", "state moved", ["stage"])
        self._streamed = counter(
            "deltaserve_handoff_streamed_bytes_total",
            "bytes of publishes that left while the step that computed their state went on",
        )
        self._seconds = Histogram(
            "deltaserve_handoff_seconds",
            "from a publish's begin (compute included) to its commit; of a load, its slowest rank",
            ["stage"],
            buckets=SECONDS,
            registry=registry,
        )
        for stage in STAGES:  # so that a rate exists before the first event
            self._bytes.labels(stage)
            self._seconds.labels(stage)
        for kind in ("once", "again"):
            self._prefilled.labels(kind)
        for kind in RECORD_KINDS:
            self._records.labels(kind)

    def opened(self) -> None:
        """A publish has begun."""
        self._opened.inc()

    def written(self) -> None:
        """Every rank has written what a publish promised; the commit follows."""
        self._published.inc()

    def committed(self, new: bool) -> None:
        """A publish was committed; not `new`: everything in it was there already, from another worker."""
        self._committed.inc(int(new))

    def published(self, nbytes: int, seconds: float, stage: str = "publish") -> None:
        """Bytes of a publish that was committed `seconds` after its request arrived."""
        self._bytes.labels(stage).inc(nbytes)
        self._seconds.labels(stage).observe(seconds)

    def streamed(self, nbytes: int) -> None:
        """So many bytes of a publish left before the step that computed them had ended."""
        self._streamed.inc(nbytes)

    def loaded(self, nbytes: int, seconds: float, verified: bool = True) -> None:
        """A boundary was restored; `seconds` of its slowest rank. `verified`: no rank was told not to check."""
        self._loaded.inc()
        if verified:
            self._verified.inc()
        self._bytes.labels("load").inc(nbytes)
        self._seconds.labels("load").observe(seconds)

    def prefilled(self, passes: int, once: int, again: int) -> None:
        """A published prompt took so many passes; tokens computed for the first time, and those computed once more."""
        self._passes.inc(passes)
        self._prefilled.labels("once").inc(once)
        self._prefilled.labels("again").inc(again)

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

    def pinned(self, blocks: int) -> None:
        """So many cache blocks more are pinned; fewer, when it is negative."""
        self._pinned.inc(blocks)

    def owns(self, kind: str, count: Callable[[], int]) -> None:
        """Ask `count` at each scrape how many records of a kind (`RECORD_KINDS`) this worker has in the ledger."""
        self._records.labels(kind).set_function(lambda: float(count()))

    def store(self, used: Callable[[], int], capacity: int) -> None:
        """Ask `used` at each scrape for the bytes in use, of `capacity`."""
        self._store_used.set_function(lambda: float(used()))
        self._store_capacity.set(capacity)


class WorkerMetrics:
    """The engine behind one worker's service."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        counter, gauge = _makers(registry)
        self._info = gauge(
            "deltaserve_worker_info", "1, with what this worker is", ["role", "worker_id", "version"]
        )
        self._requests = gauge(
            "deltaserve_worker_requests", "requests in the engine, by state: running, waiting", ["state"]
        )
        self._jobs = gauge("deltaserve_worker_jobs", "requests that routers have here, publishes under way")
        self._queued = gauge(
            "deltaserve_worker_queued_tokens",
            "prompt tokens of requests that have not had their first output",
        )
        self._kv_usage = gauge("deltaserve_worker_kv_usage_ratio", "cache blocks in use, 0 to 1")
        self._routers = gauge("deltaserve_worker_router_streams", "routers whose stream is open")
        self._steps = counter("deltaserve_worker_steps_total", "engine steps that produced something")
        self._tokens = counter("deltaserve_worker_tokens_total", "tokens generated and sent to routers")
        self._not_finite = counter(
            "deltaserve_worker_not_finite_total", "requests that ended because logits were not numbers"
        )
        for state in ("running", "waiting"):
            self._requests.labels(state)

    def describe(self, role: str, worker_id: str) -> None:
        """Say what this worker is."""
        self._info.labels(role, worker_id, __version__).set(1)

    def watch(
        self,
        requests: Callable[[], tuple[int, int]],
        kv_usage: Callable[[], float],
        jobs: Callable[[], int],
        queued_tokens: Callable[[], int],
        routers: Callable[[], int],
    ) -> None:
        """Ask these at each scrape. `requests`: running and waiting."""
        self._requests.labels("running").set_function(lambda: float(requests()[0]))
        self._requests.labels("waiting").set_function(lambda: float(requests()[1]))
        self._kv_usage.set_function(kv_usage)
        self._jobs.set_function(lambda: float(jobs()))
        self._queued.set_function(lambda: float(queued_tokens()))
        self._routers.set_function(lambda: float(routers()))

    def stepped(self, tokens: int) -> None:
        """An engine step has brought so many tokens for routers."""
        self._steps.inc()
        self._tokens.inc(tokens)

    def not_finite(self) -> None:
        """A request ended because its logits were not numbers."""
        self._not_finite.inc()


def _makers(registry: CollectorRegistry) -> tuple[Callable[..., Counter], Callable[..., Gauge]]:
    def counter(name: str, words: str, labels: list[str] | None = None) -> Counter:
        return Counter(name, words, labels or (), registry=registry)

    def gauge(name: str, words: str, labels: list[str] | None = None) -> Gauge:
        return Gauge(name, words, labels or (), registry=registry)

    return counter, gauge


def names_of(registry: CollectorRegistry) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name → (type, labels) of this project's metrics in a registry, as a scrape would show them.

    A counter's name ends in `_total`; a histogram has its bare name, and the samples `_bucket`, `_sum`, `_count`.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        name = getattr(collector, "_name", "")
        if name.startswith("deltaserve_"):
            kind = collector._type
            found[name + ("_total" if kind == "counter" else "")] = (kind, tuple(collector._labelnames))
    return found


HANDOFF = HandoffMetrics()
"""This process's handoff metrics."""
WORKER = WorkerMetrics()
"""This process's engine."""
