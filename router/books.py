# SPDX-License-Identifier: Apache-2.0
"""The dispatcher's books: which requests are held, what each counts for on its worker, and how one ends.

Whatever a request holds (its place on a worker, a reservation, a boundary, timers) is taken and given back here and
nowhere else, so that the books balance whatever happens to it.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Counter
from vllm.v1.engine import EngineCoreOutput, FinishReason

from router.flight import Boundary, Flight, Stage
from router.metrics import Metrics
from router.outbox import Outbox
from router.roster import Roster
from router.worker_link import WorkerLink

log = logging.getLogger(__name__)


class Books:
    """See the module's description. Belongs to one event loop; nothing here waits."""

    def __init__(self, roster: Roster, metrics: Metrics, outbox: Outbox) -> None:
        self.flights: dict[str, Flight] = {}
        """Every request held, by its id."""
        self.waiting: dict[str, Flight] = {}
        """Those of them that no decode worker can take now."""
        self._roster, self._metrics, self._outbox = roster, metrics, outbox
        # Looked up once: a label costs more than counting.
        self._outcomes: dict[str, Counter] = {}
        self._sources = [metrics.prompt_tokens.labels(source) for source in ("store", "local", "computed")]

    def deliver(self, batch: list[EngineCoreOutput]) -> None:
        """Hand outputs to whoever stands above."""
        self._outbox.put(batch)

    def release(self, flight: Flight) -> Boundary | None:
        """Give a request's boundary back to its publisher; returns it, None when there was none."""
        boundary, flight.boundary = flight.boundary, None
        if boundary is not None and boundary.publisher.release(boundary.key, boundary.session):
            self._metrics.releases.inc()
        return boundary

    def fail(self, flight: Flight, kind: str, detail: str) -> None:
        """End a request with ERROR; only this one, whatever happened."""
        if flight.stage is Stage.ENDED:
            return
        log.warning("request %s ends with an error: %s: %s", flight.name, kind, detail)
        flight.trace.failure, flight.trace.detail = kind, detail
        self.abort_leg(flight)
        self.end(flight, "error", "error")
        self.deliver([EngineCoreOutput(flight.request_id, [], finish_reason=FinishReason.ERROR)])

    def release_if_in_the_way(self, flight: Flight) -> None:
        """Release a boundary that has been read and that a draining worker waits for.

        Only then: a request that vLLM preempts later reads its boundary again, if it is there.
        """
        boundary = flight.boundary
        if boundary is not None and flight.leg_output and boundary.in_the_way:
            self.release(flight)

    def leave(self, flight: Flight) -> None:
        """Take a flight off its worker."""
        link = flight.link
        if link is not None:
            link.legs.pop(flight.leg, None)
            link.outstanding = max(0, link.outstanding - flight.charged)
            link.state_bytes = max(0, link.state_bytes - flight.charged_bytes)
            flight.link, flight.charged, flight.charged_bytes = None, 0, 0
            flight.spans.leave()
            if link.retiring and not link.legs:
                self._roster.retire_idle(link)
        flight.cancel_stage_timer()

    def abort_leg(self, flight: Flight) -> None:
        """Take a flight off its worker, which is told to stop."""
        link = flight.link
        if link is not None:
            link.abort(flight.leg)
            self.leave(flight)

    def drop_early(self, flight: Flight, outcome: str = "dropped") -> None:
        """Nothing comes of an early read; its worker is told to stop. Without one nothing happens."""
        early, flight.early = flight.early, None
        if early is not None:
            early.link.early.pop(early.leg, None)
            early.link.abort(early.leg)
            flight.spans.drop_early()
            self._metrics.early_reads.labels(outcome).inc()

    def reserve(self, flight: Flight, decode: WorkerLink) -> None:
        """Count a request on the decode worker that it will come to."""
        flight.reserved, flight.reserved_tokens = decode, flight.answer_tokens
        decode.outstanding += flight.reserved_tokens

    def unreserve(self, flight: Flight) -> None:
        """Undo `reserve`."""
        if flight.reserved is not None:
            flight.reserved.outstanding = max(0, flight.reserved.outstanding - flight.reserved_tokens)
            flight.reserved, flight.reserved_tokens = None, 0

    def end(self, flight: Flight, outcome: str, reason: str) -> None:
        """The flight's last act, whatever the outcome: everything that it holds returns to where it was."""
        flight.stage = Stage.ENDED
        self.leave(flight)
        self.drop_early(flight)
        self.unreserve(flight)
        for timer in flight.timers:
            timer.cancel()
        flight.timers.clear()
        self.flights.pop(flight.request_id, None)
        self.waiting.pop(flight.request_id, None)
        self.release(flight)
        trace = flight.trace
        trace.status, trace.finish_reason, trace.output_tokens = outcome, reason, flight.tokens_sent
        trace.ended_after = round(asyncio.get_running_loop().time() - flight.arrival, 6)
        self._metrics.in_flight.set(len(self.flights))
        if (counter := self._outcomes.get(outcome)) is None:
            counter = self._outcomes[outcome] = self._metrics.requests.labels(outcome)
        counter.inc()
        self._metrics.tokens.inc(flight.tokens_sent)
        self._metrics.ended(trace)
        flight.spans.end(trace)
        if flight.any_output:
            for source, tokens in zip(
                self._sources, (trace.from_store, trace.local, trace.recomputed), strict=True
            ):
                if tokens:
                    source.inc(tokens)

    def remaining(self, flight: Flight) -> float:
        """Seconds until the request's deadline."""
        return max(0.001, flight.deadline - asyncio.get_running_loop().time())

    def stage_timer(self, flight: Flight, seconds: float, kind: str, detail: str) -> None:
        """End the request as `fail` does after `seconds`, unless its stage ends before."""
        loop = asyncio.get_running_loop()
        flight.timers.append(loop.call_later(seconds, self.fail, flight, kind, detail))
