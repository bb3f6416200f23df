# SPDX-License-Identifier: Apache-2.0
"""The dispatcher: engine-core requests in, step-batched engine-core outputs out. It alone knows workers, boundaries,
retries and deadlines; whoever stands above it sees one engine.

Happy path of a request of N prompt tokens:

    1  a decode worker is chosen (fewest outstanding tokens), and a prefill worker of the same model
    2  Add{prompt, Publish{the decode worker's segment}} ─▶ prefill worker ─▶ Published{boundary of N-1 tokens}
    3  Add{prompt, Load{boundary, recompute}} ─▶ decode worker ─▶ Loaded, then one Step an engine step
    4  at the end, however it comes, Release{boundary} ─▶ prefill worker

Crash path:

    no handover (policy, short prompt, no prefill worker, prefill failed or late)   the decode worker prefills; counted
    prefill worker lost before it published                                         as above: prefill_failed
    decode worker lost, or silent for too long    another one goes on from the tokens delivered (docs/recovery.md)
    no decode worker for `worker_wait` seconds, `resume_wait` when tokens have been delivered       ends with ERROR
    client gone                                                                     Abort to whoever holds the request
    a boundary is committed after its request has gone                              released at once
    prefill worker lost after it published                  nothing to release: the worker or the sweeper removes it

Decisions. Everything here runs on the event loop and never awaits: a request is a small state machine driven by
messages and timers, without a task of its own, and a step costs one dictionary look-up a request. A worker that fails
several handovers in a row is left out for a while, so that a store that is away does not delay every prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from itertools import count

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from deltaserve.config import RouterConfig
from deltaserve.membership import Membership
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from router import policy
from router.admission import PROMPT_SEEN
from router.cooldown import Cooldown
from router.flight import Boundary, Flight, Stage
from router.metrics import Metrics
from router.outbox import Outbox
from router.placement import (
    ANSWER_TOKENS,
    HANDOVER_FAILED,
    Facts,
    InvalidPlacement,
    least_outstanding,
    local_reason,
    parse_override,
)
from router.roster import Roster
from router.trace import Trace, TraceRing, response_id
from router.worker_link import LinkDown, WorkerLink

log = logging.getLogger(__name__)

MAX_FLIGHTS = 8192
"""Engine requests held at once; more are refused."""
DEFAULT_SEQS = 8
"""Requests that a worker runs at once when it does not say."""
MAX_ATTEMPTS = 3
"""Decode workers tried for one request without a token in between."""
LOOK_SECONDS = 0.5
"""Between looks at the requests' token deadlines."""


class Overloaded(RuntimeError):
    """The router holds as many requests as it may."""


class Dispatcher:
    """See the module's description. `start` and `close` frame its life; every method belongs to the event loop."""

    def __init__(self, config: RouterConfig, membership: Membership, metrics: Metrics | None = None) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.traces = TraceRing()
        self.roster = Roster(membership, self, self.metrics)
        self._flights: dict[str, Flight] = {}
        self._waiting: dict[str, Flight] = {}
        self._legs = count(1)
        self._cooldown = Cooldown()
        self.policy = policy.make(config.policy, config.handover_min_tokens)
        self._outbox = Outbox()
        self._look: asyncio.TimerHandle | None = None
        self._held_back = 0.0
        self._closing = False

    def start(self) -> None:
        """Begin to follow the register and to connect to workers. Needs a running event loop."""
        self.roster.start()
        self._look_for_late()

    async def close(self) -> None:
        """End every request with ABORT and close the links. Never raises."""
        self.end_all("the router is stopping")
        self._closing = True
        if self._look is not None:
            self._look.cancel()
        await self.roster.close()

    # ---- for whoever stands above

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request. Its outputs come out of `outputs`; so does its failure, as FinishReason.ERROR.

        Raises Overloaded, or ValueError when the request is of a kind that cannot be dispatched.
        """
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None or request.prompt_embeds is not None:
            raise ValueError("only token prompts with sampling parameters can be dispatched")
        if request.request_id in self._flights:
            raise ValueError(f"request {request.request_id} is in flight already")
        if len(self._flights) >= MAX_FLIGHTS:
            raise Overloaded(f"{MAX_FLIGHTS} requests are in flight; try again later")
        extra = dict(params.extra_args or {})
        try:
            override = parse_override(extra.pop("kv_transfer_params", None))
        except InvalidPlacement as error:
            log.error("request %s: %s; ignored", request.request_id, error)
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
        self._flights[request.request_id] = flight
        self.metrics.in_flight.set(len(self._flights))
        flight.timers.append(
            loop.call_at(flight.deadline, self._fail, flight, "request_timeout", "request_timeout")
        )
        self._place(flight)

    def abort(self, request_ids: Iterable[str], stopped: bool = False) -> None:
        """Forget requests; whoever holds them stops, and their boundaries go. Unknown ids are ignored.

        `stopped`: they are complete, because a stop string was found in their text; else their clients have gone.
        """
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            if flight is not None:
                self._abort_leg(flight)
                self._end(flight, *(("finished", "stop") if stopped else ("aborted", "abort")))

    async def outputs(self) -> EngineCoreOutputs:
        """The next step's outputs; steps that have piled up come merged."""
        return await self._outbox.take()

    def end_all(self, reason: str) -> None:
        """End every request now with ERROR; `reason` goes into their traces."""
        for flight in list(self._flights.values()):
            self._fail(flight, "shutdown", reason)

    @property
    def in_flight(self) -> int:
        """Requests held now."""
        return len(self._flights)

    @property
    def decode_slots(self) -> int:
        """Requests that the decode workers can run at once."""
        return sum(worker.description.max_num_seqs or DEFAULT_SEQS for worker in self.roster.ready("decode"))

    # ---- placing

    def _place(self, flight: Flight) -> None:
        decodes = self._decodes(flight.failed_workers)
        first = least_outstanding(decodes)
        if first is None:
            self._wait(flight)
            return
        digest = first.description.model_digest
        decodes = [worker for worker in decodes if worker.description.model_digest == digest]
        facts = Facts(flight.prompt_tokens, flight.prompt_logprobs, flight.placement)
        failed = flight.local_reason if flight.local_reason in HANDOVER_FAILED else ""
        reason = failed or local_reason(facts) or ""
        able: list[WorkerLink] = []
        if not reason and flight.boundary is None:
            able = [p for p in self.roster.ready("prefill") if p.description.model_digest == digest]
        prefills = [worker for worker in able if self._cooldown.allows(worker.worker_id)]
        forced = bool(reason) or flight.boundary is not None or flight.placement == "handover"
        flight.prompt.state_bytes = first.state_bytes_of(flight.prompt_tokens - 1)
        choice = self.policy.choose(flight.prompt, decodes, prefills, forced)
        assert choice is not None, "there is a decode worker"
        if choice.prefill is not None:
            flight.trace.why = choice.why
            self._prefill(flight, choice.prefill, choice.decode)
            return
        if flight.boundary is None:
            if not reason:
                reason = "prefill_failed" if able and not prefills else choice.reason
            flight.local_reason = reason
            flight.trace.why = choice.why
        self._decode(flight, choice.decode)

    def _decodes(self, excluded: Collection[str]) -> list[WorkerLink]:
        """Decode workers that take requests and are not excluded."""
        return [worker for worker in self.roster.ready("decode") if worker.worker_id not in excluded]

    def _wait(self, flight: Flight) -> None:
        """Keep a request that no decode worker can take now, for at most `worker_wait` seconds."""
        flight.stage = Stage.WAITING
        flight.trace.route = "waiting for a decode worker"
        if flight.request_id not in self._waiting:
            self._waiting[flight.request_id] = flight
            self._stage_timer(
                flight,
                self.config.resume_wait if flight.any_output else self.config.worker_wait,
                "no_decode_worker",
                "no decode worker could be reached in time",
            )

    def _prefill(self, flight: Flight, prefill: WorkerLink, decode: WorkerLink) -> None:
        self._reserve(flight, decode)
        reader = decode.description
        publish = pb.Publish(
            preferred_segment=reader.segment, pack_dcp=reader.dcp, pack_interleave=reader.interleave
        )
        timeout = min(self.config.prefill_timeout, self._remaining(flight))
        flight.trace.route = f"handover {prefill.worker_id} {decode.worker_id}"
        try:
            self._dispatch(
                flight, prefill, flight.prompt_tokens, Stage.PREFILL, publish=publish, timeout=timeout
            )
        except LinkDown as error:
            self._handover_failed(flight, "prefill_failed", str(error))
            return
        loop = asyncio.get_running_loop()
        flight.timers.append(loop.call_later(timeout, self._prefill_late, flight))

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
        try:
            self._dispatch(flight, decode, work, Stage.DECODE, load=load, timeout=self._remaining(flight))
        except LinkDown as error:
            self._decode_lost(flight, decode, str(error))
            return
        if not flight.counted:
            flight.counted = True
            if boundary is not None:
                self.metrics.handovers.inc()
            else:
                self.metrics.local_prefills.labels(flight.local_reason).inc()

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
        )
        link.send(pb.ToWorker(add=add))
        flight.cancel_stage_timer()
        self._waiting.pop(flight.request_id, None)
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
        self.roster.changed()
        for flight in list(self._waiting.values()):
            self._place(flight)

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
            if flight.stage is Stage.PREFILL:
                self._handover_failed(flight, "prefill_failed", f"{link.worker_id} lost: {reason}")
            elif flight.stage is Stage.DECODE:
                self._decode_lost(flight, link, reason)
        self.roster.retire_idle(link)

    def step(self, link: WorkerLink, outputs: list[tuple[int, EngineCoreOutput]]) -> None:
        legs = link.legs
        now = asyncio.get_running_loop().time()
        batch: list[EngineCoreOutput] = []
        for leg, output in outputs:
            flight = legs.get(leg)
            if flight is None:
                continue  # aborted meanwhile
            if flight.stage is not Stage.DECODE:
                self._prefill_output(flight, output)
                continue
            output.request_id = flight.request.request_id
            reason = output.finish_reason
            if not flight.leg_output:
                if reason is FinishReason.ERROR:
                    self._decode_refused(flight, link)
                    continue
                flight.leg_output = True
                if flight.any_output:
                    self._resumed(flight, output, now)
                else:
                    self._first_output(flight, output, now)
            flight.history.extend(output.new_token_ids)
            flight.last_output = now
            if reason is not None:
                self.policy.ended(link.worker_id, flight.prompt, flight.history)
                self._end(flight, "error" if reason is FinishReason.ERROR else "finished", str(reason))
            batch.append(output)
        if batch:
            self._deliver(batch)

    def published(self, link: WorkerLink, message: pb.Published) -> None:
        flight = link.legs.get(message.id)
        if flight is None:
            if message.committed and link.release(message.boundary, link.session):
                self.metrics.orphans.inc()
            return
        if flight.stage is not Stage.PREFILL:
            return
        alone = flight.alone and len(link.legs) == 1
        self._leave(flight)
        now = asyncio.get_running_loop().time()
        if not message.committed:
            if message.kind == "store_full":  # said before anything was computed: nothing is late for it
                self._handover_failed(flight, "store_full", message.error)
                return
            self._cooldown.failed(link.worker_id)
            self._handover_failed(flight, "prefill_failed", message.error or "the boundary was not committed")
            return
        self._cooldown.forget(link.worker_id)
        self.metrics.publish_seconds.observe(now - flight.dispatched)
        cached = min(message.cached_tokens + message.store_tokens, message.length)
        computed = message.length - cached
        self.policy.prefilled(link.worker_id, flight.prompt, computed, now - flight.dispatched, alone)
        flight.boundary = Boundary(message.boundary, message.length, cached, link, link.session)
        trace = flight.trace
        trace.boundary, trace.boundary_length, trace.boundary_bytes = (
            message.boundary,
            message.length,
            message.bytes,
        )
        trace.prefill_cached, trace.prefill_restored = message.cached_tokens, message.store_tokens
        trace.published_after = round(now - flight.arrival, 6)
        chosen = flight.reserved
        self._unreserve(flight)
        if chosen is not None and chosen.ready:
            self._decode(flight, chosen)
        else:
            self._place(flight)

    def loaded(self, link: WorkerLink, message: pb.Loaded) -> None:
        flight = link.legs.get(message.id)
        if flight is None:
            return
        trace = flight.trace
        trace.from_store, trace.local = message.from_store, message.local
        trace.recomputed = max(0, flight.prompt_tokens - message.from_store - message.local)
        if message.failure:
            flight.load_failed = True
            trace.failure = trace.failure or message.failure
            trace.detail = trace.detail or f"{link.worker_id} recomputed the prompt: {message.failure}"
            self.metrics.load_failures.labels(message.failure).inc()
        elif trace.boundary_bytes and message.from_store and flight.alone:
            self.policy.loaded(trace.boundary_bytes, asyncio.get_running_loop().time() - flight.dispatched)

    async def room(self) -> None:
        await self._outbox.room()

    # ---- what goes wrong

    def _prefill_output(self, flight: Flight, output: EngineCoreOutput) -> None:
        """A prefill worker's tokens mean nothing; that it refused the request does."""
        if output.finish_reason is FinishReason.ERROR and flight.link is not None:
            self._cooldown.failed(flight.link.worker_id)
            worker = flight.link.worker_id
            self._leave(flight)
            self._handover_failed(flight, "prefill_failed", f"{worker} refused the request")

    def _prefill_late(self, flight: Flight) -> None:
        if flight.stage is not Stage.PREFILL or flight.link is None:
            return
        worker = flight.link.worker_id
        self._cooldown.failed(worker)
        self._abort_leg(flight)
        self._handover_failed(flight, "prefill_timeout", f"{worker} did not publish in time")

    def _handover_failed(self, flight: Flight, reason: str, detail: str) -> None:
        log.warning("request %s: %s: %s", flight.request_id, reason, detail)
        flight.cancel_stage_timer()
        self._unreserve(flight)
        flight.local_reason = reason
        flight.trace.failure = flight.trace.failure or reason
        flight.trace.detail = flight.trace.detail or detail
        self._place(flight)

    def _decode_refused(self, flight: Flight, link: WorkerLink) -> None:
        self._leave(flight)
        flight.failed_workers.add(link.worker_id)
        if not self._decodes(flight.failed_workers):
            self._fail(flight, "decode_refused", f"{link.worker_id} refused the request")
        else:
            self._decode_lost(flight, link, "the worker refused the request")

    def _decode_lost(
        self, flight: Flight, link: WorkerLink, reason: str, kind: str = "decode_failed"
    ) -> None:
        """Another decode worker goes on from what has been delivered; the request ends when too many have failed."""
        trace = flight.trace
        trace.failure = trace.failure or kind
        trace.detail = trace.detail or f"{link.worker_id}: {reason}"
        if link.up:
            # A lost worker may come back in time; this one would fail again.
            flight.failed_workers.add(link.worker_id)
        if flight.attempts >= MAX_ATTEMPTS:
            self._fail(flight, kind, f"{link.worker_id}: {reason}")
            return
        self.metrics.retries.labels(kind).inc()
        if flight.any_output:
            log.warning(
                "request %s: %s: %s; going on after %d tokens",
                flight.request_id,
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
        boundary, flight.boundary = flight.boundary, None
        if boundary is not None:
            if boundary.publisher.release(boundary.key, boundary.session):
                self.metrics.releases.inc()
            flight.local_reason = ""

    def _drop_prompt_logprobs(self, flight: Flight) -> None:
        """They have been delivered with the first output, and a prompt with them is never restored."""
        params = flight.request.sampling_params
        if flight.prompt_logprobs and params is not None:
            params = params.clone()
            params.prompt_logprobs = None
            flight.sampling, flight.prompt_logprobs = codec.encode_sampling(params), False

    def _look_for_late(self) -> None:
        """Move requests whose decode worker has been silent for too long; once every LOOK_SECONDS."""
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(LOOK_SECONDS, self._look_for_late)
        now, first, next_one = loop.time(), self.config.first_token_timeout, self.config.token_timeout
        if self._outbox.full:
            self._held_back = now  # we do not read the workers' streams, so nobody is late
        for flight in list(self._flights.values()):
            link = flight.link
            if flight.stage is not Stage.DECODE or link is None:
                continue
            silent = now - max(
                flight.last_output if flight.leg_output else flight.dispatched, self._held_back
            )
            if silent <= (next_one if flight.leg_output else first):
                continue
            others = flight.failed_workers | {link.worker_id}
            if not self._decodes(others):
                continue  # nobody could do better; it may only be slow
            self._abort_leg(flight)
            self._decode_lost(flight, link, f"no token for {silent:.1f} s", "decode_late")

    def _fail(self, flight: Flight, kind: str, detail: str) -> None:
        """End a request with ERROR; only this one, whatever happened."""
        if flight.stage is Stage.ENDED:
            return
        log.warning("request %s ends with an error: %s: %s", flight.request_id, kind, detail)
        flight.trace.failure, flight.trace.detail = kind, detail
        self._abort_leg(flight)
        self._end(flight, "error", "error")
        self._deliver([EngineCoreOutput(flight.request_id, [], finish_reason=FinishReason.ERROR)])

    # ---- bookkeeping

    def _deliver(self, batch: list[EngineCoreOutput]) -> None:
        self._outbox.put(batch)

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

    def _leave(self, flight: Flight) -> None:
        """Take a flight off its worker."""
        link = flight.link
        if link is not None:
            link.legs.pop(flight.leg, None)
            link.outstanding = max(0, link.outstanding - flight.charged)
            link.state_bytes = max(0, link.state_bytes - flight.charged_bytes)
            flight.link, flight.charged, flight.charged_bytes = None, 0, 0
            if link.retiring and not link.legs:
                self.roster.retire_idle(link)
        flight.cancel_stage_timer()

    def _abort_leg(self, flight: Flight) -> None:
        link = flight.link
        if link is not None:
            link.abort(flight.leg)
            self._leave(flight)

    def _reserve(self, flight: Flight, decode: WorkerLink) -> None:
        flight.reserved, flight.reserved_tokens = decode, flight.answer_tokens
        decode.outstanding += flight.reserved_tokens

    def _unreserve(self, flight: Flight) -> None:
        if flight.reserved is not None:
            flight.reserved.outstanding = max(0, flight.reserved.outstanding - flight.reserved_tokens)
            flight.reserved, flight.reserved_tokens = None, 0

    def _end(self, flight: Flight, outcome: str, reason: str) -> None:
        """The flight's last act, whatever the outcome: everything that it holds returns to where it was."""
        flight.stage = Stage.ENDED
        self._leave(flight)
        self._unreserve(flight)
        for timer in flight.timers:
            timer.cancel()
        flight.timers.clear()
        self._flights.pop(flight.request_id, None)
        self._waiting.pop(flight.request_id, None)
        boundary = flight.boundary
        if boundary is not None:
            flight.boundary = None
            if boundary.publisher.release(boundary.key, boundary.session):
                self.metrics.releases.inc()
        trace = flight.trace
        trace.status, trace.finish_reason, trace.output_tokens = outcome, reason, flight.tokens_sent
        trace.ended_after = round(asyncio.get_running_loop().time() - flight.arrival, 6)
        self.metrics.in_flight.set(len(self._flights))
        self.metrics.requests.labels(outcome).inc()
        self.metrics.tokens.inc(flight.tokens_sent)
        if flight.any_output:
            for source, tokens in (
                ("store", trace.from_store),
                ("local", trace.local),
                ("computed", trace.recomputed),
            ):
                self.metrics.prompt_tokens.labels(source).inc(tokens)

    def _remaining(self, flight: Flight) -> float:
        return max(0.001, flight.deadline - asyncio.get_running_loop().time())

    def _stage_timer(self, flight: Flight, seconds: float, kind: str, detail: str) -> None:
        loop = asyncio.get_running_loop()
        flight.timers.append(loop.call_later(seconds, self._fail, flight, kind, detail))
