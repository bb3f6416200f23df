# SPDX-License-Identifier: Apache-2.0
"""The ledger over a guarded etcd (mutual TLS, user and password) and over one whose members die.

Real etcd processes. What the ledger promises elsewhere must hold here: one commit, fenced, seen by everybody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Etcd, EtcdDenied, EtcdMembership, EtcdUnavailable, watch
from deltaserve.membership import Member
from statestore.boundary import BoundaryRecord, Epoch
from statestore.etcd_ledger import EtcdLedger
from tests.support import services
from tests.support.patience import HUNG
from tests.support.pki import make_certificates
from tests.support.records import MODEL, committed, pending

PREFIX = "/deltaserve/test"
_counter = count(1)


@asynccontextmanager
async def owner(config: EtcdConfig, worker_id: str = "prefill-1") -> AsyncIterator[int]:
    """The lease of a member that renews it."""
    membership = EtcdMembership(config)
    try:
        joined = await membership.join(Member(worker_id, "prefill", "127.0.0.1:1", MODEL, "ab", 0))
        yield joined.lease
    finally:
        await membership.close()


async def publish(ledger: EtcdLedger, lease: int) -> BoundaryRecord:
    """Open and commit a record of two ranks."""
    epoch = Epoch(lease, next(_counter))
    await ledger.open(pending(epoch, ranks=2))
    record = committed(epoch, ranks=2)
    await ledger.commit([record])
    return record


async def serves(config: EtcdConfig) -> None:
    """Membership, both writes, a reader, a listing and a release work with this configuration."""
    ledger, reader = EtcdLedger(config), EtcdLedger(config)
    try:
        async with owner(config) as lease:
            record = await publish(ledger, lease)
            assert await reader.get_committed(record.id) == record
            assert await reader.list() == [record]
            assert await ledger.release(record)
            assert await reader.list() == []
    finally:
        await ledger.close()
        await reader.close()


async def refused(config: EtcdConfig, error: type[Exception]) -> None:
    """Not a single call gets through."""
    ledger = EtcdLedger(config)
    try:
        with pytest.raises(error):
            await ledger.list()
    finally:
        await ledger.close()


# ---- mutual TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("pki"), "worker")


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[services.EtcdService]:
    """An etcd that talks to holders of a certificate only."""
    flags = [
        f"--cert-file={certificates / 'server.pem'}",
        f"--key-file={certificates / 'server.key'}",
        "--client-cert-auth",
        f"--trusted-ca-file={certificates / 'ca.pem'}",
    ]
    client = (certificates / "worker.pem", certificates / "worker.key")
    with services.etcd(flags, "https", client) as server:
        yield server


def mutual(certificates: Path, name: str = "worker") -> dict[str, object]:
    return {
        "ca_cert": certificates / "ca.pem",
        "client_cert": certificates / f"{name}.pem",
        "client_key": certificates / f"{name}.key",
    }


async def test_mutual_tls(guarded: services.EtcdService, certificates: Path) -> None:
    await serves(guarded.config(PREFIX, **mutual(certificates)))


async def test_mutual_tls_refuses_who_has_no_certificate_of_the_authority(
    guarded: services.EtcdService, certificates: Path, tmp_path: Path
) -> None:
    await refused(guarded.config(PREFIX, timeout=1.0, ca_cert=certificates / "ca.pem"), EtcdUnavailable)
    stranger = make_certificates(tmp_path, "worker")
    values = {**mutual(stranger), "ca_cert": certificates / "ca.pem"}
    await refused(guarded.config(PREFIX, timeout=1.0, **values), EtcdUnavailable)


async def test_mutual_tls_with_a_dead_endpoint_first(
    guarded: services.EtcdService, certificates: Path
) -> None:
    dead = f"127.0.0.1:{services.free_port()}"
    await serves(guarded.config(PREFIX, endpoints=[dead, guarded.endpoint], **mutual(certificates)))


# ---- user and password


@pytest.fixture
async def locked(own_etcd: services.EtcdService) -> services.EtcdService:
    """An etcd that knows root, and `worker`, who may read and write below PREFIX and nowhere else."""
    from etcd3aio import Etcd3Client
    from etcd3aio.auth import PermissionType

    async with Etcd3Client([own_etcd.endpoint]) as root:
        assert root.auth is not None
        for user in ("root", "worker"):
            await root.auth.user_add(user, f"secret of {user}")
            await root.auth.role_add(user)
            await root.auth.user_grant_role(user, user)
        end = PREFIX[:-1] + chr(ord(PREFIX[-1]) + 1)
        await root.auth.role_grant_permission("worker", PREFIX, end, perm_type=PermissionType.READWRITE)
        await root.auth.auth_enable()
    return own_etcd


WORKER: dict[str, object] = {"user": "worker", "password": "secret of worker"}


async def test_a_user_that_may_use_the_prefix_only(locked: services.EtcdService) -> None:
    await serves(locked.config(PREFIX, **WORKER))
    await refused(locked.config("/elsewhere", **WORKER), EtcdDenied)


@pytest.mark.parametrize(
    "changes", [{}, {"user": "worker", "password": "wrong"}, {"user": "x", "password": "y"}]
)
async def test_strangers_are_refused_at_once(
    locked: services.EtcdService, changes: dict[str, object]
) -> None:
    began = time.monotonic()
    await refused(locked.config(PREFIX, **changes), EtcdDenied)
    assert time.monotonic() - began < HUNG


async def test_tokens_that_a_restart_has_made_void(locked: services.EtcdService) -> None:
    """Between open and commit etcd starts again: the commit gets a new token, and happens once."""
    config = locked.config(PREFIX, lease_ttl=10, timeout=5.0, **WORKER)
    ledger = EtcdLedger(config)
    async with owner(config) as lease:
        epoch = Epoch(lease, next(_counter))
        await ledger.open(pending(epoch, ranks=2))
        locked.service.kill()
        await asyncio.to_thread(locked.service.start)
        await ledger.commit([committed(epoch, ranks=2)])
        assert await ledger.list() == [committed(epoch, ranks=2)]
    await ledger.close()


# ---- several members


@pytest.fixture(scope="module")
def members() -> Iterator[list[services.EtcdService]]:
    with services.etcd_cluster() as three:
        yield three


def of_all(members: list[services.EtcdService], *more: str, **changes: Any) -> EtcdConfig:
    endpoints = [*more, *(member.endpoint for member in members)]
    return EtcdConfig(
        endpoints=endpoints, prefix=f"{PREFIX}{next(_counter)}", timeout=8.0, lease_ttl=10, **changes
    )


async def leader(members: list[services.EtcdService]) -> services.EtcdService:
    """The member that leads, by its own word."""
    from etcd3aio import Etcd3Client

    for member in members:
        async with Etcd3Client([member.endpoint]) as client:
            assert client.maintenance is not None
            status = await client.maintenance.status()
            if status.leader == status.header.member_id:
                return member
    raise AssertionError("nobody leads")


async def test_a_dead_endpoint_among_living_ones(members: list[services.EtcdService]) -> None:
    await serves(of_all(members, f"127.0.0.1:{services.free_port()}"))


async def test_the_leader_dies_in_the_middle(members: list[services.EtcdService]) -> None:
    """Sixty publications, the leader killed among them: each is committed once, and the lease holds."""
    config = of_all(members)
    ledger, reader = EtcdLedger(config), EtcdLedger(config)
    victim = await leader(members)
    only = EtcdLedger(config.model_copy(update={"endpoints": [victim.endpoint], "timeout": 0.5}))
    done: list[BoundaryRecord] = []
    try:
        async with owner(config) as lease:
            for number in range(60):
                if number == 20:
                    victim.service.kill()
                    with pytest.raises(EtcdUnavailable):
                        await only.list()  # the control: who knows one endpoint is alone now
                if number == 40:
                    await asyncio.to_thread(victim.service.start)
                done.append(await publish(ledger, lease))
            listed = await reader.list()
            assert sorted(record.id for record in listed) == sorted(record.id for record in done)
            assert all(record.state == "committed" for record in listed)
    finally:
        for each in (ledger, reader, only):
            await each.close()
        if victim.service.process is None:
            victim.service.start()


async def test_a_watch_outlives_its_member_and_a_compaction(members: list[services.EtcdService]) -> None:
    """The member that serves the stream dies, and what the stream would ask for is compacted before it is back."""
    config = of_all(members)
    etcd, writer = Etcd(config), Etcd(config)
    seen: dict[str, Any] = {}

    async def follow() -> None:
        async with aclosing(watch(etcd, f"{config.prefix}/w/", relist=30.0)) as states:
            async for state in states:
                seen.clear()
                seen.update(state.items)

    async def shows(key: str) -> None:
        async with asyncio.timeout(30):
            while f"{config.prefix}/w/{key}" not in seen:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    task = asyncio.create_task(follow())
    try:
        for number, member in enumerate(members):
            await writer.put(f"{config.prefix}/w/before{number}", "1")
            await shows(f"before{number}")
            member.service.kill()
            for other in range(5):
                revision = await writer.put(f"{config.prefix}/other", str(other))
            await writer.compact(revision)
            await writer.put(f"{config.prefix}/w/after{number}", "1")
            await shows(f"after{number}")
            await asyncio.to_thread(member.service.start)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await etcd.close()
        await writer.close()


async def test_no_majority_is_an_error_in_time_and_heals(members: list[services.EtcdService]) -> None:
    config = of_all(members)
    ledger = EtcdLedger(config.model_copy(update={"timeout": 1.0}))
    try:
        async with owner(config) as lease:
            await publish(ledger, lease)
            for member in members[1:]:
                member.service.hang()
            began = time.monotonic()
            with pytest.raises(EtcdUnavailable):
                await publish(ledger, lease)
            assert time.monotonic() - began < HUNG
            for member in members[1:]:
                member.service.resume()
            async with asyncio.timeout(30):
                while True:
                    try:
                        await publish(ledger, lease)
                        break
                    except EtcdUnavailable:
                        await asyncio.sleep(0.1)
    finally:
        await ledger.close()
