# SPDX-License-Identifier: Apache-2.0
"""The life of one publish, as a worker's service sees it; what the prefill and the decode role have in common.

    start    room is made for its bytes (checkpoints go first), an epoch is taken, the record is opened with its pin
    (the engine computes and writes; its connector reports a `PublishOutcome`)
    commit   the links that were written become visible together, or rest on what others have committed meanwhile
    discard  instead: every object of the epoch and the record go

docs/checkpoints.md has the protocol and its crash paths.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from deltaserve.config import WorkerConfig
from deltaserve.telemetry import HANDOFF
from statestore.boundary import BoundaryRecord, Epoch, RankEntry, boundary_id
from statestore.checkpoints.budget import Budget, publish_bytes
from statestore.checkpoints.chain import MAX_PARENTS, adopt
from statestore.checkpoints.index import CheckpointIndex
from statestore.checkpoints.keeping import Background, Keeper
from statestore.connector.intents import PublishOutcome
from statestore.connector.messages import RankReport
from statestore.geometry import Geometry
from statestore.ledger import (
    MAX_LINKS,
    Chain,
    CheckpointExists,
    CommitConflict,
    Ledger,
    ParentGone,
)
from statestore.pool import Pool
from statestore.prefix import prefix_hash, prefix_hashes
from statestore.reshard import Packing
from statestore.sweeping import object_keys

log = logging.getLogger(__name__)

_ADOPTIONS = 3
"""Commits of one publish that may find another worker's checkpoints."""

_TRANSIENT = ("store_unavailable", "timeout", "ledger")
"""Kinds of failed loads that say nothing about what was to be loaded."""


@dataclass
class Publication:
    """A publish on its way."""

    record: BoundaryRecord
    """As it was opened."""
    chain: Chain
    """What it rests on."""
    cache_salt: str
    spacing: int
    """Least distance of checkpoints on the way; 0: there will be none."""
    opening: asyncio.Future[None]
    began: float
    """Seconds, monotonic."""
    attempted: list[BoundaryRecord] = field(default_factory=list)
    """What commits have tried to make visible: one whose answer was lost may have happened."""

    @property
    def epoch(self) -> Epoch:
        """Of every link."""
        return self.record.epoch

    @property
    def base(self) -> int:
        """Where the first link begins."""
        return self.record.base


@dataclass(frozen=True)
class _Room:
    """What a publish may write: bytes in all, bytes of checkpoints among them, and the distance of checkpoints."""

    nbytes: int
    kept: int
    spacing: int


@dataclass(frozen=True)
class Committed:
    """What a commit has made visible."""

    links: tuple[BoundaryRecord, ...]
    """Oldest first; none when every one of them was there already."""
    copies: tuple[BoundaryRecord, ...]
    """Links that others had committed; their objects go."""


class Publisher:
    """See the module's description. Belongs to one event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        worker_id: str,
        geometry: Geometry,
        ledger: Ledger,
        pool: Pool,
        background: Background,
    ) -> None:
        self.config, self.geometry, self.ledger = config, geometry, ledger
        self._worker_id, self._background = worker_id, background
        self.index = CheckpointIndex(geometry)
        self.budget = Budget(config.store.segment_bytes, config.checkpoint_limit)
        self.keeper = Keeper(ledger, pool, self.index, self.budget, background)
        HANDOFF.owns("checkpoint", lambda: len(self.budget.checkpoints))
        HANDOFF.owns("pending", lambda: self._pending)
        HANDOFF.store(lambda: self.budget.used, self.budget.capacity)
        self._pending = 0
        self.lease = 0
        self._counter = count(1)

    async def start(
        self,
        tokens: Sequence[int],
        cache_salt: str,
        chain: Chain,
        packing: Packing,
        *,
        answer: int = 0,
        spacing: int = 0,
        after: asyncio.Future[None] | None = None,
    ) -> Publication | None:
        """Open a publish of the state after `tokens`, which rests on `chain`; None: there is no room for it.

        `spacing`: least distance of checkpoints on the way; the publication may have wider ones, or none, where the
        budget does not hold as many. `answer`: the publish ends with the answer instead, of about so many tokens, and
        what it publishes is a checkpoint; its prefix is known then. `after`: an answer's record is opened when this is
        done, because `chain` is not committed before; what it raises, the opening raises.

        A record that rests on something is open when this returns, so that nothing evicts it; else the opening goes on
        beside the compute. A parent that has been evicted meanwhile is done without.
        """
        if len(chain) > MAX_PARENTS:
            chain = ()
        base = chain[-1].length if chain else 0
        end = len(tokens) + answer
        if answer:
            room = self._room_for_answer(base, end)
        else:
            room = await self._room(base, end, spacing, chain)
            if room is None and chain:
                # Checkpoints go before a request is refused, the one that it would have started from too.
                chain, base = (), 0
                room = await self._room(base, end, spacing, chain)
        if room is None:
            self._refused(base, end)
            return None
        epoch = Epoch(self.lease, next(self._counter))
        self.budget.hold(str(epoch), room.nbytes, room.kept)
        if answer:
            self._background(self.keeper.make_room(spare=[one.id for one in chain]))
        model, prefix = self.geometry.model_digest, prefix_hash(tokens, cache_salt)
        record = BoundaryRecord(
            id=f"answer.{epoch}" if answer else boundary_id(model, prefix, epoch),
            model_digest=model,
            prefix_hash=prefix,
            length=len(tokens),
            epoch=epoch,
            owner=self._worker_id,
            geometry=self.geometry.to_json(),
            packing_dcp=packing.dcp,
            packing_interleave=packing.interleave,
            created=time.time(),
            ranks=tuple(RankEntry(rank) for rank in range(self.geometry.tp)),
            base=base,
            parents=tuple(one.id for one in chain),
            links=MAX_LINKS if room.spacing else 1,
            reusable=bool(answer),
        )
        opening = self._open(record, after)
        if chain and not answer:
            await asyncio.wait([opening])
            if isinstance(opening.exception(), ParentGone):
                self.keeper.gone(chain[-1])
                chain = ()
                # It writes all rows now: room for those that its chain would have had is looked for like any other.
                self.budget.free(str(epoch))
                room = await self._room(0, end, spacing, chain)
                if room is None:
                    self._refused(0, end)
                    return None
                self.budget.hold(str(epoch), room.nbytes, room.kept)
                record = replace(record, base=0, parents=(), links=MAX_LINKS if room.spacing else 1)
                opening = self._open(record)
        HANDOFF.opened()
        self._pending += 1
        return Publication(record, chain, cache_salt, room.spacing, opening, time.monotonic())

    async def _room(self, base: int, end: int, spacing: int, chain: Chain) -> _Room | None:
        """Room for a boundary of the tokens [base, end) with checkpoints at this distance, wider ones, or none.

        `chain`, on which it will rest, is not evicted for it.
        """
        spare = [one.id for one in chain]
        while True:
            links = min((end - base) // spacing, MAX_LINKS - 1) if spacing else 0
            nbytes = publish_bytes(self.geometry, base, end, links)
            kept = publish_bytes(self.geometry, base, end, links - 1) if links else 0
            possible = kept <= self.budget.checkpoint_limit
            if possible and await self.keeper.make_room(nbytes, kept, spare):
                return _Room(nbytes, kept, spacing)
            if not links:
                # Checkpoints beyond their limit, which others pin, are no reason to be without a boundary.
                return _Room(nbytes, 0, 0) if self.budget.fits(nbytes) else None
            spacing = 2 * spacing if 2 * spacing <= end - base else 0

    def _room_for_answer(self, base: int, end: int) -> _Room | None:
        """An answer takes its time: room that is not there yet is made meanwhile, and looked at again when it ends."""
        nbytes = publish_bytes(self.geometry, base, end)
        possible = self.budget.held_bytes + nbytes <= self.budget.capacity
        return _Room(nbytes, nbytes, 0) if possible and nbytes <= self.budget.checkpoint_limit else None

    async def has_room(self) -> bool:
        """Whether all that is promised to be kept can be kept."""
        return await self.keeper.make_room()

    def _open(
        self, record: BoundaryRecord, after: asyncio.Future[None] | None = None
    ) -> asyncio.Future[None]:
        async def opened() -> None:
            if after is not None:
                await asyncio.shield(after)
            await self.ledger.open(record)

        opening = asyncio.ensure_future(opened())
        # A failure is seen at the commit; a request that never gets there must not be called a forgotten error.
        opening.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        return opening

    def links(
        self, publication: Publication, outcome: PublishOutcome, tokens: Sequence[int]
    ) -> list[BoundaryRecord]:
        """The records of a complete outcome; `tokens` are those that its final link covers.

        Raises BoundaryInvalid when what the ranks wrote is not what a record may hold.
        """
        hashes = prefix_hashes(tokens, [link.length for link in outcome.links], publication.cache_salt)
        opened = publication.record
        parents = opened.parents if outcome.base else ()
        links = []
        for link in outcome.links:
            prefix = hashes[link.length]
            final = link is outcome.links[-1]
            record = replace(
                opened,
                id=boundary_id(opened.model_digest, prefix, opened.epoch),
                prefix_hash=prefix,
                length=link.length,
                ranks=tuple(
                    RankEntry(report.rank, "written", tuple(report.objects)) for report in link.reports
                ),
                base=link.base,
                parents=parents,
                link=link.link,
                links=1,
                reusable=opened.reusable if final else True,
            )
            links.append(record.committed())
            parents = (*parents, record.id)
        return links

    def _refused(self, base: int, end: int) -> None:
        log.warning(
            "no room for the tokens [%d, %d): %d of %d bytes are in use, %d of them by checkpoints",
            base,
            end,
            self.budget.used,
            self.budget.capacity,
            self.budget.checkpoint_bytes,
        )

    async def commit(self, publication: Publication, links: Sequence[BoundaryRecord]) -> Committed:
        """Make the links visible. Raises LedgerError, ConnectionError and what the opening raised."""
        HANDOFF.written()
        await publication.opening
        opened = publication.record.id
        left, copies, beside = list(links), list[BoundaryRecord](), False
        for _ in range(_ADOPTIONS):
            publication.attempted += left
            try:
                await self.ledger.commit(left, opened, beside)
            except CheckpointExists as error:
                usable = [record for record in error.records if self.index.usable(record)]
                last = left[-1]
                if last.reusable and any(record.prefix_hash == last.prefix_hash for record in usable):
                    await self.ledger.abort(publication.record)
                    copies += left
                    left = []
                    break
                left, more = adopt(left, usable)
                copies += more
                # What cannot be built upon (damaged, of another geometry) is no reason to be without our own.
                beside = not more
                continue
            break
        else:
            raise CommitConflict(f"boundary {opened}: others commit the same checkpoints again and again")
        self._account(publication, left)
        if copies:
            HANDOFF.adopted(len(copies))
            keys = [entry.key for record in copies for entry in record.objects()]
            self._background(self.keeper.give_back([], keys))
        return Committed(tuple(left), tuple(copies))

    def _account(self, publication: Publication, links: Sequence[BoundaryRecord]) -> None:
        self._pending -= 1
        HANDOFF.committed(bool(links))
        checkpoints = [link for link in links if link.reusable]
        self.index.add(checkpoints)
        for record in checkpoints:
            self.budget.keep(record)
        own = sum(link.nbytes for link in links if not link.reusable)
        if own:
            self.budget.hold(str(publication.epoch), own)
        else:
            self.budget.free(str(publication.epoch))
        HANDOFF.kept(self.budget.checkpoint_bytes, len(checkpoints))
        if self.budget.excess() > 0:
            self._background(self.keeper.make_room())

    async def discard(self, publication: Publication, outcome: PublishOutcome | None = None) -> None:
        """Nothing comes of it: objects and records go, those too whose commit may have happened."""
        # The opening may still be under way, or have failed without saying whether it wrote.
        await asyncio.wait([publication.opening])
        publication.opening.exception()
        keys = [entry.key for entry in outcome.objects()] if outcome is not None else []
        name = str(publication.epoch)
        self._pending -= 1
        records = [publication.record, *publication.attempted]
        await self.keeper.give_back(records, keys, lambda: self.budget.free(name))

    async def release(self, boundary: BoundaryRecord, done: Callable[[], None]) -> None:
        """A request needs its boundary no longer: objects, then the record, go; `done` is called when they have."""
        name = str(boundary.epoch)

        def gone() -> None:
            self.budget.free(name)
            done()

        await self.keeper.give_back([boundary], [entry.key for entry in boundary.objects()], gone)

    def missing_room(self, publication: Publication) -> int:
        """Bytes that a publish wanted to write."""
        return self.budget.held(str(publication.epoch))

    def load_failed(self, chain: Chain, report: RankReport) -> None:
        """A load of `chain` failed: unless the store was only away, what was bad in it is found no more, by nobody.

        The report's words name the object; where they do not, it is the record that was to be restored.
        """
        if report.failure in _TRANSIENT:
            return
        bad = [record for record in chain if any(_names(report.detail, key) for key in object_keys(record))]
        bad = [record for record in bad or chain[-1:] if record.reusable]
        for record in bad:
            self.index.quarantine(record.id)
        if bad:
            self._background(self.keeper.condemn(bad))


def _names(words: str, key: str) -> bool:
    at = words.find(key)
    return at >= 0 and not words[at + len(key) : at + len(key) + 1].isdigit()
