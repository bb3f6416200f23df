# SPDX-License-Identifier: Apache-2.0
"""A cluster in one process for every scenario, with sweepers that are as quick as its leases."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator

import pytest

from statestore import sweeping
from tests.scenario.stack import Stack, running


@pytest.fixture(scope="session", autouse=True)
def _quick_switches() -> Iterator[None]:
    """Forty threads share an interpreter here: with 5 ms a turn every message between two of them waits for a turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 0.2)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    """One prefill and one decode worker of 8 ranks each."""
    async with running() as made:
        await made.add("prefill")
        await made.add("decode")
        yield made
