# SPDX-License-Identifier: Apache-2.0
"""What differs between the roles: a small class each, in prefill_worker/ and decode_worker/.

The service (service.py) owns streams, ids, the engine and the clean-up; a role decides how an `Add` becomes an engine
request, and hears of the events that its connector half reports. All methods run on the service's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaserve.doctor.capabilities import Capability
from deltaserve.telemetry.progress import Progress, Report, Stage
from deltaserve.telemetry.tracing import NO_SPAN, Span
from deltaserve.wire import worker_pb2 as pb

log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that cannot run here; the message reaches the router and says why."""


@dataclass
class Job:
    """One request on this worker."""

    key: str
    """The request's name inside the engine: `<stream>-<router's id>`; unique in the worker's life."""
    add: pb.Add
    stream: Any
    """The stream that brought it (service.RouterStream)."""
    silent: bool = False
    """True: its tokens stay here (a prefill worker's sample means nothing)."""
    ended: bool = False
    """True once its last message has been sent, or the router has aborted it."""
    answered: bool = False
    """True once the engine has given its first output."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the role keeps about it."""
    span: Span = NO_SPAN
    """This worker's part of the request's trace."""
    progress: Progress | None = None
    """What people see of its handoff; None: it has none."""


class Role(ABC):
    """The seam between the service and a role."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.call: Callable[[Callable[[Any], Any]], Any] = lambda function: None
        """Runs `function(core)` on the engine's thread, between two steps; set by the service."""
        self.withdraw: Callable[[Job], None] = lambda job: None
        """Takes a job out of the engine without a word to its router; set by the service."""

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine beside the requests; `close` ends it. What it raises is logged."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task of the role failed", exc_info=error)

    async def _finish_tasks(self, seconds: float) -> None:
        """Give running tasks `seconds`, then cancel what is left."""
        if self._tasks:
            _, pending = await asyncio.wait(list(self._tasks), timeout=seconds)
            for task in pending:
                task.cancel()

    @abstractmethod
    async def prepare(self, job: Job) -> Any:
        """Turn `job.add` into vLLM's EngineCoreRequest. Raises `Refused`."""

    def on_sent(self, job: Job, kind: Stage, ranks: int) -> None:
        """A job of this kind went out to every rank."""
        if job.progress is not None:
            job.progress.go(kind, ranks)

    def on_reported(self, job: Job, kind: Stage, reports: Sequence[Report]) -> None:
        """Ranks have reported a job of this kind."""
        if job.progress is not None:
            job.progress.reported(kind, reports)

    @abstractmethod
    def on_output(self, job: Job, output: Any) -> None:
        """An `EngineCoreOutput` of the job arrived (also for silent jobs)."""

    @abstractmethod
    def on_end(self, job: Job, reason: str) -> None:
        """The job left the engine: "finished", "aborted" or an error's words. Called once."""

    def on_confirmed(self, job: Job) -> None:  # noqa: B027 - most roles have no early loads
        """The router says that the boundary of the job's early load is committed."""

    @abstractmethod
    async def release(self, boundaries: list[str]) -> None:
        """The router needs these boundaries no longer. Never raises."""

    @abstractmethod
    async def on_lease(self, lease: int) -> None:
        """The worker's lease changed: new epochs start with it."""

    def capabilities(self, configured: list[Capability]) -> list[Capability]:
        """What `deltaserve doctor --endpoint` hears: the configuration's capabilities, with what this role has seen."""
        return configured

    @abstractmethod
    async def unread(self, segments: Collection[str]) -> int:
        """Boundaries of requests in these segments, this worker's own, that somebody may still read.

        Asked while it drains. Raises what the ledger raises.
        """

    @abstractmethod
    async def close(self) -> None:
        """The worker ends. Never raises."""
