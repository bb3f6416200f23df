# SPDX-License-Identifier: Apache-2.0
"""One worker, as the router reaches it: a gRPC stream that is kept open for as long as the worker is a member.

Happy path: connect, `Describe`, check that this is the worker that the register names, open `Engine`; messages go out
through a bounded queue, and every message that comes in is handed to the dispatcher.

Crash path: when the stream breaks (process dead, host gone: seen by gRPC's keep-alive, identity wrong) the dispatcher
hears `link_down` with the legs that were on it, and the link connects again after a pause that doubles, with jitter.
The worker has by then aborted those requests and released their boundaries: it does both at a stream's end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from deltaserve import tls
from deltaserve.config import RouterConfig, WorkerTlsConfig
from deltaserve.membership import Member
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from deltaserve.wire.worker_pb2_grpc import WorkerStub

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

    from router.flight import Flight

log = logging.getLogger(__name__)

DESCRIBE_SECONDS = 5.0
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 2.0
RELEASE_SECONDS = 0.02
"""Releases may wait so long for others to share their message; nobody waits for them."""
OUTGOING = 8192
"""Messages that may wait for one worker; more means that it does not read, and the link is reset."""


class LinkDown(ConnectionError):
    """The worker cannot be sent anything now."""


@dataclass(frozen=True)
class Dial:
    """How workers are reached, and what they must have in common with this router."""

    open_channel: Callable[[str, tls.Options], grpc.aio.Channel] = field(
        default_factory=lambda: tls.channel_opener(WorkerTlsConfig())
    )
    reasoning_parser: str = ""

    @classmethod
    def of(cls, config: RouterConfig) -> Dial:
        """Raises ValueError when a file of `config.worker_tls` cannot be used."""
        return cls(tls.channel_opener(config.worker_tls), config.reasoning_parser)


class LinkEvents(Protocol):
    """What a link tells the dispatcher. All methods but `room` must not block."""

    def link_up(self, link: WorkerLink) -> None: ...
    def link_down(self, link: WorkerLink, legs: list[Flight], reason: str) -> None: ...
    def early_lost(self, count: int) -> None:
        """So many early reads have gone with their worker's stream."""

    def awake(self, link: WorkerLink) -> None:
        """A worker that had stalled makes progress again."""

    def retiring(self, link: WorkerLink) -> None:
        """The worker wants to go: it drains, or has left the register."""

    def step(self, link: WorkerLink, outputs: list[tuple[int, EngineCoreOutput]]) -> None: ...
    def written(self, link: WorkerLink, message: pb.Written) -> None: ...
    def published(self, link: WorkerLink, message: pb.Published) -> None: ...
    def loaded(self, link: WorkerLink, message: pb.Loaded) -> None: ...
    async def room(self) -> None:
        """Return when the dispatcher wants more; the stream's flow control holds the worker back until then."""


@types.coroutine
def _rest(work: Coroutine[Any, Any, None], waits: Any) -> Generator[Any, Any, None]:
    """What is left of a coroutine that waits for `waits`."""
    while True:
        try:
            result = yield waits
        except BaseException as error:
            step = functools.partial(work.throw, error)
        else:
            step = functools.partial(work.send, result)
        try:
            waits = step()
        except StopIteration:
            return


def begun(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    """A task of `work` that runs now, up to where it first waits; others run in the event loop's next turn."""
    loop = asyncio.get_running_loop()
    try:
        waits = work.send(None)
    except StopIteration:
        done: asyncio.Future[None] = loop.create_future()
        done.set_result(None)
        return done
    except Exception as error:
        failed: asyncio.Future[None] = loop.create_future()
        failed.set_exception(error)
        return failed

    async def rest() -> None:  # a task takes no generator from Python 3.12 on
        await _rest(work, waits)

    return loop.create_task(rest())


class WorkerLink:
    """See the module's description. `start` and `close` frame its life."""

    def __init__(self, member: Member, events: LinkEvents, dial: Dial | None = None) -> None:
        self.member = member
        self._dial = dial or Dial()
        self.worker_id = member.worker_id
        self.description = pb.WorkerDescription()
        self.load = pb.WorkerLoad()
        self.legs: dict[int, Flight] = {}
        """Requests on this worker, by the ids they have on the stream."""
        self.early: dict[int, Flight] = {}
        """Requests on this worker whose boundary is not committed yet, by the same ids."""
        self.outstanding = 0
        """Tokens given to this worker and not yet done with."""
        self.state_bytes = 0
        """Bytes of the state that its requests here hold."""
        self.session = 0
        """Counts the streams; what a worker holds for the router does not outlive the stream."""
        self.up = False
        self.retiring = False
        """True: no longer a member, or draining; gets nothing new."""
        self.stalled = False
        """True: it was late with a request, and has shown no progress since; gets nothing new."""
        self.error = "not connected yet"
        self._events = events
        self._queue: deque[pb.ToWorker] = deque()
        self._writing = False
        """A message is on its way; what is sent meanwhile goes with the next one."""
        self._releases: list[str] = []
        self._call: Any = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """Requests that this router has on the worker."""
        return len(self.legs)

    @property
    def others(self) -> int:
        """Tokens that other routers have given this worker, when it last said so: about a second ago, at most."""
        return self.load.others

    def state_bytes_of(self, tokens: int) -> int:
        """Bytes of the state after `tokens` tokens; 0: the worker has not said what it holds."""
        return self.description.state_bytes + self.description.token_bytes * max(0, tokens)

    @property
    def ready(self) -> bool:
        """True when new requests may go to this worker."""
        return self.up and not self.retiring and not self.stalled

    @property
    def state(self) -> str:
        """In a word: draining, away, stalled or ready."""
        if self.retiring:
            return "draining"
        return "away" if not self.up else "stalled" if self.stalled else "ready"

    def start(self) -> None:
        """Begin to connect."""
        self._task = asyncio.create_task(self._run(), name=f"link {self.worker_id}")

    async def close(self) -> None:
        """End the stream, and with it what the worker still does for this router. Never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def send(self, message: pb.ToWorker) -> None:
        """Queue a message. Raises LinkDown when there is no stream, or the worker does not read it."""
        if not self.up:
            raise LinkDown(f"{self.worker_id}: {self.error}")
        if len(self._queue) >= OUTGOING:
            self._call.cancel()
            raise LinkDown(f"{self.worker_id}: it does not read its messages")
        self._queue.append(message)
        if not self._writing:
            self._write()

    def abort(self, leg: int) -> None:
        """Tell the worker that a leg is not wanted any more, if it can be told."""
        with contextlib.suppress(LinkDown):
            self.send(pb.ToWorker(abort=pb.Abort(ids=(leg,))))

    def release(self, boundary: str, session: int) -> bool:
        """Give a boundary back to its publisher, soon; False when the stream it was published on has gone."""
        if not self.up or session != self.session:
            return False
        if not self._releases:
            asyncio.get_running_loop().call_later(RELEASE_SECONDS, self._send_releases)
        self._releases.append(boundary)
        return True

    def _send_releases(self) -> None:
        releases, self._releases = self._releases, []
        if releases:
            with contextlib.suppress(LinkDown):
                self.send(pb.ToWorker(release=pb.Release(boundaries=releases)))

    # ---- the task

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                await self._connect()
                reason = "the worker ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    self._lost("the router closed the link")
                    raise
                # gRPC says so too of a call that this side has cancelled, because nobody read its messages.
                reason = "the router reset the stream"
            except LinkDown as error:
                reason = str(error)
            except Exception as error:  # a malformed message: not this worker's stream any more
                reason = f"{type(error).__name__}: {error}"
                log.exception("%s: protocol error", self.worker_id)
            if self.up and clock() - began > LONGEST_PAUSE:
                pause = FIRST_PAUSE
            if reason != self.error:
                log.warning("%s at %s: %s", self.worker_id, self.member.address, reason)
            self._lost(reason)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _lost(self, reason: str) -> None:
        was_up, self.up, self.error = self.up, False, reason
        self._call = None
        self._writing = False
        self._queue.clear()
        self._releases.clear()
        if was_up:
            for flight in self.early.values():
                flight.early = None
                flight.spans.drop_early()
            self._events.early_lost(len(self.early))
            self.early.clear()
            legs, self.legs = list(self.legs.values()), {}
            self._events.link_down(self, legs, reason)

    async def _connect(self) -> None:
        async with self._dial.open_channel(self.member.address, codec.CHANNEL_OPTIONS) as channel:
            stub = WorkerStub(channel)
            description = await stub.Describe(pb.DescribeRequest(), timeout=DESCRIBE_SECONDS)
            self._check(description)
            self.description = description
            call = self._call = stub.Engine()
            self.session += 1
            self.up, self.stalled = True, False
            log.info("%s at %s: connected", self.worker_id, self.member.address)
            self._events.link_up(self)
            await self._read(call)

    def _awake(self) -> None:
        self.stalled = False
        log.info("%s: it makes progress again", self.worker_id)
        self._events.awake(self)

    def _check(self, description: pb.WorkerDescription) -> None:
        found = (description.worker_id, description.role, description.model_digest)
        wanted = (self.member.worker_id, self.member.role, self.member.model_digest)
        if found != wanted:
            raise LinkDown(f"at {self.member.address} answers {found}, the register says {wanted}")
        theirs, ours = description.reasoning_parser, self._dial.reasoning_parser
        if description.role == "decode" and theirs != ours:
            raise LinkDown(
                f"has the reasoning parser {theirs!r}, this router {ours!r}; give both the same --reasoning-parser"
            )

    def _write(self) -> None:
        """Write what waits, beginning at once: the worker has a burst's first request while the others are rendered."""
        call, queue = self._call, self._queue
        message = codec.bundled(queue) if self.description.bundles else queue.popleft()
        self._writing = True
        writing = begun(call.write(message))
        writing.add_done_callback(functools.partial(self._written, call))

    def _written(self, call: Any, writing: asyncio.Future[None]) -> None:
        failed = writing.cancelled() or writing.exception() is not None
        if call is not self._call:
            return  # an earlier stream's
        if failed:
            call.cancel()  # the reader reports why; nothing more goes out here until there is another stream
            return
        self._writing = False
        if self._queue:
            self._write()

    async def _read(self, call: Any) -> None:
        events = self._events
        while True:
            message = await call.read()
            if message is grpc.aio.EOF:
                # The status tells a clean end from a broken connection.
                code = await call.code()
                if code != grpc.StatusCode.OK:
                    raise LinkDown(f"{code.name}: {await call.details()}")
                return
            kind = message.WhichOneof("body")
            if kind == "step":
                if self.stalled:
                    self._awake()
                events.step(self, codec.decode_step(message.step))
                await events.room()
            elif kind == "written":
                events.written(self, message.written)
            elif kind == "published":
                events.published(self, message.published)
            elif kind == "loaded":
                events.loaded(self, message.loaded)
            elif kind == "status":
                self.load = message.status
                # An engine that hangs still holds what was aborted; one that was slow has let it go.
                if self.stalled and self.load.running + self.load.waiting <= len(self.legs) + len(self.early):
                    self._awake()
