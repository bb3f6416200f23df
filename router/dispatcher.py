# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: engine-core requests in, step-batched engine-core outputs out. It alone knows workers, boundaries,
retries and deadlines; whoever stands above it sees one engine.

Happy path of a request of N prompt tokens:

    1  a decode worker is chosen (fewest outstanding tokens), and a prefill worker of the same model
    2  Add{prompt, Publish{the decode worker's segment}} ─▶ prefill worker ─▶ Published{boundary of N-1 tokens}
    3  Add{prompt, Load{boundary, recompute}} ─▶ decode worker ─▶ Loaded, then one Step an engine step
       (with early reads this Add goes out before `Published`, and a Confirm takes its place: early.py)
    4  at the end, however it comes, Release{boundary} ─▶ prefill worker

Crash path:

    no handover (policy, short prompt, no prefill worker, prefill failed or late)   the decode worker prefills; counted
    prefill worker lost before it published                                         as above: prefill_failed
    decode worker lost, or silent for too long    another one goes on from the tokens delivered (docs/recovery.md)
    no decode worker for `worker_wait` seconds, `resume_wait` when tokens have been delivered       ends with ERROR
    client gone                                                                     Abort to whoever holds the request
    a boundary is committed after its request has gone                              released at once
    prefill worker lost after it published                  nothing to release: the worker or the sweeper removes it

What goes wrong is handled in recovery.py; what a request holds is taken and given back in books.py.

Decisions. Everything here runs on the event loop and never awaits: a request is a small state machine driven by
messages and timers, without a task of its own, and a step costs one dictionary look-up a request. A worker that fails
several handovers in a row is left out for a while, so that a store that is away does not delay every prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from itertools import count

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from deltaserve.config import RouterConfig
from deltaserve.membership import Membership
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from router import policy, spans
from router.admission import PROMPT_SEEN
from router.books import Books
from router.chooser import Chooser
from router.cooldown import Cooldown
from router.early import EarlyReads
from router.flight import Boundary, Flight, Stage
from router.metrics import Metrics
from router.outbox import Outbox
from router.placement import ANSWER_TOKENS, InvalidPlacement, parse_override
from router.recovery import Recovery
from router.roster import Roster
from router.route_header import ROUTES
from router.trace import Trace, TraceRing, response_id
from router.worker_link import LinkDown, WorkerLink

log = logging.getLogger(__name__)

MAX_FLIGHTS = 8192
"""Engine requests held at once; more are refused."""


class Overloaded(RuntimeError):
    """The router holds as many requests as it may."""


class Dispatcher:
    """See the module's description. `start` and `close` frame its life; every method belongs to the event loop."""

    def __init__(self, config: RouterConfig, membership: Membership, metrics: Metrics | None = None) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.traces = TraceRing()
        self.roster = Roster(membership, self, self.metrics)
        self._legs = count(1)
        self._cooldown = Cooldown()
        self.policy = policy.make(config.policy, config.handover_min_tokens)
        self._chooser = Chooser(self.policy, self.roster, self._cooldown)
        self._outbox = Outbox()
        self._books = Books(self.roster, self.metrics, self._outbox)
        self._recovery = Recovery(
            config, self._books, self.roster, self.metrics, self._outbox, self._cooldown, self._place
        )
        self._early = EarlyReads(config.early_reads, self._books, self.metrics, self._legs)
        self._closing = False

    def start(self) -> None:
        """Begin to follow the register and to connect to workers. Needs a running event loop."""
        self.roster.start()
        self._recovery.start()

    async def close(self) -> None:
        """End every request with ABORT and close the links. Never raises."""
        self.end_all("the router is stopping")
        self._closing = True
        self._recovery.stop()
        await self.roster.close()

    # ---- for whoever stands above

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request. Its outputs come out of `outputs`; so does its failure, as FinishReason.ERROR.

        Raises Overloaded, or ValueError when the request is of a kind that cannot be dispatched.
        """
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError("only token prompts with sampling parameters can be dispatched")
        if request.request_id in self._books.flights:
            raise ValueError(f"request {request.request_id} is in flight already")
        if len(self._books.flights) >= MAX_FLIGHTS:
            raise Overloaded(f"{MAX_FLIGHTS} requests are in flight; try again later")
        extra = dict(params.extra_args or {})
        try:
            override = parse_override(extra.pop("kv_transfer_params", None))
        except InvalidPlacement as error:
            log.error("request %s: %s; ignored", request.external_req_id or request.request_id, error)
            override = None
        params.extra_args = extra or None  # nothing that a client wrote there may reach a worker
        loop = asyncio.get_running_loop()
        now = loop.time()
        prompt_tokens = len(request.prompt_token_ids)
        if (seen := PROMPT_SEEN.get()) is not None:
            seen(prompt_tokens)
        placement = override or self.config.placement
        flight = Flight(
            request=request,
            prompt=policy.Prompt(request.prompt_token_ids, request.cache_salt or ""),
            sampling=codec.encode_sampling(params),
            prompt_tokens=prompt_tokens,
            answer_tokens=min(params.max_tokens or ANSWER_TOKENS, ANSWER_TOKENS),
            prompt_logprobs=params.prompt_logprobs is not None,
            placement=placement,
            trace=Trace(
                request_id=response_id(request.external_req_id or request.request_id),
                prompt_tokens=prompt_tokens,
                placement=placement,
                arrival=time.time(),
            ),
            arrival=now,
            deadline=now + self.config.request_timeout,
        )
        self.traces.add(flight.trace)
        if (routes := ROUTES.get()) is not None:
            routes.append(flight.trace)
        flight.spans = spans.begin(flight.trace)
        self._books.flights[request.request_id] = flight
        self.metrics.in_flight.set(len(self._books.flights))
        flight.timers.append(
            loop.call_at(flight.deadline, self._books.fail, flight, "request_timeout", "request_timeout")
        )
        self._place(flight)

    def abort(self, request_ids: Iterable[str], stopped: bool = False) -> None:
        """Forget requests; whoever holds them stops, and their boundaries go. Unknown ids are ignored.

        `stopped`: they are complete, because a stop string was found in their text; else their clients have gone.
        """
        for request_id in request_ids:
            flight = self._books.flights.get(request_id)
            if flight is not None:
                self._books.abort_leg(flight)
                self._books.end(flight, *(("finished", "stop") if stopped else ("aborted", "abort")))

    async def outputs(self) -> EngineCoreOutputs:
        """The next step's outputs; steps that have piled up come merged."""
        return await self._outbox.take()

    def end_all(self, reason: str) -> None:
        """End every request now with ERROR; `reason` goes into their traces."""
        for flight in list(self._books.flights.values()):
            self._books.fail(flight, "shutdown", reason)

    @property
    def in_flight(self) -> int:
        """Requests held now."""
        return len(self._books.flights)

    @property
    def flights(self) -> Iterable[Flight]:
        """Requests held now; to look at."""
        return self._books.flights.values()

    @property
    def decode_slots(self) -> int:
        """Requests that the decode workers can run at once."""
        return self.roster.decode_slots

    # ---- placing

    def _place(self, flight: Flight) -> None:
        choice = self._chooser.choose(flight)
        if choice is None:
            self._wait(flight)
        elif choice.prefill is not None:
            self._prefill(flight, choice.prefill, choice.decode)
        else:
            self._decode(flight, choice.decode)

    def _wait(self, flight: Flight) -> None:
        """Keep a request that no decode worker can take now, for at most `worker_wait` seconds."""
        flight.stage = Stage.WAITING
        flight.trace.route = "waiting for a decode worker"
        if flight.request_id not in self._books.waiting:
            self._books.waiting[flight.request_id] = flight
            self._books.stage_timer(
                flight,
                self.config.resume_wait if flight.any_output else self.config.worker_wait,
                "no_decode_worker",
                "no decode worker could be reached in time",
            )

    def _prefill(self, flight: Flight, prefill: WorkerLink, decode: WorkerLink) -> None:
        self._books.reserve(flight, decode)
        reader = decode.description
        publish = pb.Publish(
            preferred_segment=reader.segment,
            pack_dcp=reader.dcp,
            pack_interleave=reader.interleave,
            early=self._early.wanted(decode),
        )
        timeout = min(self.config.prefill_timeout, self._books.remaining(flight))
        flight.trace.route = f"handover {prefill.worker_id} {decode.worker_id}"
        try:
            self._dispatch(
                flight, prefill, flight.prompt_tokens, Stage.PREFILL, publish=publish, timeout=timeout
            )
        except LinkDown as error:
            self._recovery.handover_failed(flight, "prefill_failed", str(error))
            return
        loop = asyncio.get_running_loop()
        flight.timers.append(loop.call_later(timeout, self._recovery.prefill_late, flight))

    def _decode(self, flight: Flight, decode: WorkerLink) -> None:
        boundary = flight.boundary
        load = None
        work = flight.answer_tokens
        if boundary is not None:
            load = pb.Load(boundary=boundary.key, recompute=True)
            flight.trace.route = f"handover {boundary.publisher.worker_id} {decode.worker_id}"
        else:
            work += flight.prompt_tokens
            flight.trace.route = f"local {flight.local_reason} {decode.worker_id}"
        flight.trace.attempts += 1
        flight.attempts += 1
        flight.leg_output = False
        early = self._early.confirm(flight, decode) if load is not None else None
        try:
            if early is not None:
                self._enter(flight, decode, early.leg, work, Stage.DECODE)
            else:
                self._dispatch(
                    flight, decode, work, Stage.DECODE, load=load, timeout=self._books.remaining(flight)
                )
        except LinkDown as error:
            self._recovery.decode_lost(flight, decode, str(error))
            return
        if not flight.counted:
            flight.counted = True
            if boundary is not None:
                self.metrics.handovers.inc()
            else:
                self.metrics.local_prefills.labels(flight.local_reason).inc()
        if early is not None:
            self._early.replay(early, self.loaded, self.step)

    def _dispatch(
        self,
        flight: Flight,
        link: WorkerLink,
        work: int,
        stage: Stage,
        *,
        publish: pb.Publish | None = None,
        load: pb.Load | None = None,
        timeout: float,
    ) -> None:
        leg = next(self._legs)
        add = codec.encode_add(
            leg,
            flight.request,
            flight.sampling,
            publish=publish,
            load=load,
            timeout=timeout,
            history=flight.history if stage is Stage.DECODE else (),
            traceparent=flight.spans.leg(stage.value, link.worker_id),
            work=work + (policy.held_as_work(flight.prompt.state_bytes) if stage is Stage.DECODE else 0),
        )
        link.send(pb.ToWorker(add=add))
        self._enter(flight, link, leg, work, stage)

    def _enter(self, flight: Flight, link: WorkerLink, leg: int, work: int, stage: Stage) -> None:
        """The request is on this worker now."""
        flight.cancel_stage_timer()
        self._books.waiting.pop(flight.request_id, None)
        flight.alone = not link.legs
        flight.stage, flight.leg, flight.link, flight.charged = stage, leg, link, work
        flight.dispatched = asyncio.get_running_loop().time()
        link.outstanding += work
        if stage is Stage.DECODE:
            flight.charged_bytes = flight.prompt.state_bytes
            link.state_bytes += flight.charged_bytes
        link.legs[leg] = flight

    # ---- what the links report (LinkEvents)

    def link_up(self, link: WorkerLink) -> None:
        self._cooldown.forget(link.worker_id)
        longest = link.description.max_model_len
        if longest < self.config.max_model_len:
            log.warning(
                "%s takes %d tokens, this router accepts %d; give both the same --max-model-len",
                link.worker_id,
                longest,
                self.config.max_model_len,
            )
        self.awake(link)

    def awake(self, link: WorkerLink) -> None:
        self.roster.changed()
        for flight in list(self._books.waiting.values()):
            self._place(flight)

    def early_lost(self, count: int) -> None:
        self.metrics.early_reads.labels("dropped").inc(count)

    def link_down(self, link: WorkerLink, legs: list[Flight], reason: str) -> None:
        link.outstanding = link.state_bytes = 0
        self.policy.gone([link.worker_id])
        self.roster.changed()
        if self._closing:
            return
        self.metrics.links_lost.labels(link.member.role).inc()
        for flight in legs:
            flight.charged = flight.charged_bytes = 0
            flight.link = None
            flight.spans.leave(reason)
            if flight.stage is Stage.PREFILL:
                self._recovery.handover_failed(flight, "prefill_failed", f"{link.worker_id} lost: {reason}")
            elif flight.stage is Stage.DECODE:
                kind = "drained" if link.retiring else "decode_failed"
                self._recovery.decode_lost(flight, link, reason, kind)
        self.roster.retire_idle(link)

    def retiring(self, link: WorkerLink) -> None:
        for flight in self._books.flights.values():
            self._books.release_if_in_the_way(flight)

    def step(self, link: WorkerLink, outputs: list[tuple[int, EngineCoreOutput]]) -> None:
        legs = link.legs
        now = asyncio.get_running_loop().time()
        batch: list[EngineCoreOutput] = []
        for leg, output in outputs:
            flight = legs.get(leg)
            if flight is None:
                self._early.output(link, leg, output)
                continue  # aborted meanwhile, or not its turn yet
            if flight.stage is not Stage.DECODE:
                self._recovery.prefill_output(flight, output)
                continue
            output.request_id = flight.request.request_id
            reason = output.finish_reason
            if not flight.leg_output:
                if reason is FinishReason.ERROR:
                    self._recovery.decode_refused(flight, link)
                    continue
                flight.leg_output = True
                if flight.any_output:
                    self._resumed(flight, output, now)
                else:
                    self._first_output(flight, output, now)
                self._books.release_if_in_the_way(flight)
            flight.history.extend(output.new_token_ids)
            flight.last_output = now
            if reason is not None:
                self.policy.ended(link.worker_id, flight.prompt, flight.history)
                self._books.end(flight, "error" if reason is FinishReason.ERROR else "finished", str(reason))
            batch.append(output)
        if batch:
            self._books.deliver(batch)

    def written(self, link: WorkerLink, message: pb.Written) -> None:
        flight = link.legs.get(message.id)
        if flight is not None:
            self._early.written(flight, message)

    def published(self, link: WorkerLink, message: pb.Published) -> None:
        flight = link.legs.get(message.id)
        if flight is None:
            if message.committed and link.release(message.boundary, link.session):
                self.metrics.orphans.inc()
            return
        if flight.stage is not Stage.PREFILL:
            return
        alone = flight.alone and len(link.legs) == 1
        self._books.leave(flight)
        now = asyncio.get_running_loop().time()
        if not message.committed:
            if message.kind == "store_full":  # said before anything was computed: nothing is late for it
                self._recovery.handover_failed(flight, "store_full", message.error)
                return
            self._cooldown.failed(link.worker_id)
            self._recovery.handover_failed(
                flight, "prefill_failed", message.error or "the boundary was not committed"
            )
            return
        self._cooldown.forget(link.worker_id)
        self.metrics.publish_seconds.observe(now - flight.dispatched)
        cached = min(message.cached_tokens + message.store_tokens, message.length)
        computed = message.length - cached
        self.policy.prefilled(link.worker_id, flight.prompt, computed, now - flight.dispatched, alone)
        flight.boundary = Boundary(
            message.boundary, message.length, cached, link, link.session, flight.reserved
        )
        trace = flight.trace
        trace.boundary, trace.boundary_length, trace.boundary_bytes = (
            message.boundary,
            message.length,
            message.bytes,
        )
        trace.prefill_cached, trace.prefill_restored = message.cached_tokens, message.store_tokens
        trace.published_after = round(now - flight.arrival, 6)
        chosen = flight.reserved
        self._books.unreserve(flight)
        if chosen is not None and chosen.ready:
            self._decode(flight, chosen)
        else:
            self._books.drop_early(flight)
            self._place(flight)

    def loaded(self, link: WorkerLink, message: pb.Loaded) -> None:
        flight = link.legs.get(message.id)
        if flight is None:
            self._early.loaded(link, message)
            return
        if message.withdrawn:
            # An early read came to nothing after its commit was heard of: the request is sent as it would have been.
            self.metrics.early_reads.labels("withdrawn").inc()
            self._books.leave(flight)
            flight.attempts -= 1
            flight.trace.attempts -= 1
            if link.ready:
                self._decode(flight, link)
            else:
                self._place(flight)
            return
        trace = flight.trace
        trace.from_store, trace.local = message.from_store, message.local
        trace.recomputed = max(0, flight.prompt_tokens - message.from_store - message.local)
        if message.failure:
            flight.load_failed = True
            trace.failure = trace.failure or message.failure
            trace.load_failure = f"{link.worker_id} recomputed the prompt: {message.failure}"
            trace.detail = trace.detail or trace.load_failure
            self.metrics.load_failures.labels(message.failure).inc()
        elif trace.boundary_bytes and message.from_store and flight.alone:
            self.policy.loaded(trace.boundary_bytes, asyncio.get_running_loop().time() - flight.dispatched)

    async def room(self) -> None:
        await self._outbox.room()

    # ---- first outputs

    def _first_output(self, flight: Flight, output: EngineCoreOutput, now: float) -> None:
        """Complete the trace, and say which prompt tokens were cached: on the prefill side, if it computed them."""
        flight.any_output = True
        trace = flight.trace
        trace.first_token_after = round(now - flight.arrival, 6)
        stats = output.prefill_stats
        if flight.boundary is None and stats is not None:
            trace.local = stats.num_local_cached_tokens
        if flight.boundary is None or flight.load_failed:
            trace.recomputed = max(0, flight.prompt_tokens - trace.from_store - trace.local)
            link = flight.link
            if link is not None and not flight.load_failed:
                alone = flight.alone and len(link.legs) == 1
                self.policy.computed(
                    link.worker_id, flight.prompt, trace.recomputed, now - flight.dispatched, alone
                )
        else:
            cached = min(flight.boundary.cached_tokens, flight.prompt_tokens)
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=flight.prompt_tokens,
                num_computed_tokens=flight.prompt_tokens - cached,
                num_cached_tokens=cached,
                num_local_cached_tokens=cached,
            )

    def _resumed(self, flight: Flight, output: EngineCoreOutput, now: float) -> None:
        """The first output of a worker that has gone on where another stopped."""
        pause = now - flight.last_output
        self.metrics.resume_seconds.observe(pause)
        flight.trace.longest_pause = max(flight.trace.longest_pause, round(pause, 6))
        flight.attempts = 1
        output.prefill_stats = None  # the prompt's were delivered with the first token
