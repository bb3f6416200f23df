# SPDX-License-Identifier: Apache-2.0
"""The two sides of a handoff, as the workers' ranks run it, without engines.

The clock runs from the moment at which the state lies in the publisher's cache (a prefill's last kernel has ended) to
the moment at which verified state lies in the reader's cache (a decode's first step may start):

    publisher   gather, checks, digest, put of every object; commit of the record in etcd
    reader      the committed record from etcd; get, digest, checks, scatter

With `pass_seconds` the publisher's layers are told of one after the other for so long before the clock begins, as a
prefill's are launched, and parts may leave meanwhile (docs/layer_streams.md). The pass is a clock: nothing computes.

Opening the record and taking room in the store are not on that path: both run beside the compute. The name of the
boundary goes from one side to the other over a pipe, where a cluster has its router.

An early handoff (docs/early_reads.md) sends the record itself when all is written: the reader reads, checks and writes
its cache beside the commit, and ends when the committed record, pushed by etcd, has been found to be the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.handoff.ledgers import SECONDS, LedgerLoop
from benchmarks.handoff.shapes import SETS, Caches, Shape, World
from benchmarks.handoff.spans import Spans, TimedPool, TimedView, recorded_proofs
from statestore.boundary import BoundaryRecord, Epoch, RankEntry, boundary_id
from statestore.connector import loading, publishing, writing
from statestore.connector.messages import LoadJob, PublishJob, RankReport
from statestore.connector.passing import Layers, Passing, layer_groups
from statestore.pool import Pool


class NotVerified(RuntimeError):
    """The reader's cache does not hold what the publisher's held."""


@dataclass(frozen=True)
class Published:
    """One publish: the boundary, when it began, had every object written and sealed, and was committed
    (`time.monotonic`), and seconds by stage."""

    boundary: str
    began: float
    written: float
    committed: float
    stages: dict[str, float]


@dataclass(frozen=True)
class Loaded:
    """One load: when it was asked for, had the committed record, had all bytes checked, had them in the cache, and
    ended (`time.monotonic`),
    seconds by stage, bytes that were read. An early one may have the record last."""

    asked: float
    record: float
    checked: float
    in_cache: float
    ended: float
    stages: dict[str, float]
    nbytes: int


class _Side:
    def __init__(self, shape: Shape, pool: Pool, ledger: LedgerLoop, device: str) -> None:
        self._shape, self._ledger = shape, ledger
        self._caches = Caches(shape, device)
        self._worlds = [World(shape, seed) for seed in range(SETS)]
        self._spans = Spans()
        self._pool: Any = TimedPool(pool, self._spans)
        self._view = TimedView(self._caches.tensors, self._caches.config, shape.geometry)
        self._view.spans = self._spans
        self._recording = ExitStack()

    def close(self) -> None:
        """Stop recording."""
        self._recording.close()


class _Pass(Passing):
    """Says when room has been taken: the publisher waits for the state then."""

    def __init__(self, room: threading.Event, groups: Sequence[range]) -> None:
        super().__init__(SECONDS, groups)
        self._room = room

    def wait(self, mark: int) -> bool:
        self._room.set()
        return super().wait(mark)

    def wait_end(self) -> None:
        self._room.set()
        super().wait_end()


class PublishingSide(_Side):
    """A prefill rank."""

    def __init__(
        self,
        shape: Shape,
        pool: Pool,
        ledger: LedgerLoop,
        owner: str,
        lease: int,
        device: str = "cpu",
        pass_seconds: float = 0.0,
    ) -> None:
        super().__init__(shape, pool, ledger, device)
        self._pass_seconds = pass_seconds
        groups = layer_groups(shape.geometry, self._view.proves) if pass_seconds else ()
        self._layers = Layers(shape.geometry, groups, self._view.fence) if groups else None
        self._passing = Passing(SECONDS)
        self._owner, self._lease, self._counter = owner, lease, 0
        self._publisher = publishing.Publisher(self._view, self._pool, 0, SECONDS)
        self._recording.enter_context(recorded_proofs(writing, self._spans))
        self._record: BoundaryRecord | None = None
        self._io = ThreadPoolExecutor(1, thread_name_prefix="state-write")

    def close(self) -> None:
        """Stop recording, end the I/O thread."""
        super().close()
        self._passing.fail("the benchmark ends")
        self._io.shutdown()

    def prepare(self, turn: int, segment: str) -> None:
        """State into the cache, the pending record into the ledger, and room taken in the store."""
        sequence = turn % SETS
        self._caches.fill(self._worlds[sequence], sequence)
        self._counter += 1
        epoch = Epoch(self._lease, self._counter)
        g = self._shape.geometry
        self._record = BoundaryRecord(
            id=boundary_id(g.model_digest, f"{turn:08x}", epoch),
            model_digest=g.model_digest,
            prefix_hash=f"{turn:08x}",
            length=self._shape.length,
            epoch=epoch,
            owner=self._owner,
            geometry=g.to_json(),
            created=time.time(),
            ranks=(RankEntry(0),),
        )
        self._ledger.run(self._ledger.ledger.open(self._record))
        self._begin(turn, segment)
        self._spans.take()

    def _begin(self, turn: int, segment: str) -> None:
        """What the rank's I/O thread does while the state is computed."""
        assert self._record is not None
        record, self._report = self._record, RankReport(0)
        room = threading.Event()
        groups = self._layers.groups if self._layers is not None else ()
        self._passing = passing = _Pass(room, groups)

        job = PublishJob(
            key="bench",
            epoch=record.epoch,
            length=record.length,
            blocks=self._caches.tables[turn % SETS],
            segment=segment,
            packing_dcp=1,
            packing_interleave=1,
        )
        self._written = self._io.submit(
            self._publisher.publish,
            job,
            self._report,
            passing.wait_end,
            passing if passing.groups else None,
        )
        self._written.add_done_callback(lambda written: room.set())
        room.wait(SECONDS)

    def _pass(self) -> None:
        """Tell of the layers, at the pace of a pass."""
        layers = self._layers
        order = range(len(self._shape.geometry.kda_layers) + len(self._shape.geometry.mla_layers))
        if layers is not None:
            layers.begin([self._passing])
        began = time.monotonic()
        for place in order:
            time.sleep(max(0.0, began + self._pass_seconds * (place + 1) / len(order) - time.monotonic()))
            if layers is not None:
                layers.passed(place)
        if layers is not None:
            layers.end()

    def publish(self, tell: Callable[[BoundaryRecord], None] = lambda record: None) -> Published:
        """From state in the cache to a committed record. `tell` is called with it when the commit begins."""
        assert self._record is not None
        record, report = self._record, self._report
        if self._pass_seconds:
            self._pass()
        began = time.monotonic()
        self._passing.end(self._view.fence())
        self._written.result()
        written = time.monotonic()
        with self._spans.span("commit"):
            self._record = record.committed([RankEntry(0, "written", tuple(report.objects))])
            tell(self._record)
            self._ledger.run(self._ledger.ledger.commit([self._record]))
        return Published(record.id, began, written, time.monotonic(), self._spans.take())

    def release(self) -> None:
        """Give the objects and the record back."""
        assert self._record is not None
        self._pool.remove([entry.key for entry in self._record.objects()])
        self._ledger.run(self._ledger.ledger.release(self._record))


class ReadingSide(_Side):
    """A decode rank. `damage` breaks the state before it is read: a negative control."""

    def __init__(
        self, shape: Shape, pool: Pool, ledger: LedgerLoop, damage: str = "none", device: str = "cpu"
    ) -> None:
        super().__init__(shape, pool, ledger, device)
        self._loader = loading.Loader(self._view, self._pool, 0, SECONDS, verify=True, damage=damage)
        self._recording.enter_context(recorded_proofs(loading, self._spans))
        self._io = ThreadPoolExecutor(1, thread_name_prefix="state-read")

    def prepare(self, turn: int) -> None:
        """Nothing like state where the state will go."""
        self._caches.poison(turn % SETS)
        self._spans.take()

    def load(self, turn: int, boundary: str) -> Loaded:
        """From the boundary's name to verified state in the cache. Raises what the loader raises."""
        asked, checked = time.monotonic(), list[float]()
        with self._spans.span("record"):
            records = self._ledger.run(self._ledger.ledger.get_chain(boundary))
        if not records:
            raise NotVerified(f"boundary {boundary} is not committed")
        report, read = RankReport(0), time.monotonic()
        job = LoadJob(
            key="bench", records=tuple(records), blocks=self._caches.tables[turn % SETS], local_tokens=0
        )
        self._loader.load(job, report, lambda: checked.append(time.monotonic()))
        ended = time.monotonic()
        return Loaded(asked, read, checked[0], ended, ended, self._spans.take(), report.nbytes)

    def load_early(self, turn: int, told: str) -> Loaded:
        """The same from what was told, beside its commit. Raises what the loader raises, and NotVerified when something
        else has been committed."""
        asked, checked = time.monotonic(), list[float]()
        record, report = BoundaryRecord.from_json(told), RankReport(0)
        blocks = self._caches.tables[turn % SETS]
        job = LoadJob(key="bench", records=(record,), blocks=blocks, local_tokens=0)
        loading_ended = self._io.submit(self._load, job, report, checked)
        with self._spans.span("record"):
            committed = self._ledger.run(self._ledger.ledger.wait_committed(record.id))
        known = time.monotonic()
        ended = loading_ended.result()
        if committed != record:
            raise NotVerified(f"boundary {record.id}: what was committed is not what was told")
        spans = self._spans.take()
        return Loaded(asked, known, checked[0], ended, max(ended, known), spans, report.nbytes)

    def _load(self, job: LoadJob, report: RankReport, checked: list[float]) -> float:
        self._loader.load(job, report, lambda: checked.append(time.monotonic()))
        return time.monotonic()

    def close(self) -> None:
        """Stop recording, end the I/O thread."""
        super().close()
        self._io.shutdown()

    def check(self, turn: int) -> None:
        """Compare the cache with what the publisher's held, byte by byte. Raises NotVerified."""
        if not self._caches.holds(self._worlds[turn % SETS], turn % SETS):
            raise NotVerified(f"turn {turn}: the reader's cache differs from the publisher's")
