# SPDX-License-Identifier: Apache-2.0
"""A cluster's ledger and register for tests of the contract: once in memory, once over a real etcd.

A test module takes the fixture with `from tests.support.ledger_world import world  # noqa: F401`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from deltaserve.config import EtcdConfig
from deltaserve.etcd import Etcd, EtcdMembership
from deltaserve.membership import Member, Membership, member_key
from statestore.boundary import Epoch
from statestore.etcd_ledger import EtcdLedger
from statestore.ledger import Ledger
from tests.doubles.ledger import LedgerDouble
from tests.doubles.membership import MembershipDouble, Register
from tests.support.records import MODEL

_counter = count(1)


def member(worker_id: str) -> Member:
    return Member(worker_id, worker_id.split("-")[0], "127.0.0.1:1", MODEL, "ab", 0)  # type: ignore[arg-type]


@dataclass
class World:
    """A cluster: its ledger as two processes see it, and its register."""

    ledger: Ledger
    other: Ledger
    membership: Callable[[], Membership]
    expire: Callable[[str], Awaitable[None]]

    async def owner(self, worker_id: str = "prefill-1") -> Epoch:
        """A member, and an epoch under its lease."""
        joined = await self.membership().join(member(worker_id))
        return Epoch(joined.lease, next(_counter))


@pytest.fixture(params=["double", "etcd"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    closing: list[Any] = []
    if request.param == "double":
        register = Register()
        one = LedgerDouble(register)
        two = LedgerDouble(register, one.records)

        async def expire(worker_id: str) -> None:
            await register.expire(worker_id)

        def membership() -> Membership:
            return MembershipDouble(register)

        ledgers: tuple[Ledger, Ledger] = (one, two)
    else:
        config: EtcdConfig = request.getfixturevalue("etcd_config")
        etcd = Etcd(config)
        closing.append(etcd)
        ledgers = (EtcdLedger(config), EtcdLedger(config))

        async def expire(worker_id: str) -> None:
            # What is left when a lease ends: no key.
            for joined in closing:
                if (
                    isinstance(joined, EtcdMembership)
                    and joined._member
                    and joined._member.worker_id == worker_id
                ):
                    assert joined._keeper is not None
                    joined._keeper.cancel()
            await etcd.delete(f"{config.prefix}/{member_key(worker_id)}")

        def membership() -> Membership:
            closing.append(EtcdMembership(config))
            return closing[-1]  # type: ignore[no-any-return]

    yield World(*ledgers, membership, expire)
    for one_of in (*ledgers, *reversed(closing)):
        await one_of.close()
