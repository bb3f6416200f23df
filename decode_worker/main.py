# SPDX-License-Identifier: Apache-2.0
"""`deltaserve decode`: a worker that restores boundaries and generates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job, Role
from deltaserve.engine.worker import run as run_worker
from statestore.assembly import parts
from statestore.geometry import Geometry


def run(config: WorkerConfig) -> int:
    """Run a decode worker until it is told to stop; returns the exit code."""

    async def build(worker_id: str, geometry: Geometry, forget: Callable[[Job], None]) -> Role:
        from decode_worker.role import DecodeRole
        from statestore.etcd_ledger import EtcdLedger
        from statestore.mooncake_pool import MooncakePool
        from statestore.sweeping import sweep_forever

        ledger = EtcdLedger(config.etcd)
        pool = await asyncio.to_thread(MooncakePool, config.store, lend=False)
        role = DecodeRole(config, worker_id, geometry, ledger, pool, forget)
        role.background(role.publisher.index.follow(ledger))
        role.background(sweep_forever(ledger, pool, config.etcd.lease_ttl))
        return role

    return run_worker(config, parts(build))
