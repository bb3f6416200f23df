# SPDX-License-Identifier: Apache-2.0
"""One small asyncio adapter over etcd: what this project needs of it, with a deadline on every call.

Protocol of a call: it may take `EtcdConfig.timeout` seconds in all. Inside that time an endpoint that does not answer
is given up after a third of it, and the next attempt, after a pause with jitter, goes to the next endpoint. What still
fails is `EtcdUnavailable`; what etcd refuses (user, password, permission) is `EtcdDenied`, at once. An attempt whose
answer was lost may have happened: who repeats a transaction must recognise its own effect (statestore/etcd_ledger.py).

Authentication tokens expire, and a restarted etcd knows none of the old ones: a call that is refused for its token
authenticates once and is tried again.

The service classes of etcd3aio are used on a channel of our own, because its client's channel waits up to two minutes
before it connects again, and its retries know neither jitter nor a deadline over all attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

# A private name of the pinned version: its watch service reconnects by itself and may skip events in doing so.
from etcd3aio._protobuf import WatchCreateRequest, WatchRequest, WatchStub
from etcd3aio.auth import AuthService
from etcd3aio.errors import EtcdError, EtcdPermissionDeniedError, EtcdUnauthenticatedError
from etcd3aio.kv import KVService, prefix_range_end
from etcd3aio.lease import LeaseService
from etcd3aio.maintenance import MaintenanceService

from deltaserve.config import EtcdConfig
from deltaserve.etcd_channel import EtcdUnavailable, open_channel

T = TypeVar("T")

_ATTEMPTS_PER_CALL = 3
_PAUSE = 0.05
"""Seconds before the second attempt; doubles with every further one."""

_DENIED = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
}
_DENIED_WORDS = ("authentication failed", "user name is empty", "authentication is not enabled")
_RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class EtcdDenied(EtcdUnavailable):
    """etcd refuses the user, the password or the access; trying again does not help."""


class EtcdLeaseGone(EtcdUnavailable):
    """The lease named in a call has ended."""


class EtcdVersionRefused(ValueError):
    """The server's version is known to lose data, or is older than what this project is tested with."""


@dataclass(frozen=True)
class KeyValue:
    """One key as etcd holds it."""

    key: str
    value: bytes
    mod_revision: int
    """Revision of the last write of this key."""
    create_revision: int
    lease: int
    """Lease it is attached to; 0: none."""


@dataclass(frozen=True)
class Listing:
    """All keys of a prefix at one revision."""

    items: dict[str, KeyValue]
    revision: int


@dataclass(frozen=True)
class TxnResult:
    """What a transaction did."""

    succeeded: bool
    """True: every comparison held and the first branch ran."""
    revision: int
    ranges: tuple[tuple[KeyValue, ...], ...] = ()
    """What each `get` and `get_prefix` of the branch that ran has found, in order."""
    deleted: int = 0
    """Keys that the branch deleted."""

    @property
    def reads(self) -> tuple[KeyValue | None, ...]:
        """The first key that each `get` has found, in order."""
        return tuple(found[0] if found else None for found in self.ranges)


class Compare:
    """Comparisons of a transaction."""

    @staticmethod
    def absent(key: str) -> Any:
        """The key does not exist."""
        return KVService.txn_compare_version(key, 0)

    @staticmethod
    def exists(key: str) -> Any:
        """The key exists."""
        compare = KVService.txn_compare_version(key, 0)
        compare.result = type(compare).GREATER
        return compare

    @staticmethod
    def none_under(prefix: str) -> Any:
        """No key begins with this. (etcd compares every key of the range, and version 0 where there is none.)"""
        return KVService.txn_compare_version(prefix, 0, range_end=prefix_range_end(prefix))

    @staticmethod
    def mod_revision(key: str, revision: int) -> Any:
        """The key exists and was last written at this revision."""
        compare = KVService.txn_compare_version(key, 0)
        compare.target = type(compare).MOD
        compare.mod_revision = revision
        return compare

    @staticmethod
    def value(key: str, value: bytes | str) -> Any:
        """The key exists with this value."""
        return KVService.txn_compare_value(key, value)

    @staticmethod
    def lease(key: str, lease: int) -> Any:
        """The key exists and is attached to this lease. A missing key has lease 0, so `lease` must not be 0."""
        if lease == 0:
            raise ValueError("lease: 0 means no lease and would match a missing key")
        compare = KVService.txn_compare_version(key, 0)
        compare.target = type(compare).LEASE
        compare.lease = lease
        return compare


class Op:
    """Operations of a transaction."""

    @staticmethod
    def get(key: str) -> Any:
        """Read a key; its place in `TxnResult.reads` is that among the gets of its branch."""
        return KVService.txn_op_get(key)

    @staticmethod
    def get_prefix(prefix: str) -> Any:
        """Read every key that begins with this; its place in `TxnResult.ranges` is as that of a `get`."""
        return KVService.txn_op_get(prefix, range_end=prefix_range_end(prefix))

    @staticmethod
    def put(key: str, value: bytes | str, lease: int = 0) -> Any:
        """Write a key."""
        return KVService.txn_op_put(key, value, lease=lease)

    @staticmethod
    def delete(key: str) -> Any:
        """Delete a key; no error when it is not there."""
        return KVService.txn_op_delete(key)


class Etcd:
    """A connection to an etcd cluster. Belongs to one event loop; connects on first use.

    Every method raises `EtcdUnavailable` when etcd does not answer within `EtcdConfig.timeout` seconds, and its
    subclass `EtcdDenied` when etcd refuses.
    """

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._channel: grpc.aio.Channel | None = None
        self._services: dict[str, Any] = {}
        self._authenticating = asyncio.Lock()
        self._token: str | None = None
        self._closed = False

    # ---- keys

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it does not exist."""
        response = await self._call("get", lambda t: self._kv.get(key, timeout=t))
        return key_value(response.kvs[0]) if response.kvs else None

    async def list(self, prefix: str) -> Listing:
        """Every key under a prefix, and the revision at which that was so."""
        end = prefix_range_end(prefix)
        response = await self._call("list", lambda t: self._kv.get(prefix, range_end=end, timeout=t))
        items = {kv.key: kv for kv in map(key_value, response.kvs)}
        return Listing(items, response.header.revision)

    async def put(self, key: str, value: bytes | str, lease: int = 0) -> int:
        """Write a key, attached to a lease unless that is 0. Returns the revision."""
        return int(
            (
                await self._call("put", lambda t: self._kv.put(key, value, lease=lease, timeout=t))
            ).header.revision
        )

    async def delete(self, key: str) -> bool:
        """Delete a key. Returns whether this call found it."""
        response = await self._call("delete", lambda t: self._kv.delete(key, timeout=t))
        return int(response.deleted) > 0

    async def delete_prefix(self, prefix: str) -> int:
        """Delete every key under a prefix. Returns how many there were."""
        end = prefix_range_end(prefix)
        response = await self._call("delete", lambda t: self._kv.delete(prefix, range_end=end, timeout=t))
        return int(response.deleted)

    async def txn(
        self, compare: Sequence[Any], then: Sequence[Any], otherwise: Sequence[Any] = ()
    ) -> TxnResult:
        """One transaction: `then` when every comparison holds, else `otherwise`. See `Compare` and `Op`."""
        response = await self._call("txn", lambda t: self._kv.txn(compare, then, otherwise, timeout=t))
        ranges, deleted = [], 0
        for op in response.responses:
            kind = op.WhichOneof("response")
            if kind == "response_range":
                ranges.append(tuple(map(key_value, op.response_range.kvs)))
            elif kind == "response_delete_range":
                deleted += int(op.response_delete_range.deleted)
        return TxnResult(bool(response.succeeded), int(response.header.revision), tuple(ranges), deleted)

    async def compact(self, revision: int) -> None:
        """Forget the history before a revision."""
        await self._call("compact", lambda t: self._kv.compact(revision, timeout=t))

    # ---- leases

    async def grant(self, ttl: int) -> int:
        """A new lease that lives `ttl` seconds without a keepalive. Returns its id."""
        return int((await self._call("grant", lambda t: self._lease.grant(ttl, timeout=t))).ID)

    async def keepalive(self, lease: int) -> int:
        """Renew a lease once. Returns its time to live in seconds; 0: etcd does not know it any more."""

        async def once(timeout: float) -> int:
            stream = self._lease.keep_alive(lease)
            try:
                async for response in stream:
                    return max(0, int(response.TTL))
                return 0
            finally:
                stream.cancel()

        return await self._call("keepalive", once)

    async def revoke(self, lease: int) -> None:
        """End a lease; the keys attached to it go. No error when it has ended already."""
        with contextlib.suppress(EtcdLeaseGone):
            await self._call("revoke", lambda t: self._lease.revoke(lease, timeout=t))

    # ---- the server

    async def server_version(self) -> str:
        """Version of the member that answered, such as 3.4.23."""
        return str((await self._call("status", lambda t: self._maintenance.status(timeout=t))).version)

    async def raw_watch(self, prefix: str, start_revision: int) -> AsyncGenerator[Any, None]:
        """Watch responses of one stream, until it ends; deltaserve.etcd_watch knows how far they can be trusted."""
        self._connect()
        metadata = (("token", self._token),) if self._token else None
        stream = self._services["watch"].Watch(metadata=metadata)
        try:
            create = WatchCreateRequest(
                key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=start_revision
            )
            await stream.write(WatchRequest(create_request=create))
            async for response in stream:
                yield response
        finally:
            stream.cancel()

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self._closed

    async def close(self) -> None:
        """Close the connection; calls that run end with an error. Never raises."""
        self._closed = True
        channel, self._channel = self._channel, None
        self._services = {}
        if channel is not None:
            await channel.close(None)

    # ---- inside

    @property
    def _kv(self) -> KVService:
        return self._services["kv"]

    @property
    def _lease(self) -> LeaseService:
        return self._services["lease"]

    @property
    def _maintenance(self) -> MaintenanceService:
        return self._services["maintenance"]

    def _connect(self) -> None:
        if self._closed:
            raise EtcdUnavailable("etcd: this connection has been closed")
        if self._channel is not None:
            return
        self._channel = open_channel(self.config)
        self._services = {
            "kv": KVService(self._channel, max_attempts=1),
            "lease": LeaseService(self._channel, max_attempts=1),
            "maintenance": MaintenanceService(self._channel, max_attempts=1),
            "auth": AuthService(self._channel, max_attempts=1),
            "watch": WatchStub(self._channel),
        }

    async def _authenticate(self, stale: str | None, timeout: float) -> None:
        """Get a token unless another call has replaced the stale one meanwhile."""
        async with self._authenticating:
            if self._token != stale:
                return
            response = await self._services["auth"].authenticate(
                self.config.user, self.config.password, timeout=timeout
            )
            self._token = str(response.token)
            # Not the authentication itself: etcd refuses even that when it comes with an old token.
            for name, service in self._services.items():
                if name not in ("watch", "auth"):
                    service.set_token(self._token)

    async def _call(self, name: str, make: Callable[[float], Awaitable[T]]) -> T:
        self._connect()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.config.timeout
        patience = self.config.timeout / _ATTEMPTS_PER_CALL
        pause = _PAUSE
        renewed = False
        last: Exception
        while True:
            remaining = deadline - loop.time()
            attempt = min(patience, max(remaining, 0.01))
            used = self._token
            try:
                async with asyncio.timeout(attempt):
                    if self.config.user and self._token is None:
                        await self._authenticate(None, attempt)
                    return await make(attempt)
            except asyncio.CancelledError as error:
                # Closing the channel cancels its calls; that is no cancellation of the task that waits for them.
                task = asyncio.current_task()
                if not self._closed or (task is not None and task.cancelling()):
                    raise
                raise EtcdUnavailable(f"etcd {name}: this connection has been closed") from error
            except Exception as error:
                if self._closed:
                    raise EtcdUnavailable(f"etcd {name}: this connection has been closed") from error
                if _is_denied(error):
                    if not self.config.user or renewed or used is None:
                        raise EtcdDenied(self._denied(name, error)) from error
                    renewed = True
                    last = error
                    if await self._renew(used, attempt):
                        continue
                elif _has_code(error, grpc.StatusCode.NOT_FOUND):
                    raise EtcdLeaseGone(f"etcd {name}: {words(error)}") from error
                elif not _is_retried(error):
                    raise EtcdUnavailable(f"etcd {name}: {words(error)}") from error
                last = error
            remaining = deadline - loop.time()
            if remaining <= pause:
                raise EtcdUnavailable(
                    f"etcd {name}: no answer from {', '.join(self.config.endpoints)} within "
                    f"{self.config.timeout:g} s ({words(last)}); is it running and reachable?"
                ) from last
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2

    async def _renew(self, stale: str, timeout: float) -> bool:
        """Whether there is a new token; an etcd that cannot be reached is for the caller's retries."""
        try:
            async with asyncio.timeout(timeout):
                await self._authenticate(stale, timeout)
        except Exception as error:
            if _is_denied(error):
                raise EtcdDenied(self._denied("authenticate", error)) from error
            return False
        return True

    def _denied(self, name: str, error: Exception) -> str:
        who = f"user {self.config.user!r}" if self.config.user else "no user (etcd.user is empty)"
        return (
            f"etcd {name}: refused for {who}: {words(error)}; check etcd.user and etcd.password and its role"
        )


def check_version(version: str) -> None:
    """Raises EtcdVersionRefused unless the version is 3.4.23 or later of 3.4, or at least 3.5.3."""
    try:
        numbers = tuple(int(part) for part in version.split("-")[0].split(".")[:3])
    except ValueError:
        numbers = ()
    remedy = "use etcd 3.4.23 or later of 3.4, or at least 3.5.3"
    if len(numbers) != 3:
        raise EtcdVersionRefused(f"etcd: version {version!r} cannot be read; {remedy}")
    if (3, 5, 0) <= numbers < (3, 5, 3):
        raise EtcdVersionRefused(f"etcd {version}: 3.5.0 to 3.5.2 can lose data after a crash; {remedy}")
    if numbers < (3, 4, 23):
        raise EtcdVersionRefused(f"etcd {version} is too old; {remedy}")


def key_value(kv: Any) -> KeyValue:
    """From etcd's own message."""
    return KeyValue(kv.key.decode(), kv.value, kv.mod_revision, kv.create_revision, kv.lease)


def _is_denied(error: Exception) -> bool:
    if isinstance(error, (EtcdUnauthenticatedError, EtcdPermissionDeniedError)):
        return True
    if not isinstance(error, grpc.aio.AioRpcError):
        return False
    # etcd answers a missing or wrong name or password, or one too many, with codes that mean other things too.
    words = (error.details() or "").lower()
    return error.code() in _DENIED or any(phrase in words for phrase in _DENIED_WORDS)


def _is_retried(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in _RETRIED
    return isinstance(error, (EtcdError, TimeoutError, OSError))


def _has_code(error: Exception, code: grpc.StatusCode) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() == code


def words(error: Exception) -> str:
    """An error in one line; gRPC's own text takes many."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".strip()
    return str(error) or type(error).__name__
