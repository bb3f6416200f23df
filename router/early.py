# SPDX-License-Identifier: Apache-2.0
"""Early reads, as the router sees them; docs/early_reads.md has the protocol.

Happy path: `Written` from the prefill worker ─▶ Add{load{early}} to the decode worker chosen for the request, under a
leg of its own ─▶ `Published` ─▶ Confirm, and the leg becomes the request's decode leg as if it had just been sent.

Crash path: whatever goes wrong drops the leg, and the request goes on as if there had been none. What the leg says
before `Published` is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vllm.v1.engine import EngineCoreOutput

from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from router.books import Books
from router.flight import EarlyLeg, Flight, Stage
from router.metrics import Metrics
from router.worker_link import LinkDown, WorkerLink


class EarlyReads:
    """See the module's description. Belongs to one event loop; nothing here waits."""

    def __init__(self, on: bool, books: Books, metrics: Metrics, legs: Iterator[int]) -> None:
        """`legs`: ids for the streams."""
        self._on, self._books, self._metrics, self._legs = on, books, metrics, legs

    def wanted(self, decode: WorkerLink) -> bool:
        """Whether the prefill worker is asked to tell what it has written for this reader."""
        if self._on and not decode.description.early:
            self._metrics.early_reads.labels("aside").inc()
        return self._on and decode.description.early

    def written(self, flight: Flight, message: pb.Written) -> None:
        """Every rank has written; the reader may begin."""
        decode = flight.reserved
        if flight.stage is not Stage.PREFILL or flight.early is not None or not message.records:
            return
        if decode is None or not decode.ready:
            self._metrics.early_reads.labels("aside").inc()
            return
        leg = next(self._legs)
        add = codec.encode_add(
            leg,
            flight.request,
            flight.sampling,
            load=pb.Load(boundary=message.boundary, recompute=True, early=message.records),
            timeout=self._books.remaining(flight),
            history=flight.history,
            traceparent=flight.spans.early(decode.worker_id),
        )
        try:
            decode.send(pb.ToWorker(add=add))
        except LinkDown:
            flight.spans.drop_early()
            self._metrics.early_reads.labels("aside").inc()
            return
        flight.early = EarlyLeg(decode, leg)
        decode.early[leg] = flight

    def confirm(self, flight: Flight, decode: WorkerLink) -> EarlyLeg | None:
        """The boundary is committed, and the request goes to `decode`: its early leg, if it has one there."""
        early = flight.early
        if early is None:
            return None
        if early.link is not decode:
            self._books.drop_early(flight)
            return None
        try:
            decode.send(pb.ToWorker(confirm=pb.Confirm(id=early.leg)))
        except LinkDown:
            self._books.drop_early(flight)
            return None
        flight.early = None
        flight.spans.adopt()
        decode.early.pop(early.leg, None)
        self._metrics.early_reads.labels("used").inc()
        return early

    def loaded(self, link: WorkerLink, message: pb.Loaded) -> None:
        """A leg that is not the request's yet has loaded, or was withdrawn."""
        flight = link.early.get(message.id)
        if flight is None or flight.early is None:
            return
        if message.withdrawn:
            link.early.pop(message.id)
            flight.early = None
            flight.spans.drop_early()
            self._metrics.early_reads.labels("withdrawn").inc()
        else:
            flight.early.held.append(message)

    def output(self, link: WorkerLink, leg: int, output: EngineCoreOutput) -> None:
        """A token of such a leg."""
        flight = link.early.get(leg)
        if flight is not None and flight.early is not None:
            flight.early.held.append(output)

    @staticmethod
    def replay(
        early: EarlyLeg,
        loaded: Callable[[WorkerLink, pb.Loaded], None],
        step: Callable[[WorkerLink, list[tuple[int, EngineCoreOutput]]], None],
    ) -> None:
        """Hand on what was held back."""
        for message in early.held:
            if isinstance(message, pb.Loaded):
                loaded(early.link, message)
            else:
                step(early.link, [(early.leg, message)])
