# SPDX-License-Identifier: Apache-2.0
"""`deltaserve boundaries`: what the ledger holds, oldest first, with what rests on what and where the bytes lie.

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
from deltaserve.pem import PemUnusable

LEDGER = "statestore.etcd_ledger:EtcdLedger"


def run(config: BoundariesConfig) -> int:
    """Print the records. 0, or 1 when etcd does not answer or its certificates cannot be read."""
    try:
        records, pins = asyncio.run(_read(config))
    except PemUnusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ConnectionError, TimeoutError) as error:
        endpoints = ",".join(config.etcd.endpoints)
        print(f"error: etcd at {endpoints}: {error}; name its address with --etcd-endpoints", file=sys.stderr)
        return 1
    if config.json_output:
        print(json.dumps([_document(record, pins) for record in records], indent=1))
        return 0
    for line in _table(records, pins):
        print(line)
    return 0


async def _read(config: BoundariesConfig) -> tuple[list[Any], dict[str, list[str]]]:
    module, _, name = LEDGER.partition(":")
    ledger = getattr(importlib.import_module(module), name)(config.etcd)
    try:
        return await ledger.list(), await ledger.pins()
    finally:
        await ledger.close()


def _document(record: Any, pins: dict[str, list[str]]) -> dict[str, Any]:
    """The record's own fields; beside them its bytes, what pins it, where it lies, and its age in seconds."""
    return {
        **json.loads(record.to_json()),
        "bytes": record.nbytes,
        "pins": sorted(pins.get(record.id, [])),
        "segments": _segments(record),
        "age": round(max(0.0, time.time() - record.created), 3) if record.created else None,
    }


def _segments(record: Any) -> dict[str, int]:
    """Bytes by the segment of the store that holds them."""
    found: dict[str, int] = {}
    for entry in record.objects():
        found[entry.segment] = found.get(entry.segment, 0) + entry.nbytes
    return dict(sorted(found.items()))


_COLUMNS = (
    "boundary",
    "state",
    "kind",
    "tokens",
    "parents",
    "link",
    "bytes",
    "ranks",
    "pins",
    "owner",
    "lies in",
    "age",
)


def _table(records: list[Any], pins: dict[str, list[str]]) -> list[str]:
    now = time.time()
    rows = [_COLUMNS]
    for record in records:
        written = sum(rank.status == "written" for rank in record.ranks)
        rows.append(
            (
                record.id,
                record.state,
                "checkpoint" if record.reusable else "request",
                f"{record.base}..{record.length}",
                str(len(record.parents)),
                str(record.link),
                str(record.nbytes),
                f"{written}/{len(record.ranks)}",
                str(len(pins.get(record.id, []))),
                record.owner,
                ",".join(name or "?" for name in _segments(record)) or "-",
                f"{max(0.0, now - record.created):.0f} s" if record.created else "unknown",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    kept = [record for record in records if record.reusable]
    return [
        *lines,
        f"{len(records)} boundaries, {sum(record.nbytes for record in records)} bytes; "
        f"{len(kept)} of them checkpoints, {sum(record.nbytes for record in kept)} bytes",
    ]
