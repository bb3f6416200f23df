# SPDX-License-Identifier: Apache-2.0
"""The contract of membership over the double and over a real etcd, and the etcd adapter's faults."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import (
    Compare,
    Etcd,
    EtcdDenied,
    EtcdLeaseGone,
    EtcdMembership,
    EtcdUnavailable,
    EtcdVersionRefused,
    Op,
    check_version,
    watch,
)
from deltaserve.membership import Member, Membership, View, member_key
from deltaserve.pem import PemUnusable
from tests.doubles.membership import MembershipDouble, Register
from tests.support import services
from tests.support.patience import HUNG
from tests.support.pki import make_certificates

Make = Callable[[], Membership]


def member(worker_id: str = "prefill-1", **changes: object) -> Member:
    values: dict[str, object] = {"address": "127.0.0.1:1", "model_digest": "ab", "geometry": "cd", "lease": 0}
    return Member(worker_id, worker_id.split("-")[0], **{**values, **changes})  # type: ignore[arg-type]


async def wait_view(
    views: AsyncIterator[View], condition: Callable[[View], bool], seconds: float = 30
) -> View:
    async with asyncio.timeout(seconds):
        async for view in views:
            if condition(view):
                return view
    raise AssertionError("the watch ended")


async def wait_heard(heard: list[int]) -> None:
    """Others may see a new lease a moment before its owner hears of it."""
    async with asyncio.timeout(30):
        while not heard:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(params=["double", "etcd"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Makes memberships of one cluster."""
    made: list[Membership] = []
    if request.param == "double":
        register = Register()
        build: Make = lambda: MembershipDouble(register)  # noqa: E731
    else:
        config: EtcdConfig = request.getfixturevalue("etcd_config")
        build = lambda: EtcdMembership(config)  # noqa: E731

    def make_one() -> Membership:
        made.append(build())
        return made[-1]

    yield make_one
    for one in made:
        await one.close()


# ---- the contract


async def test_join_is_seen_with_its_lease_and_leave_ends_it(make: Make) -> None:
    worker, router = make(), make()
    joined = await worker.join(member())
    assert joined.lease > 0
    async with aclosing(router.watch()) as views:
        view = await wait_view(views, lambda v: bool(v.members))
        assert view == View((joined,), connected=True)
        await worker.leave()
        assert (await wait_view(views, lambda v: not v.members)).connected


async def test_update_marks_draining_and_keeps_the_lease(make: Make) -> None:
    worker, router = make(), make()
    joined = await worker.join(member())
    async with aclosing(router.watch()) as views:
        await wait_view(views, lambda v: v.of("prefill") == [joined])
        await worker.update(replace(joined, draining=True, lease=12345))
        view = await wait_view(views, lambda v: v.members[0].draining)
        assert view.of("prefill") == []
        assert view.members[0].lease == joined.lease


async def test_members_of_both_roles_with_different_leases(make: Make) -> None:
    one, two, router = make(), make(), make()
    first, second = await one.join(member()), await two.join(member("decode-1"))
    assert first.lease != second.lease
    async with aclosing(router.watch()) as views:
        view = await wait_view(views, lambda v: len(v.members) == 2)
    assert view.of("prefill") == [first]
    assert view.of("decode") == [second]


async def test_wrong_use_is_refused(make: Make) -> None:
    worker = make()
    with pytest.raises(ValueError, match="worker_id"):
        await worker.join(member("prefill-1/../x"))
    await worker.join(member())
    with pytest.raises(ValueError, match="joined already"):
        await worker.join(member("prefill-2"))
    with pytest.raises(ValueError, match="has not joined here"):
        await worker.update(member("prefill-2"))


async def test_leave_and_close_without_join_do_nothing(make: Make) -> None:
    worker = make()
    await worker.leave()
    await worker.close()


def test_member_key_needs_a_role() -> None:
    assert member_key("decode-a1") == "members/decode/decode-a1"
    for bad in ("decode", "decode-", "router-1", "-1", ""):
        with pytest.raises(ValueError, match="worker_id"):
            member_key(bad)


# ---- etcd: leases and absence


async def test_a_dead_worker_vanishes_with_its_lease(etcd_config: EtcdConfig) -> None:
    worker, router = EtcdMembership(etcd_config), EtcdMembership(etcd_config)
    await worker.join(member())
    assert worker._keeper is not None
    worker._keeper.cancel()  # dies: renews no more, revokes nothing
    began = time.monotonic()
    async with aclosing(router.watch()) as views:
        await wait_view(views, lambda v: bool(v.members))
        await wait_view(views, lambda v: not v.members)
    assert 0.5 < time.monotonic() - began < HUNG
    assert worker.lease == 0
    await router.close()
    await worker.close()


async def test_a_lost_lease_is_replaced_and_told(etcd_config: EtcdConfig) -> None:
    heard: list[int] = []
    worker, router = EtcdMembership(etcd_config, on_lease=heard.append), EtcdMembership(etcd_config)
    joined = await worker.join(member())
    etcd = Etcd(etcd_config)
    await etcd.revoke(joined.lease)
    async with aclosing(router.watch()) as views:
        view = await wait_view(views, lambda v: bool(v.members) and v.members[0].lease != joined.lease)
    await wait_heard(heard)
    assert heard == [view.members[0].lease] == [worker.lease]
    for one in (worker, router, etcd):
        await one.close()


@pytest.mark.cluster
async def test_etcd_away_keeps_the_last_view_and_heals(own_etcd: services.EtcdService) -> None:
    config = own_etcd.config("/c", timeout=1.0)
    heard: list[int] = []
    worker, router = EtcdMembership(config, on_lease=heard.append), EtcdMembership(config)
    joined = await worker.join(member())
    seen: list[View] = []
    async with aclosing(router.watch()) as views:
        await wait_view(views, lambda v: bool(v.members))
        own_etcd.service.hang()
        away = await wait_view(views, lambda v: not v.connected)
        assert away.members == (joined,)
        with pytest.raises(ConnectionError):
            await worker.update(replace(joined, draining=True))
        async with asyncio.timeout(HUNG):
            # A lease that cannot have been renewed must not be relied on.
            while worker.lease:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        own_etcd.service.resume()
        async with asyncio.timeout(30):
            async for view in views:
                seen.append(view)
                if view.connected and view.members and view.members[0].lease != joined.lease:
                    break
    assert all(view.members for view in seen), "a living worker must never be missing from the view"
    await wait_heard(heard)
    assert heard == [seen[-1].members[0].lease]
    assert seen[-1].members[0].draining, "an update made while etcd was away must arrive"
    await worker.close()
    await router.close()


@pytest.mark.cluster
async def test_a_worker_that_died_while_etcd_was_away_goes_after_the_hold(
    own_etcd: services.EtcdService,
) -> None:
    config = own_etcd.config("/c", timeout=1.0)
    worker, router = EtcdMembership(config), EtcdMembership(config)
    await worker.join(member())
    async with aclosing(router.watch()) as views:
        await wait_view(views, lambda v: bool(v.members))
        assert worker._keeper is not None
        worker._keeper.cancel()
        own_etcd.service.hang()
        await wait_view(views, lambda v: not v.connected)
        own_etcd.service.resume()
        await wait_view(views, lambda v: v.connected and not v.members)
    await worker.close()
    await router.close()


async def test_restarted_etcd_is_used_again(own_etcd: services.EtcdService) -> None:
    etcd = Etcd(own_etcd.config("/c", timeout=1.0))
    await etcd.put("/c/a", "1")
    own_etcd.service.kill()
    began = time.monotonic()
    with pytest.raises(EtcdUnavailable, match="is it running"):
        await etcd.get("/c/a")
    assert time.monotonic() - began < HUNG
    own_etcd.service.start()
    found = await etcd.get("/c/a")
    assert found is not None
    assert found.value == b"1"
    await etcd.close()


@pytest.mark.cluster
async def test_a_hung_etcd_costs_one_deadline(own_etcd: services.EtcdService) -> None:
    etcd = Etcd(own_etcd.config("/c", timeout=0.6))
    await etcd.put("/c/a", "1")
    own_etcd.service.hang()
    for call in (etcd.get("/c/a"), etcd.list("/c"), etcd.txn([], [Op.put("/c/a", "2")]), etcd.grant(5)):
        began = time.monotonic()
        with pytest.raises(EtcdUnavailable):
            await call
        assert 0.4 < time.monotonic() - began < HUNG
    await etcd.close()


async def test_nothing_listens() -> None:
    config = EtcdConfig(endpoints=[f"127.0.0.1:{services.free_port()}"], timeout=0.5)
    with pytest.raises(EtcdUnavailable, match="no answer"):
        await EtcdMembership(config).join(member())


async def test_a_dead_endpoint_beside_a_living_one(etcd_server: services.EtcdService) -> None:
    dead = f"127.0.0.1:{services.free_port()}"
    etcd = Etcd(etcd_server.config("/two", endpoints=[dead, etcd_server.endpoint]))
    for number in range(10):
        await etcd.put("/two/a", str(number))
    await etcd.close()


# ---- etcd: the adapter


async def test_keys_transactions_and_leases(etcd_config: EtcdConfig) -> None:
    etcd, p = Etcd(etcd_config), etcd_config.prefix
    revision = await etcd.put(f"{p}/a", "1")
    found = await etcd.get(f"{p}/a")
    assert found is not None
    assert (found.value, found.mod_revision, found.lease) == (b"1", revision, 0)
    assert await etcd.get(f"{p}/b") is None
    assert list((await etcd.list(f"{p}/")).items) == [f"{p}/a"]
    stale = await etcd.txn(
        [Compare.mod_revision(f"{p}/a", revision - 1)],
        [Op.put(f"{p}/a", "2")],
        [Op.get(f"{p}/a"), Op.get(f"{p}/b")],
    )
    assert not stale.succeeded
    assert stale.reads == (found, None)
    assert (await etcd.txn([Compare.mod_revision(f"{p}/a", revision)], [Op.put(f"{p}/a", "2")])).succeeded
    lease = await etcd.grant(5)
    assert 0 < await etcd.keepalive(lease) <= 5
    await etcd.put(f"{p}/l", "x", lease=lease)
    assert (await etcd.txn([Compare.lease(f"{p}/l", lease)], [])).succeeded
    assert not (await etcd.txn([Compare.lease(f"{p}/a", lease)], [])).succeeded
    await etcd.revoke(lease)
    await etcd.revoke(lease)
    assert await etcd.get(f"{p}/l") is None
    assert await etcd.keepalive(lease) == 0
    with pytest.raises(EtcdLeaseGone):
        await etcd.put(f"{p}/l", "x", lease=lease)
    assert await etcd.delete(f"{p}/a")
    assert not await etcd.delete(f"{p}/a")
    await etcd.put(f"{p}/c", "")
    assert await etcd.delete_prefix(f"{p}/") == 1
    with pytest.raises(ValueError, match="lease"):
        Compare.lease(f"{p}/a", 0)
    await etcd.close()
    with pytest.raises(EtcdUnavailable, match="closed"):
        await etcd.get(f"{p}/a")


async def test_a_call_that_runs_while_the_connection_is_closed_is_no_cancellation(
    own_etcd: services.EtcdService,
) -> None:
    etcd = Etcd(own_etcd.config("/c", timeout=5.0))
    await etcd.get("/c/a")
    own_etcd.service.hang()
    call = asyncio.create_task(etcd.get("/c/a"))
    await asyncio.sleep(0.2)
    await etcd.close()
    with pytest.raises(EtcdUnavailable, match="closed"):
        await call


async def test_watch_survives_compaction(etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    etcd, p = Etcd(etcd_config), f"{etcd_config.prefix}/w/"
    raw = etcd.raw_watch
    starts: list[int] = []

    def from_the_beginning(prefix: str, start_revision: int) -> object:
        # The first stream asks for a revision that has been compacted; etcd cancels it.
        starts.append(start_revision)
        return raw(prefix, 1 if len(starts) == 1 else start_revision)

    revision = await etcd.put(f"{p}a", "1")
    await etcd.compact(revision)
    monkeypatch.setattr(etcd, "raw_watch", from_the_beginning)
    async with aclosing(watch(etcd, p, relist=300.0)) as states, asyncio.timeout(30):
        assert list((await anext(states)).items) == [f"{p}a"]
        asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(etcd.put(f"{p}b", "2")))
        assert list((await anext(states)).items) == [f"{p}a", f"{p}b"]
    assert len(starts) > 1
    await etcd.close()


async def test_watch_finds_what_a_stream_skips(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd, p = Etcd(etcd_config), f"{etcd_config.prefix}/w/"
    raw = etcd.raw_watch
    deaf = True

    async def skipping(prefix: str, start_revision: int) -> AsyncIterator[object]:
        async for response in raw(prefix, start_revision):
            if not (deaf and response.events):
                yield response

    monkeypatch.setattr(etcd, "raw_watch", skipping)
    async with aclosing(watch(etcd, p, relist=0.4)) as states, asyncio.timeout(30):
        assert (await anext(states)).items == {}
        await etcd.put(f"{p}a", "1")
        began = time.monotonic()
        assert list((await anext(states)).items) == [f"{p}a"]
        assert time.monotonic() - began < HUNG
        deaf = False
        await etcd.delete(f"{p}a")
        assert (await anext(states)).items == {}
    await etcd.close()


async def test_watch_is_quick_without_relisting(etcd_config: EtcdConfig) -> None:
    """Negative control of the test above: with a sound stream nothing waits for the next listing."""
    etcd, p = Etcd(etcd_config), f"{etcd_config.prefix}/w/"
    async with aclosing(watch(etcd, p, relist=300.0)) as states, asyncio.timeout(30):
        await anext(states)
        for number in range(20):
            await etcd.put(f"{p}a", str(number))
            state = await anext(states)
            assert state.items[f"{p}a"].value == str(number).encode()
    await etcd.close()


async def test_a_bad_record_is_left_out(etcd_config: EtcdConfig) -> None:
    etcd, worker = Etcd(etcd_config), EtcdMembership(etcd_config)
    await etcd.put(f"{etcd_config.prefix}/members/prefill/prefill-bad", '{"worker_id": "prefill-bad"}')
    await etcd.put(f"{etcd_config.prefix}/members/prefill/prefill-worse", "not json")
    joined = await worker.join(member())
    async with aclosing(worker.watch()) as views:
        assert (await wait_view(views, lambda v: bool(v.members))).members == (joined,)
    await worker.close()
    await etcd.close()


@pytest.mark.parametrize("version", ["3.4.23", "3.4.30", "3.5.3", "3.5.17", "3.6.0", "3.6.1-rc.0"])
def test_versions_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.4.22", "3.3.27", "2.3.8", "", "latest"])
def test_versions_refused(version: str) -> None:
    with pytest.raises(EtcdVersionRefused, match=r"3\.4\.23"):
        check_version(version)


async def test_join_refuses_a_version_that_loses_data(
    etcd_config: EtcdConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = EtcdMembership(etcd_config)

    async def version() -> str:
        return "3.5.1"

    monkeypatch.setattr(worker._etcd, "server_version", version)
    with pytest.raises(EtcdVersionRefused, match="lose data"):
        await worker.join(member())
    await worker.close()


def test_configurations_that_cannot_work(tmp_path: Path) -> None:
    for endpoints in ([], ["nohost"], ["h:port"], [":1"], ["h:1", "http://h:2"]):
        with pytest.raises(ValueError, match=r"(?s)endpoints.*host:port"):
            EtcdConfig(endpoints=endpoints)
    with pytest.raises(ValueError, match=r"need ca_cert"):
        EtcdConfig(client_cert=tmp_path / "c.pem", client_key=tmp_path / "c.key")
    with pytest.raises(ValueError, match=r"client_key is missing"):
        EtcdConfig(ca_cert=tmp_path / "ca.pem", client_cert=tmp_path / "c.pem")
    with pytest.raises(PemUnusable, match=r"etcd\.ca_cert.*cannot be read"):
        Etcd(EtcdConfig(ca_cert=tmp_path / "none.pem"))._connect()


# ---- etcd: TLS and authentication


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, server.pem/.key for 127.0.0.1, client.pem/.key."""
    return make_certificates(tmp_path_factory.mktemp("pki"), "client")


def tls_flags(folder: Path) -> list[str]:
    return [f"--cert-file={folder / 'server.pem'}", f"--key-file={folder / 'server.key'}"]


async def test_tls_and_a_foreign_authority(certificates: Path, tmp_path: Path) -> None:
    with services.etcd(tls_flags(certificates), scheme="https") as server:
        etcd = Etcd(server.config("/t", ca_cert=certificates / "ca.pem"))
        await etcd.put("/t/a", "1")
        await etcd.close()
        plain = Etcd(server.config("/t", timeout=0.5))
        with pytest.raises(EtcdUnavailable):
            await plain.get("/t/a")
        await plain.close()
        # The server's certificate is no authority that has signed itself.
        foreign = Etcd(server.config("/t", timeout=0.5, ca_cert=certificates / "client.pem"))
        with pytest.raises(EtcdUnavailable):
            await foreign.get("/t/a")
        await foreign.close()


async def test_authentication(own_etcd: services.EtcdService) -> None:
    from etcd3aio import Etcd3Client

    async with Etcd3Client([own_etcd.endpoint]) as root:
        assert root.auth is not None
        await root.auth.user_add("root", "secret")
        await root.auth.role_add("root")
        await root.auth.user_grant_role("root", "root")
        await root.auth.auth_enable()
    etcd = Etcd(own_etcd.config("/t", user="root", password="secret"))
    await etcd.put("/t/a", "1")
    for changes in ({}, {"user": "root", "password": "wrong"}, {"user": "nobody", "password": "x"}):
        denied = Etcd(own_etcd.config("/t", **changes))
        with pytest.raises(EtcdDenied, match=r"etcd\.user"):
            await denied.put("/t/a", "2")
        await denied.close()
    # A restarted etcd knows no token; the adapter gets a new one, and its watch goes on.
    async with aclosing(watch(etcd, "/t/", relist=1.0)) as states:
        await anext(states)
        own_etcd.service.kill()
        own_etcd.service.start()
        await etcd.put("/t/b", "3")
        async with asyncio.timeout(30):
            while "/t/b" not in (await anext(states)).items:
                pass
    await etcd.close()
