# SPDX-License-Identifier: Apache-2.0
"""What follows when something goes wrong on a request's way. docs/recovery.md has the protocol.

a prefill worker refused, failed, is late or lost     the decode worker computes the prompt; counted
a decode worker refused, is lost or late              another one goes on from the tokens delivered
too many of them for one request                      it ends with ERROR
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from vllm.v1.engine import EngineCoreOutput, FinishReason

from deltaserve.config import RouterConfig
from deltaserve.wire import codec
from router.books import Books
from router.cooldown import Cooldown
from router.flight import Flight, Stage
from router.metrics import Metrics
from router.outbox import Outbox
from router.roster import Roster
from router.worker_link import WorkerLink

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Decode workers tried for one request without a token in between."""
LOOK_SECONDS = 0.5
"""Between looks at the requests' token deadlines."""


class Recovery:
    """See the module's description. `place` sends a request to a worker anew."""

    def __init__(
        self,
        config: RouterConfig,
        books: Books,
        roster: Roster,
        metrics: Metrics,
        outbox: Outbox,
        cooldown: Cooldown,
        place: Callable[[Flight], None],
    ) -> None:
        self._config, self._books, self._roster, self._metrics = config, books, roster, metrics
        self._outbox, self._cooldown, self._place = outbox, cooldown, place
        self._look: asyncio.TimerHandle | None = None
        self._held_back = 0.0

    def prefill_output(self, flight: Flight, output: EngineCoreOutput) -> None:
        """A prefill worker's tokens mean nothing; that it refused the request does."""
        if output.finish_reason is FinishReason.ERROR and flight.link is not None:
            self._cooldown.failed(flight.link.worker_id)
            worker = flight.link.worker_id
            self._books.leave(flight)
            self.handover_failed(flight, "prefill_failed", f"{worker} refused the request")

    def prefill_late(self, flight: Flight) -> None:
        """A prefill worker has not published in time."""
        if flight.stage is not Stage.PREFILL or flight.link is None:
            return
        worker = flight.link.worker_id
        self._cooldown.failed(worker)
        self._books.abort_leg(flight)
        self.handover_failed(flight, "prefill_timeout", f"{worker} did not publish in time")

    def handover_failed(self, flight: Flight, reason: str, detail: str) -> None:
        """No boundary will come of this handover: the decode worker computes the prompt."""
        log.warning("request %s: %s: %s", flight.name, reason, detail)
        flight.cancel_stage_timer()
        self._books.drop_early(flight)
        self._books.unreserve(flight)
        flight.local_reason = reason
        flight.trace.failure = flight.trace.failure or reason
        flight.trace.detail = flight.trace.detail or detail
        self._place(flight)

    def decode_refused(self, flight: Flight, link: WorkerLink) -> None:
        """A decode worker will not run the request; another one may."""
        self._books.leave(flight)
        flight.failed_workers.add(link.worker_id)
        if not self._roster.decodes(flight.failed_workers):
            self._books.fail(flight, "decode_refused", f"{link.worker_id} refused the request")
        else:
            self.decode_lost(flight, link, "the worker refused the request")

    def decode_lost(self, flight: Flight, link: WorkerLink, reason: str, kind: str = "decode_failed") -> None:
        """Another decode worker goes on from what has been delivered; the request ends when too many have failed."""
        trace = flight.trace
        trace.failure = trace.failure or kind
        trace.detail = trace.detail or f"{link.worker_id}: {reason}"
        if link.up:
            # A lost worker may come back in time; this one would fail again.
            flight.failed_workers.add(link.worker_id)
        if flight.attempts >= MAX_ATTEMPTS:
            self._books.fail(flight, kind, f"{link.worker_id}: {reason}")
            return
        self._metrics.retries.labels(kind).inc()
        if flight.any_output:
            log.warning(
                "request %s: %s: %s; going on after %d tokens",
                flight.name,
                kind,
                reason,
                flight.tokens_sent,
            )
            trace.resumes += 1
            self._drop_prompt_logprobs(flight)
        if kind == "decode_late" or not link.up:
            self._forget_boundary(flight)
        elif flight.boundary is None and not flight.local_reason:
            flight.local_reason = "prefill_failed"
        self._place(flight)

    def _forget_boundary(self, flight: Flight) -> None:
        """The lost worker's memory held the boundary's bytes; the prompt is handed over anew."""
        if self._books.release(flight) is not None:
            flight.local_reason = ""

    def _drop_prompt_logprobs(self, flight: Flight) -> None:
        """They have been delivered with the first output, and a prompt with them is never restored."""
        params = flight.request.sampling_params
        if flight.prompt_logprobs and params is not None:
            params = params.clone()
            params.prompt_logprobs = None
            flight.sampling, flight.prompt_logprobs = codec.encode_sampling(params), False

    def start(self) -> None:
        """Begin to look for workers that are late. Needs a running event loop."""
        self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_for_late)

    def stop(self) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.cancel()

    def _look_for_late(self) -> None:
        """Move requests whose decode worker has been silent for too long; once every LOOK_SECONDS."""
        self.start()
        now = asyncio.get_running_loop().time()
        first, next_one = self._config.first_token_timeout, self._config.token_timeout
        if self._outbox.full:
            self._held_back = now  # we do not read the workers' streams, so nobody is late
        for flight in list(self._books.flights.values()):
            link = flight.link
            if flight.stage is not Stage.DECODE or link is None:
                continue
            silent = now - max(
                flight.last_output if flight.leg_output else flight.dispatched, self._held_back
            )
            if silent <= (next_one if flight.leg_output else first):
                continue
            others = flight.failed_workers | {link.worker_id}
            if not self._roster.decodes(others):
                continue  # nobody could do better; it may only be slow
            self._books.abort_leg(flight)
            self._roster.stalled(link)
            self.decode_lost(flight, link, f"no token for {silent:.1f} s", "decode_late")
