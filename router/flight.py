# SPDX-License-Identifier: Apache-2.0
"""One engine request on its way through the cluster: the dispatcher's state of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from router.placement import Placement
from router.policy import Prompt
from router.spans import NO_SPANS, RequestSpans
from router.trace import Trace

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

    from deltaserve.wire import worker_pb2 as pb
    from router.worker_link import WorkerLink


class Stage(Enum):
    """Where a flight is.

    WAITING ──▶ PREFILL ──▶ DECODE ──▶ ENDED; WAITING ──▶ DECODE without a handover; PREFILL or DECODE ──▶ WAITING when
    a worker is lost and no other is there.
    """

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Boundary:
    """A committed boundary that this router must give back."""

    key: str
    length: int
    cached_tokens: int
    """Of the prompt, found in the prefill worker's own prefix cache or restored there from checkpoints."""
    publisher: WorkerLink
    session: int
    """The publisher's stream; the boundary does not outlive it."""
    reader: WorkerLink | None = None
    """The decode worker into whose memory it was written."""

    @property
    def in_the_way(self) -> bool:
        """Whether a worker that wants to go waits for it."""
        return self.publisher.retiring or (self.reader is not None and self.reader.retiring)


@dataclass(slots=True, eq=False)
class EarlyLeg:
    """The decode worker's part of a request whose boundary is not committed yet (docs/early_reads.md)."""

    link: WorkerLink
    leg: int
    held: list[pb.Loaded | EngineCoreOutput] = field(default_factory=list)
    """What it has said before the router heard of the commit, in order."""


@dataclass(slots=True, eq=False)
class Flight:
    """See the module's description. `leg` is the id under which the current worker knows the request."""

    request: EngineCoreRequest
    prompt: Prompt
    """The prompt as policies see it."""
    sampling: bytes
    prompt_tokens: int
    answer_tokens: int
    """How much of the answer counts as outstanding work."""
    prompt_logprobs: bool
    placement: Placement
    trace: Trace
    arrival: float
    """Event loop's time, seconds."""
    deadline: float
    stage: Stage = Stage.WAITING
    leg: int = 0
    link: WorkerLink | None = None
    charged: int = 0
    """Tokens counted in `link.outstanding`."""
    charged_bytes: int = 0
    """Bytes counted in `link.state_bytes`."""
    alone: bool = False
    """Whether the worker had nothing else to do when this request came to it."""
    reserved: WorkerLink | None = None
    """The decode worker chosen while the prompt is being prefilled elsewhere."""
    reserved_tokens: int = 0
    early: EarlyLeg | None = None
    boundary: Boundary | None = None
    local_reason: str = ""
    """Set once the handover has been decided against, or has failed."""
    failed_workers: set[str] = field(default_factory=set)
    history: list[int] = field(default_factory=list)
    """Tokens delivered so far; another worker goes on after them."""
    last_output: float = 0.0
    """Event loop's time of the last output."""
    attempts: int = 0
    """Decode workers tried since the last token."""
    any_output: bool = False
    leg_output: bool = False
    """Whether the current worker has delivered something."""
    counted: bool = False
    """True once its route is in the metrics."""
    load_failed: bool = False
    dispatched: float = 0.0
    spans: RequestSpans = NO_SPANS
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    """[0] the whole request's deadline; then the stage's own."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def name(self) -> str:
        """The id that the client knows it by; for logs."""
        return self.trace.request_id

    @property
    def tokens_sent(self) -> int:
        return len(self.history)

    def cancel_stage_timer(self) -> None:
        """Stop the stage's own deadline, if it has one."""
        while len(self.timers) > 1:
            self.timers.pop().cancel()
