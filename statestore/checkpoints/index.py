# SPDX-License-Identifier: Apache-2.0
"""One worker's view of the committed checkpoints: which of them a prompt may start from.

The ledger's watch feeds it, so it may be behind by a moment: what it finds is a hint. Whoever publishes pins what was
found (the ledger compares that it is still there); whoever only reads may lose the race and finds objects missing.

A look-up hashes the prompt once, at the lengths that are known and no others, and takes the longest prefix whose whole
chain is here and can be read with this worker's geometry. Among checkpoints of one prefix the newest wins.

A checkpoint is used when a look-up takes it, and when a record that rests on it appears; `last_used` orders evictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from statestore.boundary import BoundaryInvalid, BoundaryRecord
from statestore.checkpoints.chain import check_chain
from statestore.geometry import Geometry, GeometryError
from statestore.ledger import Chain, Ledger, LedgerError
from statestore.prefix import prefix_hashes
from statestore.reshard import GeometryMismatch, compatible

log = logging.getLogger(__name__)

_PAUSE = 1.0
"""Seconds before a watch that ended is begun again."""


class CheckpointIndex:
    """See the module's description. Belongs to one event loop."""

    def __init__(self, geometry: Geometry, clock: Callable[[], float] = time.monotonic) -> None:
        self._geometry, self._clock = geometry, clock
        self._records: dict[str, BoundaryRecord] = {}
        self._by_prefix: dict[str, list[BoundaryRecord]] = {}
        self._lengths: Counter[int] = Counter()
        self._children: dict[str, set[str]] = {}
        self._used: dict[str, float] = {}
        self._bad: set[str] = set()
        self._readable: dict[str, bool] = {}
        self.on_gone: Callable[[BoundaryRecord], None] = lambda record: None
        """Called when the ledger shows a checkpoint no more."""

    @property
    def records(self) -> Mapping[str, BoundaryRecord]:
        """Every committed checkpoint that is known, by id."""
        return self._records

    async def follow(self, ledger: Ledger) -> None:
        """Keep up with the ledger until cancelled."""
        while True:
            try:
                async with contextlib.aclosing(ledger.watch_checkpoints()) as states:
                    async for records in states:
                        self.apply(records)
            except (LedgerError, ConnectionError, TimeoutError) as error:
                log.warning("the watch of the checkpoints ended: %s", error)
            await asyncio.sleep(_PAUSE)

    def apply(self, records: Mapping[str, BoundaryRecord]) -> None:
        """These are the committed checkpoints now."""
        for gone in [record for name, record in self._records.items() if name not in records]:
            self.remove(gone.id)
            self.on_gone(gone)
        self.add(record for name, record in records.items() if name not in self._records)

    def add(self, records: Iterable[BoundaryRecord]) -> None:
        """Committed checkpoints; what they rest on has been used."""
        now = self._clock()
        for record in sorted(records, key=lambda record: record.created):
            if record.id in self._records:
                continue
            self._records[record.id] = record
            self._used[record.id] = now
            self._lengths[record.length] += 1
            self._by_prefix.setdefault(record.prefix_hash, []).append(record)
            if record.parents:
                self._children.setdefault(record.parents[-1], set()).add(record.id)
            self.touch(record.parents)

    def remove(self, boundary: str) -> None:
        """A checkpoint is gone."""
        record = self._records.pop(boundary, None)
        if record is None:
            return
        self._used.pop(boundary, None)
        self._bad.discard(boundary)
        self._lengths[record.length] -= 1
        if not self._lengths[record.length]:
            del self._lengths[record.length]
        same = self._by_prefix[record.prefix_hash]
        same.remove(record)
        if not same:
            del self._by_prefix[record.prefix_hash]
        if record.parents:
            siblings = self._children[record.parents[-1]]
            siblings.discard(boundary)
            if not siblings:
                del self._children[record.parents[-1]]

    def quarantine(self, boundary: str) -> None:
        """A load of this checkpoint has failed a check: it, and what rests on it, is not found any more."""
        if boundary in self._records:
            self._bad.add(boundary)

    def is_quarantined(self, boundary: str) -> bool:
        """Whether a load of it has failed."""
        return boundary in self._bad

    def touch(self, boundaries: Iterable[str]) -> None:
        """They have been used."""
        now = self._clock()
        for boundary in boundaries:
            if boundary in self._used:
                self._used[boundary] = now

    def last_used(self, boundary: str) -> float:
        """The clock's time; what failed a check, and what is not known, counts as never used."""
        return 0.0 if boundary in self._bad else self._used.get(boundary, 0.0)

    def is_leaf(self, boundary: str) -> bool:
        """Whether no checkpoint rests on it (a request's own boundary may: the ledger knows)."""
        return boundary not in self._children

    def below(self, boundary: str) -> Iterator[str]:
        """Ids of every known checkpoint that rests on it, nearer ones before what rests on them."""
        waiting = [*self._children.get(boundary, ())]
        while waiting:
            name = waiting.pop()
            yield name
            waiting += self._children.get(name, ())

    def lookup(self, tokens: Sequence[int], cache_salt: str, most: int) -> Chain:
        """The chain of the longest checkpoint of at most `most` tokens of this prompt; empty: there is none."""
        lengths = [length for length in self._lengths if 0 < length <= most]
        if not lengths:
            return ()
        hashes = prefix_hashes(tokens[: max(lengths)], lengths, cache_salt)
        for length in sorted(hashes, reverse=True):
            for record in reversed(self._by_prefix.get(hashes[length], ())):
                chain = self._chain(record) if record.length == length else ()
                if chain:
                    self.touch(one.id for one in chain)
                    return chain
        return ()

    def usable(self, record: BoundaryRecord) -> bool:
        """Whether a committed checkpoint, which may not have been seen here yet, can be built upon."""
        known = {**self._records, record.id: record}
        return bool(self._chain(record, known))

    def _chain(self, record: BoundaryRecord, known: Mapping[str, BoundaryRecord] | None = None) -> Chain:
        """A record with what it rests on, when all of it is here, joins, can be read here and is in no quarantine."""
        known = self._records if known is None else known
        names = (*record.parents, record.id)
        if any(name in self._bad or name not in known for name in names):
            return ()
        chain = tuple(known[name] for name in names)
        if not all(self._can_read(one) for one in chain):
            return ()
        try:
            check_chain(chain)
        except BoundaryInvalid as error:
            log.error("checkpoint %s cannot be used: %s", record.id, error)
            return ()
        return chain

    def _can_read(self, record: BoundaryRecord) -> bool:
        if record.model_digest != self._geometry.model_digest:
            return False
        answer = self._readable.get(record.geometry)
        if answer is None:
            try:
                compatible(Geometry.from_json(record.geometry), self._geometry)
                answer = True
            except (GeometryMismatch, GeometryError) as error:
                log.warning("checkpoints of another geometry are left out: %s", error)
                answer = False
            self._readable[record.geometry] = answer
        return answer
