# SPDX-License-Identifier: Apache-2.0
"""`deltaserve drain WORKER`: a worker finishes what it holds and leaves. docs/drain.md has the protocol."""

from __future__ import annotations

import asyncio
import sys

from deltaserve.config import DrainConfig
from deltaserve.drain import DrainFailed, drain
from deltaserve.pem import PemUnusable


def run(config: DrainConfig) -> int:
    """Drain one worker. 0 when it has gone in order; 1 with one line on stderr when it has not."""
    try:
        gone = asyncio.run(drain(config.etcd, config.worker, config.seconds, config.wait))
    except (DrainFailed, PemUnusable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ConnectionError as error:
        endpoints = ",".join(config.etcd.endpoints)
        print(f"error: etcd at {endpoints}: {error}; name its address with --etcd-endpoints", file=sys.stderr)
        return 1
    moved = (
        f"{gone.moved} of what it held went on elsewhere" if gone.moved else "it finished all that it held"
    )
    print(f"{gone.worker_id} drained in {gone.seconds:.1f} s; {moved}")
    return 0
