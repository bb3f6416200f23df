# SPDX-License-Identifier: Apache-2.0
"""Sweeping: what a dead publisher left behind goes, objects first, the record last.

Every worker sweeps, at its own pace: a sweep is idempotent, and the ledger deletes a record only while its owner is
still no member. A pending record names no objects yet, but keys follow from epoch, group and rank, so the objects of an
unfinished publish are found all the same.

The grace is longer than a worker needs to register again after etcd was away: what it holds then is still good.
"""

from __future__ import annotations

import asyncio
import logging
import random

from deltaserve.telemetry import HANDOFF
from statestore.boundary import BoundaryRecord, object_key
from statestore.ledger import Ledger, LedgerError, Sweeper
from statestore.pool import Pool, PoolError

log = logging.getLogger(__name__)

SWEEP_SECONDS = 5.0
GRACE_LEASES = 2
"""Time to live of a lease, times this, is how long an owner must have been gone."""


def object_keys(record: BoundaryRecord) -> list[str]:
    """Every key under which ranks of the record's owner may have written."""
    links = range(record.links) if record.state == "pending" else (record.link,)
    return [
        object_key(record.model_digest, record.epoch, group, entry.rank, link)
        for link in links
        for entry in record.ranks
        for group in ("kda", "mla")
    ]


async def sweep_forever(ledger: Ledger, pool: Pool, lease_ttl: float) -> None:
    """Sweep until cancelled. Failures are logged and tried again at the next round."""

    async def remove(record: BoundaryRecord) -> None:
        left = await asyncio.to_thread(pool.remove, object_keys(record))
        if left:
            raise PoolError(f"{len(left)} objects of {record.id} cannot be removed yet")

    sweeper = Sweeper(ledger, remove, grace=GRACE_LEASES * lease_ttl)
    while True:
        await asyncio.sleep(SWEEP_SECONDS * random.uniform(0.8, 1.2))
        try:
            gone = await sweeper.step(())
        except (LedgerError, ConnectionError, TimeoutError, PoolError) as error:
            log.warning("sweep postponed: %s", error)
            continue
        for record in gone:
            HANDOFF.swept()
            log.info("swept boundary %s of dead worker %s", record.id, record.owner)
