# SPDX-License-Identifier: Apache-2.0
"""A cluster in one process over a real Mooncake; and, as a program, what happens to it when a leading master dies.

``python -m tests.scenario.real_store`` prints one line of JSON. It is a process of its own because a client of a
replicated master cannot be closed without stopping every thread for 30 s: it goes with its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from deltaserve.config import StoreConfig
from statestore.mooncake_pool import MooncakePool
from tests.scenario.stack import Ask, Stack, running, until
from tests.support import services

LENGTH = 70


def _make_pool(config: StoreConfig, lend: bool) -> MooncakePool:
    return MooncakePool(config, lend=lend, staging_bytes=4 << 20)


@contextlib.asynccontextmanager
async def real_store(master: str) -> AsyncIterator[Stack]:
    """Two ranks a worker: a client of the real store takes 100 MB."""
    store = {"segment_bytes": 64 << 20, "timeout": 3.0, "master": master}
    async with running(make_pool=_make_pool, prefill_timeout=8.0, request_timeout=60.0) as made:
        for role in ("prefill", "decode"):
            await made.add(role, tp=2, store=store, load_timeout=4.0)
        yield made


async def handed_over(stack: Stack) -> bool:
    """Whether a request's state came from the store. Raises AssertionError unless its answer is right."""
    ask = await stack.end(stack.ask(stack.prompt(LENGTH)), 60)
    assert stack.is_right(ask), stack.trace(ask)
    return bool(stack.trace(ask)["from_store"] == LENGTH - 1)


async def heals(stack: Stack, seconds: float) -> int:
    """Requests until a handover works again; each of them is answered right."""
    asked = 1
    async with asyncio.timeout(seconds):
        while not await handed_over(stack):
            asked += 1
            await asyncio.sleep(0.3)
    return asked


async def committed(stack: Stack) -> Ask:
    """A request whose boundary is in the store and has not been read yet; the decode worker is held."""
    stack.decode.engine.hold()
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: stack.decode.service.job_count == 1, 30)
    return ask


async def _leader_dies() -> dict[str, Any]:
    with services.etcd() as etcd, services.mooncake_ha(etcd.endpoint, "mooncake_cluster") as masters:
        async with real_store(f"etcd://{etcd.endpoint}") as stack:
            found: dict[str, Any] = {"before": await handed_over(stack)}
            ask = await committed(stack)
            masters[0].service.kill()
            stack.decode.engine.go()
            await stack.end(ask, 60)
            found["right"] = stack.is_right(ask)
            found["from_store"] = stack.trace(ask)["from_store"]
            found["failure"] = stack.trace(ask)["failure"]
            found["asked"] = await heals(stack, 90)
            await until(lambda: not stack.records, 30)
            found["records"] = len(stack.records)
        return found


if __name__ == "__main__":
    print("PROBE " + json.dumps(asyncio.run(_leader_dies())), flush=True)
    os._exit(0)
