# SPDX-License-Identifier: Apache-2.0
"""What happened to recent requests: a bounded ring that `GET /deltaserve/requests/{id}` reads.

A request's own id in the ring is the `id` of the OpenAI response. Several engine requests share one when the client
asked for n > 1 or sent a list of prompts; the answer then lists them as parts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from deltaserve.telemetry.logs import client_id

CAPACITY = 4096
"""Engine requests remembered, running and ended ones together."""


@dataclass(slots=True)
class Trace:
    """One engine request. Token counts are of the prompt; times are seconds since its arrival, None: not reached."""

    request_id: str
    """The `id` of the OpenAI response."""
    prompt_tokens: int
    placement: str
    """The placement asked for: auto, handover or local."""
    arrival: float
    """Seconds since the epoch."""
    route: str = "waiting"
    """`handover <prefill worker> <decode worker>`, `local <reason> <decode worker>` or what it waits for."""
    why: str = ""
    """The policy's words for its choice."""
    status: str = "running"
    """running, finished, aborted or error."""
    finish_reason: str = ""
    failure: str = ""
    """Kind of the first thing that went wrong on the way; empty: nothing did."""
    detail: str = ""
    """The failure in words."""
    load_failure: str = ""
    """Which worker could not restore the boundary and why, in words; empty: no load failed."""
    from_store: int = 0
    local: int = 0
    """Prompt tokens found in the decode worker's own prefix cache."""
    recomputed: int = 0
    """Prompt tokens that the decode worker computed."""
    prefill_cached: int = 0
    """Prompt tokens found in the prefill worker's own prefix cache."""
    prefill_restored: int = 0
    """Prompt tokens that the prefill worker restored from checkpoints in the store."""
    boundary: str = ""
    boundary_length: int = 0
    boundary_bytes: int = 0
    attempts: int = 0
    """Decode workers tried."""
    resumes: int = 0
    """How often another decode worker went on in the middle of the answer."""
    longest_pause: float = 0.0
    """Seconds from the last token of one worker to the first of the next."""
    output_tokens: int = 0
    published_after: float | None = None
    first_token_after: float | None = None
    ended_after: float | None = None

    @property
    def tpot(self) -> float | None:
        """Mean seconds between its tokens, pauses included; None before its end, or with fewer than two tokens."""
        if self.first_token_after is None or self.ended_after is None or self.output_tokens < 2:
            return None
        return (self.ended_after - self.first_token_after) / (self.output_tokens - 1)


response_id = client_id
"""The OpenAI response's id for vLLM's external request id."""


@dataclass
class TraceRing:
    """The last `capacity` traces, by response id. Not for other threads than the event loop's."""

    capacity: int = CAPACITY
    _order: deque[Trace] = field(default_factory=deque)
    _by_id: dict[str, list[Trace]] = field(default_factory=dict)

    def add(self, trace: Trace) -> None:
        """Remember a trace; the oldest one goes when the ring is full."""
        if len(self._order) >= self.capacity:
            oldest = self._order.popleft()
            siblings = self._by_id[oldest.request_id]
            siblings.remove(oldest)
            if not siblings:
                del self._by_id[oldest.request_id]
        self._order.append(trace)
        self._by_id.setdefault(trace.request_id, []).append(trace)

    def find(self, request_id: str) -> dict[str, Any] | None:
        """The JSON answer for a response's id, or for the X-Request-Id it was made from; None when unknown.

        The first part's fields, and `parts` with all of them when there are several.
        """
        for name in (request_id, f"chatcmpl-{request_id}", f"cmpl-{request_id}"):
            traces = self._by_id.get(name)
            if traces:
                answer = asdict(traces[0])
                if len(traces) > 1:
                    answer["parts"] = [asdict(trace) for trace in traces]
                return answer
        return None

    def recent(self, number: int = CAPACITY) -> list[Trace]:
        """The last `number` traces, newest first."""
        return list(islice(reversed(self._order), number))

    def __len__(self) -> int:
        return len(self._order)
