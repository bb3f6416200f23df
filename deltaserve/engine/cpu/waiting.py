# SPDX-License-Identifier: Apache-2.0
"""Ranks, and the engine thread that drives them, sleep while they wait for each other's messages.

vLLM's queue between the engine thread and the tensor-parallel ranks waits by yielding the processor in a loop, for a
second after the last message and, because transfers are polled, as long as any is under way. A yielding thread never
sleeps: on cores that are shared, and ranks of a CPU are bound to theirs, it takes the time of the threads that it
waits for. Store and ledger calls of the same process then miss deadlines of 30 s, and the load average passes 40.

A short sleep instead costs a step fractions of a millisecond, and leaves the core to whoever has work.
"""

from __future__ import annotations

import time

from deltaserve.engine.cpu.vllm_version import SUPPORTED_VERSIONS, UnsupportedVllmError

PAUSE = 0.0002
"""Seconds between looks at the queue; with the kernel's timer slack about 0.25 ms."""


def pause() -> None:
    """What a waiting rank does between two looks at its queue."""
    time.sleep(PAUSE)


def install() -> None:
    """Let vLLM's message queue sleep between looks. Raises UnsupportedVllmError when it does not wait by that name."""
    from vllm.distributed.device_communicators import shm_broadcast

    used = "sched_yield" in shm_broadcast.SpinCondition.wait.__code__.co_names
    if not used or not hasattr(shm_broadcast, "sched_yield"):
        raise UnsupportedVllmError(
            "shm_broadcast.SpinCondition.wait no longer calls sched_yield: this vLLM differs from "
            f"{', '.join(SUPPORTED_VERSIONS)}, for which the CPU engine was written. Install the pinned version, or "
            "adapt deltaserve/engine/cpu/waiting.py"
        )
    shm_broadcast.sched_yield = pause
