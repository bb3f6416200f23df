# SPDX-License-Identifier: Apache-2.0
"""`deltaserve boundaries`: what the ledger holds, oldest first.

The ledger belongs to `statestore`, which stands above this package, so it is loaded by name like a role.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from typing import Any

from deltaserve.config import BoundariesConfig

LEDGER = "statestore.etcd_ledger:EtcdLedger"


def run(config: BoundariesConfig) -> int:
    """Print the records. 0, or 1 when etcd does not answer."""
    try:
        records = asyncio.run(_list(config))
    except (ConnectionError, TimeoutError) as error:
        endpoints = ",".join(config.etcd.endpoints)
        print(f"error: etcd at {endpoints}: {error}; name its address with --etcd-endpoints", file=sys.stderr)
        return 1
    if config.json_output:
        print(json.dumps([json.loads(record.to_json()) for record in records], indent=1))
        return 0
    for line in _table(records):
        print(line)
    return 0


async def _list(config: BoundariesConfig) -> list[Any]:
    module, _, name = LEDGER.partition(":")
    ledger = getattr(importlib.import_module(module), name)(config.etcd)
    try:
        records: list[Any] = await ledger.list()
    finally:
        await ledger.close()
    return records


def _table(records: list[Any]) -> list[str]:
    now = time.time()
    rows = [("boundary", "state", "tokens", "bytes", "ranks", "owner", "age")]
    for record in records:
        written = sum(rank.status == "written" for rank in record.ranks)
        rows.append(
            (
                record.id,
                record.state,
                str(record.length),
                str(record.nbytes),
                f"{written}/{len(record.ranks)}",
                record.owner,
                f"{max(0.0, now - record.created):.0f} s" if record.created else "unknown",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*lines, f"{len(records)} boundaries, {sum(record.nbytes for record in records)} bytes"]
