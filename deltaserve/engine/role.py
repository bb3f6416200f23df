# SPDX-License-Identifier: Apache-2.0
"""What differs between the roles: a small class each, in prefill_worker/ and decode_worker/.

The service (service.py) owns streams, ids, the engine and the clean-up; a role decides how an `Add` becomes an engine
request, and hears of the events that its connector half reports. All methods run on the service's event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from deltaserve.wire import worker_pb2 as pb


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
    state: dict[str, Any] = field(default_factory=dict)
    """What the role keeps about it."""


class Role(ABC):
    """The seam between the service and a role."""

    @abstractmethod
    async def prepare(self, job: Job) -> Any:
        """Turn `job.add` into vLLM's EngineCoreRequest. Raises `Refused`."""

    @abstractmethod
    def on_output(self, job: Job, output: Any) -> None:
        """An `EngineCoreOutput` of the job arrived (also for silent jobs)."""

    @abstractmethod
    def on_end(self, job: Job, reason: str) -> None:
        """The job left the engine: "finished", "aborted" or an error's words. Called once."""

    @abstractmethod
    async def release(self, boundaries: list[str]) -> None:
        """The router needs these boundaries no longer. Never raises."""

    @abstractmethod
    async def on_lease(self, lease: int) -> None:
        """The worker's lease changed: new epochs start with it."""

    @abstractmethod
    async def close(self) -> None:
        """The worker ends. Never raises."""
