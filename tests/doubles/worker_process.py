# SPDX-License-Identifier: Apache-2.0
"""Worker doubles in a process of their own, for measuring.

`python -m tests.doubles.worker_process decode:5 prefill:1` (role:step in milliseconds) prints one line of JSON, the
members, and serves until its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import cast

from deltaserve.config import Role
from tests.doubles.worker import WorkerDouble, workers


async def _main() -> None:
    doubles = []
    for argument in sys.argv[1:]:
        role, _, milliseconds = argument.partition(":")
        double = WorkerDouble(cast("Role", role))
        double.knobs.step_seconds = float(milliseconds or 5) / 1e3
        doubles.append(double)
    async with workers(*doubles):
        print(json.dumps([asdict(double.member) for double in doubles]), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_main())
