# SPDX-License-Identifier: Apache-2.0
"""Ask a worker to drain, and wait until it has: the asking side of docs/drain.md.

The order is a key in etcd under a lease of the asker's own, so that nothing of it stays for longer than that:

    PREFIX/drain/<worker id>    JSON of `membership.DrainOrder`; the worker writes into it that it is done
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from deltaserve.config import EtcdConfig
from deltaserve.etcd_channel import EtcdUnavailable
from deltaserve.etcd_client import Compare, Etcd, Op
from deltaserve.membership import DrainOrder, Member, drain_key, member_key

ORDER_TTL = 15
"""Seconds that an order outlives a command that was killed."""
LOOK_SECONDS = 0.2


class DrainFailed(RuntimeError):
    """The worker has not drained; the message says why, and what to do."""


@dataclass(frozen=True)
class Drained:
    """A worker that has gone in order."""

    worker_id: str
    moved: int
    """Requests and boundaries that it still held at the end, and that routers moved elsewhere."""
    seconds: float
    """What it took."""


async def drain(
    config: EtcdConfig, worker: str, seconds: float | None = None, wait: float = 600.0
) -> Drained:
    """Drain one worker; returns when it has left the register.

    `worker`: its id, an unambiguous beginning of it, or its address. `seconds`: how long it may take to finish what it
    holds; None: its own limit. `wait`: how long to wait for all of it.

    Raises DrainFailed when there is no such worker, when it went without finishing, or when `wait` is over, and
    EtcdUnavailable (a ConnectionError) when etcd cannot be reached.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    etcd = Etcd(config)
    keeper: asyncio.Task[None] | None = None
    lease = 0
    prefix = config.prefix.rstrip("/")
    try:
        member = find(await members(etcd, prefix), worker)
        lease = await etcd.grant(ORDER_TTL)
        keeper = asyncio.create_task(_keep(etcd, lease))
        order = f"{prefix}/{drain_key(member.worker_id)}"
        value = DrainOrder(seconds).to_json()
        # An order that is there already is waited for with its own limits.
        await etcd.txn([Compare.absent(order)], [Op.put(order, value, lease=lease)])
        async with asyncio.timeout(wait):
            moved = await _until_gone(
                etcd, f"{prefix}/{member_key(member.worker_id)}", order, config.lease_ttl
            )
        keeper.cancel()
        lease = 0  # the answer stays for as long as the lease does: another command may wait for it as well
    except TimeoutError as error:
        raise DrainFailed(
            f"{worker}: still there after {wait:.0f} s; a worker that hangs must be killed, its requests then go on "
            "elsewhere"
        ) from error
    finally:
        if keeper is not None:
            keeper.cancel()
        if lease:
            with contextlib.suppress(EtcdUnavailable):
                await etcd.revoke(lease)
        await etcd.close()
    return Drained(member.worker_id, moved, clock() - began)


async def members(etcd: Etcd, prefix: str) -> list[Member]:
    """Who is registered under the cluster's prefix. Raises EtcdUnavailable."""
    found = []
    for kv in (await etcd.list(f"{prefix}/members/")).items.values():
        with contextlib.suppress(ValueError):  # of another version
            found.append(Member.from_json(kv.value))
    return found


def find(registered: Sequence[Member], worker: str) -> Member:
    """The member of that id, beginning of an id, or address. Raises DrainFailed unless there is exactly one."""
    exact = [m for m in registered if worker in (m.worker_id, m.address)]
    matches = exact or [m for m in registered if worker and m.worker_id.startswith(worker)]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(sorted(m.worker_id for m in matches or registered)) or "none"
    if matches:
        raise DrainFailed(f"{worker!r} may be any of {known}; give more of the id")
    raise DrainFailed(f"no worker {worker!r} is registered; there are: {known}")


async def _until_gone(etcd: Etcd, member: str, order: str, lease_ttl: float) -> int:
    """Wait until the member's record has gone; returns what was moved. Raises DrainFailed."""
    clock = asyncio.get_running_loop().time
    done: DrainOrder | None = None
    missing_since: float | None = None
    while True:
        record, answer = (await etcd.txn([], [Op.get(member), Op.get(order)])).reads
        if answer is not None:
            found = DrainOrder.from_json(answer.value)
            done = found if found.done else done
        if record is not None:
            missing_since = None
        elif done is not None:
            return done.moved
        else:
            # A lease that was lost for a moment comes back; a process that died does not.
            missing_since = clock() if missing_since is None else missing_since
            if clock() - missing_since > lease_ttl:
                raise DrainFailed(
                    f"{member.rpartition('/')[2]} went without finishing: it died, or was killed. Routers resume its "
                    "requests elsewhere"
                )
        await asyncio.sleep(LOOK_SECONDS)


async def _keep(etcd: Etcd, lease: int) -> None:
    while True:
        await asyncio.sleep(ORDER_TTL / 3)
        with contextlib.suppress(EtcdUnavailable):
            await etcd.keepalive(lease)
