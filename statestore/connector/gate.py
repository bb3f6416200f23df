# SPDX-License-Identifier: Apache-2.0
"""The gate before loads that began before their record was committed (docs/early_reads.md).

vLLM schedules a request, and hashes its blocks for the prefix cache, once it has been told that the load has ended. Of
an early load it is not told before the service has opened the gate: the committed record was read, and is the one by
which the ranks have read. A request that ends before leaves the gate too: its blocks go when all ranks have reported.

    added ─▶ [ranks report ─▶ held] ─▶ opened ─▶ vLLM is told      (or opened first, then the reports pass)
    added ─▶ [ranks report ─▶ held] ─▶ ended  ─▶ vLLM is told, and frees the blocks of a request that is over

Verdicts come through the service's queue to the engine thread, in whatever order they come with the request itself.
"""

from __future__ import annotations

from typing import Any


class Gate:
    """State of the early loads of this engine; used on the engine thread only."""

    def __init__(self) -> None:
        self._shut: set[str] = set()
        self._opened: set[str] = set()
        """Of requests that have not been added yet."""
        self._held: set[str] = set()

    def add(self, key: str) -> None:
        """A request with an early load has entered the scheduler."""
        if key in self._opened:
            self._opened.discard(key)
        else:
            self._shut.add(key)

    def hold(self, output: Any) -> None:
        """Take what must not be known yet out of a `KVConnectorOutput`."""
        if self._shut and output.finished_recving:
            held = self._shut & output.finished_recving
            self._held |= held
            output.finished_recving = (output.finished_recving - held) or None

    def open(self, key: str) -> bool:
        """The record is the one that was told. Returns whether all ranks have reported, so that vLLM is to be told."""
        if key not in self._shut:
            self._opened.add(key)
            return False
        return self._leave(key)

    def end(self, key: str) -> bool:
        """The request is over, however it ended. Returns the same."""
        self._opened.discard(key)
        return self._leave(key)

    def _leave(self, key: str) -> bool:
        self._shut.discard(key)
        held = key in self._held
        self._held.discard(key)
        return held

    def __len__(self) -> int:
        """Early loads whose gate is shut, and verdicts that wait for their request."""
        return len(self._shut) + len(self._opened)


def settle(core: Any, key: str, opened: bool) -> None:
    """Open the gate of a request, or let one go that is over. On the engine thread, between two steps.

    `core`: vLLM's EngineCore. Its scheduler is told by the method that it uses for a step's output, so that the request
    can be in the very next step.
    """
    from vllm.v1.outputs import KVConnectorOutput

    gate: Gate = core.scheduler.get_kv_connector().gate
    if gate.open(key) if opened else gate.end(key):
        core.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={key}))
