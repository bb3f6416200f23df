# SPDX-License-Identifier: Apache-2.0
"""What one of several router processes knows of where it is, and what parent and child say to each other.

    child ─▶ parent     ready           it serves
                        error <words>   why it is about to end
    parent ─▶ child     adopt <n>       accept on the port of process n too, which is away
                        drop <n>        it is back

Every message is one packet of a socket pair, so none is ever cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.admission.keys import KeyRing
from router.processes.tally import Seat, Tally

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4096


@dataclass
class Place:
    """Made by the parent before it forks; the child has what is in it."""

    index: int
    tally: Tally
    folder: Path
    """Of the router: the processes' sockets and counts lie there."""
    listeners: list[socket.socket]
    """One a process, all on the same port."""
    control: socket.socket
    """To the parent."""
    keys: KeyRing
    rust_listener: socket.socket | None = None
    _adopted: dict[int, Callable[[], None]] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many there are to be."""
        return self.tally.processes

    @property
    def listener(self) -> socket.socket:
        """The one that is this process's."""
        return self.listeners[self.index]

    @property
    def seat(self) -> Seat:
        """Its view of the shared counts."""
        return self.tally.seat(self.index)

    def tell(self, message: str) -> None:
        """Say something to the parent; it may be gone."""
        with contextlib.suppress(OSError):
            self.control.send(message.encode()[:MESSAGE_BYTES])

    def follow(
        self, accept: Callable[[socket.socket], Awaitable[Callable[[], None]]], pump: Callable[[], None]
    ) -> None:
        """Do what the parent says from now on. Needs a running event loop.

        `accept` serves a further listening socket, and gives what ends that; `pump` looks whether somebody may enter.
        """
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        async def adopt(number: int) -> None:
            try:
                self._adopted[number] = await accept(self.listeners[number].dup())
            except OSError as error:
                log.error("the port of process %d cannot be served here: %s", number, error)

        def heard() -> None:
            try:
                word, _, number = self.control.recv(MESSAGE_BYTES).decode().partition(" ")
            except OSError:
                word = ""
            if word == "adopt":
                tasks.add(task := loop.create_task(adopt(int(number))))
                task.add_done_callback(tasks.discard)
            elif word == "drop":
                if (end := self._adopted.pop(int(number), None)) is not None:
                    end()
            else:  # the parent is gone; the signal that says so is on its way
                loop.remove_reader(self.control)

        self.control.setblocking(False)
        loop.add_reader(self.control, heard)
        waker = self.tally.waker(self.index)

        def woken() -> None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(waker)
            pump()

        loop.add_reader(waker, woken)
