# SPDX-License-Identifier: Apache-2.0
"""`deltaserve decode`: a worker that restores boundaries and generates."""

from __future__ import annotations

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

        return DecodeRole(geometry, EtcdLedger(config.etcd), forget)

    return run_worker(config, parts(build))
