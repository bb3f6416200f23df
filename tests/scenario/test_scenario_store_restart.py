# SPDX-License-Identifier: Apache-2.0
"""A Mooncake master that restarts, without HA and with it: misses, recomputed prompts, and never an error to a client.

Real masters, and the real pool on every rank; engines without weights.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scenario.real_store import committed, handed_over, heals, real_store
from tests.scenario.stack import failures, until
from tests.support import services

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


async def test_a_restart_without_ha(own_master: services.MasterService) -> None:
    async with real_store(own_master.address) as stack:
        assert await handed_over(stack)
        ask = await committed(stack)
        before = sum(failures("load", kind) for kind in ("missing", "store_unavailable"))
        own_master.service.kill()
        await asyncio.to_thread(own_master.service.start)
        stack.decode.engine.go()
        await stack.end(ask, 30)
        assert stack.is_right(ask)
        assert stack.trace(ask)["from_store"] == 0, "without HA a restart loses everything"
        assert sum(failures("load", kind) for kind in ("missing", "store_unavailable")) == before + 1
        own_master.service.kill()
        for _ in range(3):
            assert not await handed_over(stack)
        await asyncio.to_thread(own_master.service.start)
        await heals(stack, 40)
        await until(lambda: not stack.records, 30)


def test_a_leader_dies_with_ha() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.scenario.real_store"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    assert lines, done.stderr[-4000:]
    found = json.loads(lines[-1].removeprefix("PROBE "))
    assert found["before"], "the control: handovers work before the leader dies"
    assert found["right"]
    # Kept by the next leader, or missed and recomputed; nothing in between.
    assert (found["from_store"] > 0) != bool(found["failure"])
    assert found["records"] == 0
