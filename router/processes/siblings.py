# SPDX-License-Identifier: Apache-2.0
"""One process of the router asks the others, over Unix sockets in the router's folder: a line of JSON each way.

Whoever is asked by a client for what concerns all of them (/metrics, /health, /ui/state, a request's trace) answers
itself, with what the others say within ASK_SECONDS. A process that does not answer is left out, and counted as away.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from router.processes.merge import Counted, families

log = logging.getLogger(__name__)

ASK_SECONDS = 0.5
SAVE_SECONDS = 2.0
"""A process that is killed takes at most what it has counted for so long with it."""
LINE_BYTES = 16 << 20

Answers = dict[str, Callable[[str], Any]]
"""What this process says: for each question the function of its argument."""


class Siblings:
    """`start` and `close` frame its life, on one event loop."""

    def __init__(
        self, index: int, processes: int, folder: Path, registry: CollectorRegistry = REGISTRY
    ) -> None:
        self.index, self.processes = index, processes
        self.answers: Answers = {"metrics": lambda _: self._count()}
        self._folder, self._registry = folder, registry
        self._counted = Counted(folder)
        self._server: asyncio.Server | None = None
        self._saving: asyncio.Task[None] | None = None
        self._unkept = False
        """The last counts could not be kept."""

    async def start(self) -> None:
        """Begin to answer."""
        path = self._path(self.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_BYTES)
        self._saving = asyncio.create_task(self._save(), name="counts")

    async def close(self) -> None:
        """Answer no more. Never raises."""
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.gather(self._saving, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        self._count()

    async def ask(self, question: str, argument: str = "") -> list[Any]:
        """What the others say, in no order; those that are away say nothing."""
        others = [other for other in range(self.processes) if other != self.index]
        answers = await asyncio.gather(*(self._ask(other, question, argument) for other in others))
        return [answer for answer in answers if answer is not None]

    async def metrics(self) -> bytes:
        """/metrics of all of them, in Prometheus's text."""
        kept = self._counted.kept()  # before they are asked: one that ends meanwhile is counted once
        return self._counted.text([self._count(), *await self.ask("metrics")], kept)

    def _count(self) -> dict[str, Any]:
        """This process's metrics; what has been told to anybody is also kept, so that no sum ever falls.

        Where the disk takes nothing they are told all the same, and tried again with the next ones.
        """
        found = families(self._registry)
        try:
            self._counted.keep(self.index, found)
        except OSError as error:
            if not self._unkept:
                log.warning("counts cannot be kept for when this process ends: %s", error)
            self._unkept = True
        else:
            self._unkept = False
        return found

    async def _save(self) -> None:
        while True:
            self._count()
            await asyncio.sleep(SAVE_SECONDS)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.sock"

    async def _ask(self, index: int, question: str, argument: str) -> Any:
        writer = None
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(index), limit=LINE_BYTES)
                writer.write(json.dumps([question, argument]).encode() + b"\n")
                return json.loads(await reader.readline())
        except (OSError, TimeoutError, ValueError):
            return None
        finally:
            if writer is not None:
                writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question, argument = json.loads(await reader.readline())
            writer.write(json.dumps(self.answers[question](argument)).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, KeyError) as error:
            log.warning("a question of another process could not be answered: %s", error)
        finally:
            writer.close()
