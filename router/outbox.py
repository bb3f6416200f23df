# SPDX-License-Identifier: Apache-2.0
"""Steps on their way from the workers to vLLM's output processor: one queue, bounded by holding the workers back."""

from __future__ import annotations

import asyncio
from collections import deque

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

MAX_READY = 256
"""Steps that may wait for vLLM's output processor before the workers' streams are held back."""
MAX_MERGED = 2048
"""Outputs merged into one batch when steps have piled up."""


class Outbox:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._ready: deque[list[EngineCoreOutput]] = deque()
        self._some = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def put(self, batch: list[EngineCoreOutput]) -> None:
        """Add one step's outputs."""
        self._ready.append(batch)
        self._some.set()

    async def take(self) -> EngineCoreOutputs:
        """The next step's outputs; steps that have piled up come merged."""
        ready = self._ready
        while not ready:
            self._some.clear()
            await self._some.wait()
        batch = ready.popleft()
        while ready and len(batch) < MAX_MERGED:
            batch.extend(ready.popleft())
        if len(ready) < MAX_READY:
            self._room.set()
        return EngineCoreOutputs(outputs=batch)

    async def room(self) -> None:
        """Return when another step may be put; whoever reads a worker's stream waits here."""
        if self.full:
            self._room.clear()
            await self._room.wait()

    @property
    def full(self) -> bool:
        """Whether the workers' streams are held back."""
        return len(self._ready) >= MAX_READY

    def __len__(self) -> int:
        return len(self._ready)
