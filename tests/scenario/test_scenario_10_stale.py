# SPDX-License-Identifier: Apache-2.0
"""Scenario 10, STALE READ AFTER LEASE: a decode that starts after its boundary has gone never answers from what it
finds."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest

from tests.doubles.pool import Stored
from tests.scenario.stack import Ask, Stack, failures, running, until

LENGTH = 70


@pytest.fixture(params=[True, False], ids=["verified", "control: unverified"])
async def cluster(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Stack, bool]]:
    async with running() as made:
        await made.add("prefill")
        await made.add("decode", verify=request.param)
        yield made, request.param


async def queued_for_too_long(stack: Stack) -> tuple[Ask, dict[str, Stored]]:
    """A request that waits on the decode worker while its publisher dies and is swept; and the objects that were."""
    stack.decode.engine.hold()
    ask = stack.ask(stack.prompt(LENGTH))
    await until(lambda: stack.decode.service.job_count == 1)
    objects = dict(stack.store.objects)
    assert objects
    await stack.prefill.kill()
    await until(lambda: not stack.records and not stack.store.objects, 30)
    return ask, objects


async def test_objects_that_are_gone(stack: Stack) -> None:
    before = failures("load", "missing")
    ask, _ = await queued_for_too_long(stack)
    stack.decode.engine.go()
    await stack.end(ask)
    assert stack.is_right(ask)
    assert failures("load", "missing") == before + 1
    assert stack.trace(ask)["from_store"] == 0


async def test_memory_that_is_somebody_elses_now(cluster: tuple[Stack, bool]) -> None:
    """What Mooncake may do after a forced removal: success, with another object's bytes of the same size."""
    stack, verified = cluster
    before = failures("load", "digest")
    ask, objects = await queued_for_too_long(stack)
    random = np.random.default_rng(9)
    for key, stored in objects.items():
        values = random.uniform(0.1, 1.0, stored.data.nbytes // 4).astype(np.float32)
        stack.store.objects[key] = Stored(values.view(np.uint8).copy(), stored.segment, sealed=True)
    stack.decode.engine.go()
    await stack.end(ask)
    assert stack.is_right(ask) == verified
    assert failures("load", "digest") == before + verified
