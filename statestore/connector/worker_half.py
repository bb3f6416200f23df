# SPDX-License-Identifier: Apache-2.0
"""The connector's worker half, one a rank: moves bytes between this rank's caches and the store.

Every job ends with exactly one report, whatever happens in it: the report is what returns the blocks. Jobs run on this
rank's I/O threads; the engine thread only starts them and collects what has ended. A publish begins with the step that
computes its state: room in the store is taken meanwhile. Loads have threads of their own: a request waits for its load,
and nobody waits for a checkpoint or the end of an answer. publishing.py and loading.py have the work, checks.py what
state must pass; passing.py what of a publish may leave while the step computes (docs/layer_streams.md).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from deltaserve.config import StoreConfig, longest_put
from statestore.connector.cache_view import CacheView
from statestore.connector.checks import VerificationFailed
from statestore.connector.describe import geometry_of, layer_index
from statestore.connector.device_copies import pin
from statestore.connector.events import emit
from statestore.connector.intents import LinkOutcome
from statestore.connector.loading import Loader
from statestore.connector.messages import LinkName, LoadJob, PublishJob, RankReport, RankReports
from statestore.connector.passing import LEAST_TOKENS, Layers, Passing, StepFailed, layer_groups
from statestore.connector.publishing import Publisher
from statestore.geometry import Geometry
from statestore.pool import Pool, PoolFull, PoolMissing, PoolUnavailable, SizeMismatch
from statestore.reshard import CHUNK, stored_row_bytes

log = logging.getLogger(__name__)

IO_THREADS = 2
"""That write, and as many that read."""

LEAST_STAGING, MOST_STAGING = 64 << 20, 512 << 20
"""Bounds of a rank's staging memory, bytes. It costs memory only where it has been used."""

_STEP_PATIENCE = 4
"""An engine step that takes so many times the timeout of a load is given up: what a service waits for a publish."""


class WorkerHalf:
    """State movement of one rank. `register` connects it; before that no job may start."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, extra: dict[str, Any]) -> None:
        self._kv_cache_config = kv_cache_config
        self._geometry = geometry_of(vllm_config, kv_cache_config, extra["model_digest"])
        self._extra = extra
        store = StoreConfig.model_validate(extra["store"])
        ranks = vllm_config.parallel_config.world_size
        self._store = store.model_copy(update={"segment_bytes": store.segment_bytes // ranks})
        self._longest = int(vllm_config.model_config.max_model_len)
        self._alone = ranks == 1
        self._rank = 0
        self._view: CacheView | None = None
        self._pool: Pool | None = None
        self._publisher: Publisher | None = None
        self._loader: Loader | None = None
        self._modules: dict[str, Any] = vllm_config.compilation_config.static_forward_context
        self._layers: Layers | None = None
        """None: nothing leaves before its step has ended."""
        self._streamed = False
        """A publish has left in parts, and the log says so."""
        self._prepared: dict[LinkName, Passing] = {}
        """Jobs of a step that is computing."""
        self._writing = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="state-write")
        self._reading = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="state-read")
        self._lock = threading.Lock()
        self._reports = RankReports()
        self._received: set[str] = set()
        self._failed: set[str] = set()

    def register(self, kv_caches: dict[str, Any]) -> None:
        """vLLM's cache tensors of this rank, by layer name; connects to the store."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        from statestore.mooncake_pool import MooncakePool

        timeout = self._extra["load_timeout"]
        self._rank = get_tensor_model_parallel_rank()
        self._view = CacheView(kv_caches, self._kv_cache_config, self._geometry)
        room = staging_bytes(self._geometry, self._longest)
        locked = None if self._view.on_host else partial(pin, self._view.device)
        within = longest_put(timeout, self._store.timeout)
        self._pool = MooncakePool(self._store, staging_bytes=room, pin=locked, write_within=within)
        if locked is not None:
            with self._pool.staging(1, timeout):
                pass  # pinned now: what refuses it is seen at the start, and on this thread
        self._publisher = Publisher(self._view, self._pool, self._rank, timeout)
        self._loader = Loader(
            self._view, self._pool, self._rank, timeout, self._extra["verify"], self._extra["damage"]
        )
        groups = layer_groups(self._geometry, self._view.proves)
        if groups:
            layers = Layers(self._geometry, groups, partial(self._view.fence, sleeps=True))
            try:
                layers.install({layer_index(name): self._modules[name] for name in kv_caches})
                self._layers = layers
            except KeyError as error:
                log.warning("no layer %s in the model: state leaves when its step has ended", error)

    # ---- engine thread

    def prepare_publishes(self, jobs: list[PublishJob]) -> None:
        """The step that computes the state of these jobs begins: take room for them meanwhile, and write what of it is
        final before the rest; returns at once."""
        streamed = [passing for passing in (self._prepare(job) for job in jobs) if passing.groups]
        if self._layers is not None:
            self._layers.begin(streamed)

    def _prepare(self, job: PublishJob) -> Passing:
        assert self._publisher is not None
        layers = self._layers
        streams = layers is not None and not layers.spoiled and job.tokens >= LEAST_TOKENS
        passing = Passing(
            _STEP_PATIENCE * self._extra["load_timeout"],
            layers.groups if layers is not None and streams else (),
        )
        self._prepared[job.name] = passing
        work = partial(
            self._publisher.publish, computed=passing.wait_end, passing=passing if passing.groups else None
        )
        self._writing.submit(self._publish, job, work)
        return passing

    def start_publishes(self, jobs: list[PublishJob]) -> None:
        """The step's work is in the device's queue, or done: write its state; returns at once."""
        if self._layers is not None:
            self._layers.end()
        if not jobs:
            return
        assert self._view is not None
        for job in jobs:
            if job.name not in self._prepared:
                self._prepare(job)
        fence = self._view.fence()
        for job in jobs:
            self._prepared.pop(job.name).end(fence)

    def start_loads(self, jobs: list[LoadJob]) -> None:
        """Start reading; returns at once. Nothing is written before the work that is in the device's queue now has
        ended: it may still use the blocks for whoever had them before."""
        if not jobs:
            return
        assert self._loader is not None
        assert self._view is not None
        free = partial(_wait, self._view.fence())
        for job in jobs:
            self._reading.submit(self._load, job, partial(self._loader.load, free=free))

    def results(self) -> Any:
        """vLLM's view of what has ended since the last step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        with self._lock:
            # Nothing is ever "sent" in vLLM's sense: pins (pins.py) keep the blocks of a publish, not its request.
            result = KVConnectorTransferResults(set(), set(self._received), set(self._failed))
            self._received.clear()
            self._failed.clear()
        return result

    def ended_well(self) -> tuple[set[str], RankReports | None]:
        """Loads that have succeeded, and their and all publishes' reports, which no step will tell of then."""
        with self._lock:
            received = self._received - self._failed
            publish = self._reports.publish
            if not received and not publish:
                return set(), None
            self._received -= received
            # A load that ended while a step's output was put together has had its report go with that one.
            load = {key: self._reports.load.pop(key) for key in received if key in self._reports.load}
            self._reports.publish = {}
        return received, RankReports(publish, load)

    def take_reports(self) -> RankReports | None:
        """Reports since the last step; None when there are none."""
        with self._lock:
            if not self._reports.publish and not self._reports.load:
                return None
            reports, self._reports = self._reports, RankReports()
        return reports

    def close(self) -> None:
        """Stop the I/O threads and leave the store."""
        for threads in (self._writing, self._reading):
            threads.shutdown(wait=False, cancel_futures=True)
        for passing in self._prepared.values():
            passing.fail("the worker ends, and with it the step")
        for threads in (self._writing, self._reading):
            threads.shutdown(wait=True)
        if self._pool is not None:
            self._pool.close()

    # ---- I/O threads

    def _publish(self, job: PublishJob, work: Callable[[Any, RankReport], None]) -> None:
        report = self._report(job, work)
        if report.streamed and not self._streamed:
            self._streamed = True
            log.info(
                "rank %d: %d of %d bytes of %s left while its step computed",
                *(self._rank, report.streamed, report.nbytes, job.name),
            )
        if self._alone and job.final and not report.failure:
            # The engine takes reports when a step ends, and the next one may be another prompt's long prefill.
            link = LinkOutcome(job.link, job.base, job.length, (report,))
            emit(self._extra["worker_id"], "wrote", job.key, link)
        with self._lock:
            self._reports.publish.setdefault(job.name, []).append(report)

    def _load(self, job: LoadJob, work: Callable[[Any, RankReport], None]) -> None:
        report = self._report(job, work)
        with self._lock:
            self._received.add(job.key)
            if report.failure:
                self._failed.add(job.key)
            self._reports.load.setdefault(job.name, []).append(report)

    def _report(self, job: Any, work: Callable[[Any, RankReport], None]) -> RankReport:
        began = time.monotonic()
        report = RankReport(self._rank)
        try:
            work(job, report)
        except Exception as error:
            report.failure, report.detail = failure_kind(error), f"{type(error).__name__}: {error}"
            log.warning(
                "rank %d, job %s failed (%s): %s", self._rank, job.name, report.failure, report.detail
            )
        report.seconds = time.monotonic() - began
        return report


def _wait(fence: Any) -> None:
    """Return when the device has come to a fence of `CacheView.fence`."""
    if fence is not None:
        fence.synchronize()


def staging_bytes(geometry: Geometry, longest: int) -> int:
    """Staging memory of one rank: what is written and what is read of the longest boundary (`longest` tokens) at once.

    A publish takes one slice for all that the rank writes, a load one for all that it reads, and what is larger than
    the whole staging memory gets memory of its own, one at a time. A rank reads its heads and the rows that it owns, in
    whole units, and writes no more than that.
    """
    sizes = geometry.sizes
    rows = min(longest, -(-longest // geometry.dcp) + CHUNK)
    return min(max(2 * (sizes.kda_rank + rows * stored_row_bytes(geometry)), LEAST_STAGING), MOST_STAGING)


def failure_kind(error: Exception) -> str:
    """The label under which a failure is counted."""
    if isinstance(error, VerificationFailed):
        return error.kind
    kinds: list[tuple[type[Exception], str]] = [
        (PoolMissing, "missing"),
        (SizeMismatch, "size"),
        (PoolFull, "store_full"),
        (PoolUnavailable, "store_unavailable"),
        (TimeoutError, "timeout"),
        (StepFailed, "step"),
    ]
    return next((name for kind, name in kinds if isinstance(error, kind)), "error")


def rank_segment(worker: Any) -> str:
    """Name of the Mooncake segment that this rank lends; runs in every rank through vLLM's collective RPC."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    half = get_kv_transfer_group()._rank
    assert half._pool is not None
    return str(half._pool.segment_name)
