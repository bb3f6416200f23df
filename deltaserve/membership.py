# SPDX-License-Identifier: Apache-2.0
"""Who is in the cluster. A member is a key under a lease; the key vanishes when its process does.

Layout in etcd, under the cluster's prefix:

    PREFIX/members/<role>/<worker id>    JSON of `Member`, attached to the worker's lease
    PREFIX/drain/<worker id>             JSON of `DrainOrder`, attached to the lease of whoever asks (drain.py)

The same lease fences what the worker writes into the ledger (statestore/ledger.py), and the lease id is the first half
of every epoch. `Membership` is the seam; the etcd implementation is `deltaserve.etcd.EtcdMembership`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import get_args

from deltaserve.config import Role


@dataclass(frozen=True)
class Member:
    """One worker, as the rest of the cluster knows it."""

    worker_id: str
    """Unique for each start of a worker: `<role>-<random>`."""
    role: Role
    address: str
    """host:port of its gRPC server."""
    model_digest: str
    """Of configuration and weights; the router never pairs different ones."""
    geometry: str
    """Fingerprint of its cache geometry."""
    lease: int
    """Its etcd lease: it fences its writes, and is the first half of its epochs."""
    draining: bool = False
    """True: finishes what it holds, takes nothing new."""
    cache: str = ""
    """Its cache geometry as JSON; the router pairs only workers between which state can move. Empty: not told."""

    def to_json(self) -> str:
        """The value stored in etcd."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Member:
        """Inverse of `to_json`. Raises ValueError naming what is missing or unknown."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"member record does not fit this version of deltaserve: {error}") from error


@dataclass(frozen=True)
class View:
    """The members at one moment."""

    members: tuple[Member, ...]
    connected: bool
    """False: etcd is away and this is the last view seen. Serving goes on with it."""

    def of(self, role: Role) -> list[Member]:
        """Members of one role that take new work."""
        return [m for m in self.members if m.role == role and not m.draining]


def member_key(worker_id: str) -> str:
    """Key of a member below the cluster's prefix. Raises ValueError unless the id is `<role>-<random>`."""
    role, dash, rest = worker_id.partition("-")
    if role not in get_args(Role) or not dash or not rest or "/" in rest:
        raise ValueError(f"worker_id: {worker_id!r} is not <role>-<random> with role prefill or decode")
    return f"members/{role}/{worker_id}"


@dataclass(frozen=True)
class DrainOrder:
    """Somebody asks a worker to drain, and what the worker answers."""

    seconds: float | None = None
    """How long it may take to finish what it holds; None: its own limit."""
    done: bool = False
    """The worker's answer: it holds nothing any more, or its time is up, and it goes."""
    moved: int = 0
    """The worker's answer: what it still held."""

    def to_json(self) -> str:
        """The value stored in etcd."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> DrainOrder:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(f"drain order does not fit this version of deltaserve: {error}") from error


def drain_key(worker_id: str) -> str:
    """Key of a drain order below the cluster's prefix."""
    return f"drain/{worker_id}"


class Membership(ABC):
    """The seam between a role and the cluster's register."""

    on_lease: Callable[[int], Awaitable[None] | None] | None = None
    """Called with the new lease's id after the member has been registered again; not for the first lease."""

    @abstractmethod
    async def join(self, member: Member) -> Member:
        """Register; the lease is granted here and kept alive until `leave`.

        Returns the member with its lease filled in. When the lease is lost (etcd away longer than its time to live)
        the implementation registers again under a new lease and calls the `on_lease` callback it was given.
        Raises ConnectionError when etcd cannot be reached in time.
        """

    @abstractmethod
    async def update(self, member: Member) -> None:
        """Replace the record of a joined member (to mark it draining)."""

    @abstractmethod
    async def drain_order(self) -> DrainOrder:
        """Wait until somebody asks the joined member to drain, for ever; survives the register's absence."""

    @abstractmethod
    async def drained(self, moved: int) -> None:
        """Answer the order, if there was one: this member goes now, still holding `moved`. Never raises."""

    @abstractmethod
    async def leave(self) -> None:
        """Revoke the lease; the record goes with it. Never raises."""

    @abstractmethod
    def watch(self) -> AsyncIterator[View]:
        """Yield the view now and after each change, for ever; survives compaction and reconnection.

        Members whose lease ended while the register was away stay in the view until they have had time to register
        again.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections. Never raises."""
