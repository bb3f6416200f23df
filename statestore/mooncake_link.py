# SPDX-License-Identifier: Apache-2.0
"""One process's connection to Mooncake's store: set-up, deadlines, retries, health, the end.

    NEW ─setup─▶ READY ◀───────────── well ──────────┐
                   └─ a call failed or was late ─▶ suspect: looked at ─▶ AWAY: calls fail at once, looked at again and
                                                                        again; does not recover although its master
                                                                        answers ─▶ replaced by a new client
    any ─close─▶ CLOSED

A call before set-up or after close crashes the process, a set-up against a dead master stops every thread of the
process, and a call may block for long when the master or the owner of an object has stopped. So the master's port
is tried before the set-up, no call is made outside READY, calls run in `BoundedCalls`, and a client with a late call
inside is never closed. After a restart of its master, Mooncake's client registers itself and its segment again within a
second.
"""

from __future__ import annotations

import contextlib
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from deltaserve.addresses import split
from deltaserve.config import StoreConfig
from statestore.bounded_calls import BoundedCalls
from statestore.mooncake_client import MISSING, Client, describe, error_of, is_later, is_unreachable, probe
from statestore.pool import Bytes, PoolClosed, PoolError, PoolUnavailable, extent

T = TypeVar("T")

log = logging.getLogger(__name__)

THREADS = 6
"""Store calls that run at once; the library's own threads move the bytes."""

PROBE_SECONDS = 1.0
"""What a look at the store may take."""

REBUILD_SECONDS = 30.0
"""How long a client may fail to recover while its master takes new ones, before it is replaced. A change of leader
takes 10 s and more, and the client finds the new one by itself."""

_SETUPS = 3
"""Attempts of a set-up; ports that it chooses may be taken."""

_PAUSE = 0.02
_PAUSE_MAX = 0.5
"""Seconds between attempts of a call whose code means "later": they double from the first to the second."""


class Link:
    """See the module's description. Safe to use from several threads."""

    def __init__(self, config: StoreConfig, segment_bytes: int, on_well: Callable[[], bool]) -> None:
        """Connects, within `StoreConfig.timeout` seconds; `segment_bytes` are lent (0: none).

        `on_well` runs on the healer's thread after a suspect store was found well; while it returns False it is run
        again every few seconds. Raises PoolUnavailable when the master does not answer.
        """
        self._config = config
        self._segment_bytes = segment_bytes
        self._on_well = on_well
        self._calls = BoundedCalls("mooncake", THREADS)
        self._lock = threading.Lock()
        self._memory: dict[int, Bytes] = {}
        self._suspected = threading.Event()
        self._probing = threading.Lock()
        self._closed = False
        self._away = False
        self.client = self._connect()
        threading.Thread(target=self._heal, name="mooncake-healer", daemon=True).start()

    @property
    def available(self) -> bool:
        """Whether calls have a chance."""
        return not self._closed and not self._away

    # ---- memory

    def register(self, buffer: Bytes) -> None:
        """Announce memory to the library. Raises ValueError when it has been announced already."""
        with self._lock:
            self.guard("register")
            if self._covers(buffer):
                raise ValueError("buffer: this memory has been registered already")
            self._memory[extent(buffer)[0]] = buffer
        try:
            code = self.once("register", lambda: self.client.register(buffer), self._config.timeout)
            if code:
                raise error_of("register", f"{buffer.nbytes} bytes", code)
        except BaseException:
            with self._lock:
                self._memory.pop(extent(buffer)[0], None)
            raise

    def unregister(self, buffer: Bytes) -> None:
        """Take memory back. Never raises."""
        with self._lock:
            if self._closed or self._memory.pop(extent(buffer)[0], None) is None:
                return
        with contextlib.suppress(Exception):
            self.once("unregister", lambda: self.client.unregister(buffer), self._config.timeout)

    def registered(self, buffers: Sequence[Bytes]) -> bool:
        """Whether every buffer lies inside announced memory."""
        with self._lock:
            spans = [extent(memory) for memory in self._memory.values()]
        for buffer in buffers:
            first, last = extent(buffer)
            if not any(start <= first and last <= end for start, end in spans):
                return False
        return True

    def busy(self, buffer: Bytes) -> bool:
        """Whether a late call may touch this memory."""
        return self._calls.busy(buffer)

    def _covers(self, buffer: Bytes) -> bool:
        first, last = extent(buffer)
        return any(start <= first and last <= start + m.nbytes for start, m in self._memory.items())

    # ---- calls

    def guard(self, what: str) -> None:
        """Raises PoolClosed after close."""
        if self._closed:
            raise PoolClosed(f"{what}: the pool has been closed")

    def once(self, what: str, work: Callable[[], T], seconds: float, buffers: Sequence[Bytes] = ()) -> T:
        """One library call. Raises PoolUnavailable when the store is away or does not answer in time."""
        self.guard(what)
        if self._away:
            raise PoolUnavailable(f"{what}: the master at {self._config.master} does not answer")
        try:
            result = self._calls.run(what, work, seconds, buffers)
        except PoolUnavailable:
            self._suspected.set()
            raise
        if is_unreachable(_code_of(result)):
            self._suspected.set()
        return result

    def run(self, what: str, work: Callable[[], T], deadline: float, buffers: Sequence[Bytes] = ()) -> T:
        """A library call, repeated with jitter while its code means "later" and there is time (`time.monotonic`)."""
        pause = _PAUSE
        while True:
            result = self.once(what, work, deadline - time.monotonic(), buffers)
            code = _code_of(result)
            if not is_later(code) and not is_unreachable(code):
                return result
            if time.monotonic() + pause >= deadline or pause > _PAUSE_MAX:
                return result
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause *= 2

    @contextlib.contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """While this lasts the memory that is lent stays mapped, whatever becomes of the client."""
        with self._calls.inside(what):
            yield

    def suspect(self) -> None:
        """Have the store looked at, and `on_well` run after that."""
        self._suspected.set()

    def close(self, timeout: float) -> None:
        """Leave the store within `timeout` seconds. Never raises."""
        deadline = time.monotonic() + timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._suspected.set()
        if not self._calls.close(max(0.0, deadline - time.monotonic())):
            log.warning("store calls have not come back; their client is left as it is")
            return
        closer = threading.Thread(target=self.client.close, name="mooncake-close", daemon=True)
        closer.start()
        closer.join(max(0.05, deadline - time.monotonic()))
        if closer.is_alive():
            log.warning("leaving the store takes longer than %g s; it goes on behind", timeout)

    # ---- health

    def _connect(self) -> Client:
        if not reachable(self._config.master):
            raise PoolUnavailable(
                f"store.master: nothing answers at {self._config.master}; start mooncake_master or correct it"
            )
        deadline = time.monotonic() + self._config.timeout
        for attempt in range(1, _SETUPS + 1):
            client = Client()
            code = self._calls.run("setup", partial(self._set_up, client), deadline - time.monotonic())
            if code == 0:
                return client
            if attempt == _SETUPS or time.monotonic() + _PAUSE_MAX > deadline:
                break
            time.sleep(_PAUSE_MAX * random.uniform(0.5, 1.0))
        raise PoolUnavailable(f"store.master: {self._config.master} refuses a client: {describe(code)}", code)

    def _set_up(self, client: Client) -> int:
        code = client.setup(self._config, self._segment_bytes)
        with self._lock:
            buffers = list(self._memory.values())
        for buffer in buffers:
            code = code or client.register(buffer)
        if code == 0:
            client.learn_endpoint()
        return code

    def _heal(self) -> None:
        quiet = True
        while not self._closed:
            self._suspected.wait(None if quiet else 5.0)
            self._suspected.clear()
            if self._recover():
                quiet = self._on_well()

    def _recover(self) -> bool:
        """Look until the store is well; False: closed before that."""
        unwell_since: float | None = None
        pause = 0.05
        while not self._closed:
            answers = reachable(self._config.master)
            if answers and self._is_well():
                if self._away:
                    log.info("the store answers again")
                self._away = False
                return True
            if not self._away:
                log.warning("the store is away (master %s)", self._config.master)
            self._away = True
            now = time.monotonic()
            if not answers:
                unwell_since = None
            elif unwell_since is None:
                unwell_since = now
            elif now - unwell_since > REBUILD_SECONDS:
                # A set-up against a master that does not answer would stop every thread of this process.
                if probe(self._config):
                    self._replace_client()
                unwell_since = None
            time.sleep(pause * random.uniform(0.7, 1.0))
            pause = min(pause * 2, 1.0)
        return False

    def _is_well(self) -> bool:
        """Whether the master answers this client. One look at a time: one that hangs is not joined by others."""
        probing = self._probing
        if not probing.acquire(blocking=False):
            return False

        def look() -> bool:
            try:
                return self.client.health() == 0 and self.client.size("ds/probe") == MISSING
            finally:
                probing.release()

        try:
            return self._calls.run("health", look, PROBE_SECONDS)
        except PoolError:
            return False

    def _replace_client(self) -> None:
        """A new client with the same memory; the old one is closed when no call is inside it any more."""
        log.warning("the store's client does not recover; replacing it, what lies in its segment is lost")
        old = self.client
        try:
            self.client = self._connect()
        except PoolError as error:
            log.warning("no new client: %s", error)
            return
        # A look that hangs in the old client says nothing about the new one.
        self._probing = threading.Lock()
        ended = self._calls.drained()

        def retire() -> None:
            while not ended():
                time.sleep(1.0)
            old.close()

        threading.Thread(target=retire, name="mooncake-retire", daemon=True).start()


def reachable(master: str) -> bool:
    """Whether something listens there. With HA (etcd://a;b) the client finds its leader itself."""
    _, _, rest = master.rpartition("://")
    for address in re.split("[,;]", rest):
        with contextlib.suppress(OSError, ValueError):
            socket.create_connection(split(address), PROBE_SECONDS).close()
            return True
    return False


def _code_of(result: object) -> int:
    return result if isinstance(result, int) and result < 0 else 0
