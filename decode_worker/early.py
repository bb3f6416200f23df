# SPDX-License-Identifier: Apache-2.0
"""Loads that begin before their boundary is committed; docs/early_reads.md has the protocol, this file its last part.

Happy path: Add{load{early}} ─▶ `chain`: the records that were told, with what they rest on, which is committed ─▶ the
engine allocates, the ranks read and check by them, behind the gate ─▶ the committed record comes, pushed by the ledger
or read after the router's `Confirm` ─▶ it and its whole chain are equal ─▶ the gate opens, and the load goes on as any.

Crash path: a record that differs, is gone, does not come in time or cannot be read: the job leaves the engine without a
token, Loaded{withdrawn} has the router send the request as if nothing had been told; counted by kind. A job that ends
otherwise takes its gate with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaserve.engine.role import Job
from deltaserve.telemetry import HANDOFF
from deltaserve.wire import worker_pb2 as pb
from statestore.boundary import BoundaryInvalid, BoundaryRecord
from statestore.checkpoints.chain import check_chain
from statestore.ledger import Chain, ChainBroken, Ledger, LedgerError

log = logging.getLogger(__name__)

_KEY = "early"


@dataclass
class Early:
    """What is known of one early load."""

    chain: Chain = ()
    committed: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the committed chain was read and is `chain`; an error when nothing came of it."""
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """The router has said that the commit has happened."""
    restored: tuple[int, list[Any]] | None = None
    """What the ranks have reported meanwhile."""


class EarlyLoads:
    """See the module's description. Belongs to one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        known: Callable[[], Mapping[str, BoundaryRecord]],
        seconds: float,
        settle: Callable[[str, bool], None],
        withdraw: Callable[[Job], None],
        go_on: Callable[[Job, int, list[Any]], None],
    ) -> None:
        """`known`: committed checkpoints that were seen already. `seconds`: to wait for a commit. `settle(key, opened)`
        has the gate opened or left. `go_on`: the load ended, and its record is what it was read by."""
        self._ledger, self._known, self._seconds = ledger, known, seconds
        self._settle, self._withdraw, self._go_on = settle, withdraw, go_on

    @staticmethod
    def begin(job: Job) -> Early:
        """From now on `Confirm` is heard."""
        early = Early()
        # Nobody need ask why nothing came of it.
        early.committed.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        job.state[_KEY] = early
        return early

    async def chain(self, job: Job) -> Chain:
        """The records that were told, behind what they rest on. Raises BoundaryInvalid, ChainBroken and what the ledger
        raises."""
        told = tuple(BoundaryRecord.from_json(text) for text in job.add.load.early)
        last = told[-1]
        if last.id != job.add.load.boundary or any(one.state != "committed" for one in told):
            raise BoundaryInvalid(
                "early", last.id, "must be the records of the boundary, as its commit writes them"
            )
        parents = [name for name in last.parents if name not in {one.id for one in told}]
        known = self._known()
        found = {name: known[name] for name in parents if name in known}
        found |= await self._ledger.get_checkpoints([name for name in parents if name not in found])
        if len(found) < len(parents):
            raise ChainBroken(f"boundary {last.id} rests on a record that is not there")
        chain = (*(found[name] for name in parents), *told)
        check_chain(chain)
        return chain

    async def follow(self, job: Job, early: Early) -> None:
        """Wait for the commit, compare, and open the gate or withdraw the job."""
        kind, words = await self._compare(job, early)
        if job.ended:
            return
        if kind:
            self.give_up(job, kind, words)
            return
        early.committed.set_result(None)
        self._settle(job.key, True)
        if early.restored is not None:
            self._finish(job, early)

    async def _compare(self, job: Job, early: Early) -> tuple[str, str]:
        """The kind of failure and its words; empty: the committed chain is the one that was told."""
        boundary = early.chain[-1].id
        try:
            async with asyncio.timeout(self._seconds):
                chain = await self._committed(boundary, early)
        except TimeoutError:
            return "uncommitted", f"no commit within {self._seconds:g} s"
        except (LedgerError, BoundaryInvalid, ConnectionError) as error:
            return "ledger", str(error)
        except (
            Exception
        ) as error:  # whatever it is, the request must not wait behind a gate that nobody opens
            log.exception("request %s: its early read cannot be compared", job.add.request_id)
            return "error", f"{type(error).__name__}: {error}"
        if not chain:
            return "missing_record", "its record has gone"
        if chain != early.chain:
            return "differs", "the committed records are not those that were told"
        return "", ""

    async def _committed(self, boundary: str, early: Early) -> Chain:
        """The committed chain: pushed by the ledger, or read once the router has spoken, whichever is first."""
        pushed = asyncio.ensure_future(self._ledger.wait_committed(boundary))
        told = asyncio.ensure_future(early.told.wait())
        over: asyncio.Future[Any] = early.committed
        waiting: list[asyncio.Future[Any]] = [pushed, told, over]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                return ()  # the job has ended
            if not pushed.done() or pushed.cancelled() or pushed.exception() is not None:
                await asyncio.wait(waiting[1:], return_when=asyncio.FIRST_COMPLETED)
                return await self._ledger.get_chain(boundary, self._known())
            record = pushed.result()
            return () if record is None else await self._ledger.chain_of(record, self._known())
        finally:
            for task in (pushed, told):
                task.cancel()
            await asyncio.gather(pushed, told, return_exceptions=True)

    @staticmethod
    def of(job: Job) -> Early | None:
        """The early load that is under way, if the job has one."""
        early: Early | None = job.state.get(_KEY)
        return early

    def restored(self, job: Job, early: Early, tokens: int, reports: list[Any]) -> None:
        """Every rank has reported; nothing is made of it before the record is known."""
        early.restored = tokens, reports
        if (
            early.committed.done() or not reports
        ):  # no rank was asked: all of it was in this worker's own cache
            self._finish(job, early)

    def _finish(self, job: Job, early: Early) -> None:
        assert early.restored is not None
        restored, early.restored = early.restored, None
        self._go_on(job, *restored)

    def give_up(self, job: Job, kind: str, words: str) -> None:
        """The router sends the request anew, as if nothing had been told."""
        if job.ended:
            return
        log.warning("request %s: its early read is withdrawn: %s: %s", job.add.request_id, kind, words)
        HANDOFF.failed("early", kind)
        if job.progress is not None:
            job.progress.end(kind)
        loaded = pb.Loaded(id=job.add.id, failure=kind, withdrawn=True)
        job.stream.send(pb.FromWorker(loaded=loaded))
        self._withdraw(job)

    def ended(self, job: Job) -> None:
        """The job has left the engine, however it did."""
        early: Early | None = job.state.pop(_KEY, None)
        if early is None:
            return
        if not early.committed.done():
            job.state.pop("loading", None)  # what ranks still report is about nothing
            early.committed.set_exception(LedgerError("the request ended before its boundary was committed"))
        self._settle(job.key, False)
