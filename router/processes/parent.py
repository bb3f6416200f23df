# SPDX-License-Identifier: Apache-2.0
"""The process that was started with `--processes N`: it forks N routers, and serves nothing itself.

It has imported vLLM, bound the port and mapped the shared counts before, and runs no thread, so a child begins with all
of that and serves within a second or two. Each child has a listening socket of its own on the one port (SO_REUSEPORT,
so the kernel spreads connections evenly). The parent keeps all of them open: what has connected to a child that dies
waits in its queue, and a sibling accepts from there until the child is back.

Crash path: a child that ends is started again after FIRST_PAUSE, doubling to LONGEST_PAUSE while it keeps ending. One
that ends before all have served once ends the router, because it is the configuration that is wrong then; so does
nobody serving for NOBODY_SECONDS. The parent ends, however: the children get SIGTERM from the kernel and drain.

Stop: SIGTERM to every child, which drains as a router alone does; SIGKILL to who is left after STOP_SECONDS.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from router.admission.keys import KeyRing
from router.processes.merge import Counted
from router.processes.place import MESSAGE_BYTES, Place
from router.processes.tally import Tally

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
GOOD_SECONDS = 30.0
"""A child that has served for so long has not failed at its start."""
NOBODY_SECONDS = 120.0
STOP_SECONDS = 6.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_PR_SET_PDEATHSIG = 1


@dataclass
class _Child:
    """One of them, through all of its starts."""

    index: int
    pid: int = 0
    """0: it does not run."""
    control: socket.socket | None = None
    ready: bool = False
    error: str = ""
    began: float = 0.0
    pause: float = FIRST_PAUSE
    restart_at: float = 0.0
    adopter: int | None = None
    """Who accepts its connections while it is away."""


class Parent:
    """See the module's description."""

    def __init__(
        self,
        serve: Callable[[Place], int],
        announce: Callable[[], None],
        listeners: list[socket.socket],
        keys: KeyRing,
        folder: Path,
        rust_listener: socket.socket | None = None,
    ) -> None:
        """`serve` is a child's whole life, and gives its exit code; `announce` is called when all have served once."""
        self._serve, self._announce = serve, announce
        self._listeners, self._keys, self._folder = listeners, keys, folder
        self._rust_listener = rust_listener
        self._tally = Tally(len(listeners), keys.limited)
        self._counted = Counted(folder)
        self._children = [_Child(index) for index in range(len(listeners))]
        self._selector = selectors.DefaultSelector()
        self._announced = self._stopping = False
        self._served = time.monotonic()

    def run(self) -> str:
        """Return when all children have ended: why the router could not go on, or "" after a signal."""
        with self._woken() as signals:
            self._selector.register(signals, selectors.EVENT_READ, None)
            for child in self._children:
                self._start(child)
            reason = ""
            while not reason and not self._stopping:
                self._wait(self._next_wake())
                reason = self._failure()
                self._restart()
            self._stop()
            return reason

    # ---- the loop

    def _next_wake(self) -> float:
        away = [child.restart_at for child in self._children if not child.pid]
        return max(0.0, min([time.monotonic() + 1.0, *away]) - time.monotonic())

    def _wait(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                for number in os.read(key.fd, 4096):
                    self._stopping |= number != signal.SIGCHLD
            else:
                self._heard(key.data)
        self._reap()

    def _failure(self) -> str:
        if any(child.ready for child in self._children):
            self._served = time.monotonic()
        dead = [child for child in self._children if not child.pid]
        if dead and not self._announced and not self._stopping:
            return dead[0].error or "a router process ended before it served; its log is above"
        if time.monotonic() - self._served > NOBODY_SECONDS and self._announced:
            return f"no router process has served for {NOBODY_SECONDS:.0f} s"
        return ""

    def _restart(self) -> None:
        for child in self._children:
            if not child.pid and time.monotonic() >= child.restart_at and not self._stopping:
                self._start(child)

    def _heard(self, child: _Child) -> None:
        assert child.control is not None
        try:
            word, _, rest = child.control.recv(MESSAGE_BYTES).decode().partition(" ")
        except OSError:
            word = rest = ""
        if word == "ready":
            child.ready = True
            self._tell(child.adopter, f"drop {child.index}")
            child.adopter = None
            if self._announced:
                log.info("router process %d serves again, as %d", child.index, child.pid)
            elif all(each.ready for each in self._children):
                self._announced = True
                self._announce()
        elif word == "error":
            child.error = rest
        else:
            self._selector.unregister(child.control)

    def _reap(self) -> None:
        for child in self._children:
            if child.pid and os.waitpid(child.pid, os.WNOHANG)[0]:
                self._ended(child)

    def _ended(self, child: _Child) -> None:
        now = time.monotonic()
        assert child.control is not None
        with contextlib.suppress(OSError):  # one that left a message unread resets the pair
            while True:  # its last words
                child.control.setblocking(False)
                word, _, rest = child.control.recv(MESSAGE_BYTES).decode().partition(" ")
                if not word:
                    break
                child.error = rest if word == "error" else child.error
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.control)
        child.control.close()
        pid, child.pid, child.ready, child.control = child.pid, 0, False, None
        self._tally.clear(child.index)
        try:
            self._counted.end(child.index, pid)
        except OSError as error:  # its file stands for it until this works
            log.warning("what router process %d has counted cannot be added up: %s", child.index, error)
        if now - child.began > GOOD_SECONDS:
            child.pause = FIRST_PAUSE
        child.restart_at = now + child.pause
        if self._stopping or not self._announced:
            return
        log.error(
            "router process %d (%d) ended%s; it is started again after %.1f s",
            child.index,
            pid,
            f": {child.error}" if child.error else "",
            child.pause,
        )
        child.pause = min(2 * child.pause, LONGEST_PAUSE)
        for each in self._children:  # what it had adopted, too
            if each is child or each.adopter == child.index:
                self._find_adopter(each)

    def _find_adopter(self, child: _Child) -> None:
        living = [each for each in self._children if each.ready]
        child.adopter = None
        if living and not child.ready:
            busy = [each.adopter for each in self._children]
            child.adopter = min(living, key=lambda each: busy.count(each.index)).index
            self._tell(child.adopter, f"adopt {child.index}")

    def _tell(self, index: int | None, message: str) -> None:
        control = self._children[index].control if index is not None else None
        if control is not None:
            with contextlib.suppress(OSError):
                control.send(message.encode())

    def _stop(self) -> None:
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 2.0)):
            end = time.monotonic() + seconds
            for child in self._children:
                if child.pid:
                    os.kill(child.pid, number)
            while any(child.pid for child in self._children) and time.monotonic() < end:
                self._wait(0.2)

    # ---- a child

    def _start(self, child: _Child) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child.control, child.ready, child.error = ours, False, ""
        child.began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        child.pid = os.fork()
        if child.pid == 0:
            self._be_child(child.index, theirs, parent)
        theirs.close()
        self._selector.register(ours, selectors.EVENT_READ, child)
        if self._announced and child.adopter is None:
            self._find_adopter(child)

    def _be_child(self, index: int, control: socket.socket, parent: int) -> None:
        """Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all: the parent decides
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            self._selector.close()
            for each in self._children:
                if each.control is not None:
                    each.control.close()
            random.seed()
            gc.enable()
            code = self._serve(
                Place(
                    index,
                    self._tally,
                    self._folder,
                    self._listeners,
                    control,
                    self._keys,
                    self._rust_listener,
                )
            )
        except KeyboardInterrupt:
            code = 0
        except BaseException:
            log.exception("router process %d", index)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    @contextlib.contextmanager
    def _woken(self) -> Iterator[int]:
        """Signals wake the loop: their numbers can be read."""
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
