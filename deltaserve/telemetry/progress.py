# SPDX-License-Identifier: Apache-2.0
"""Handoffs under way, rank by rank: what a worker's service tells its routers once a second, for people to look at.

    waiting ──▶ computing ──▶ writing ──▶ committing ──▶ committed        a publish; any of them may end as failed
    waiting ──▶ reading ──▶ loaded                                        a load

A rank is `idle` until its job goes out, then `busy`, then `done` or `failed`. A publish with checkpoints on the way has
several jobs a rank; what a rank has moved is added up. A request may have jobs of both kinds: a publish that begins
with the load of a checkpoint, a load whose answer is written as one; those of the other kind are not this handoff's.
Plain data on the service's event loop; the connector's
scheduler half reports through statestore/connector/events.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deltaserve.wire import worker_pb2 as pb

Stage = Literal["publish", "load"]
KEPT = 64
"""Handoffs remembered, under way and ended ones together."""
ENDED_SECONDS = 15.0
"""How long one that has ended is still told."""


class Report(Protocol):
    """What a rank says of one job (statestore.connector.messages.RankReport)."""

    rank: int
    failure: str
    nbytes: int
    seconds: float


@dataclass
class Rank:
    """One rank's part."""

    state: str = "idle"
    nbytes: int = 0
    seconds: float = 0.0
    failure: str = ""


@dataclass
class Progress:
    """One publish or load."""

    request_id: str
    stage: Stage
    tokens: int
    """Of the boundary."""
    boundary: str = ""
    began: float = field(default_factory=time.monotonic)
    state: str = "waiting"
    outcome: str = ""
    """Empty: under way; `committed`, `loaded`, or the kind of failure."""
    ended: float = 0.0
    ranks: dict[int, Rank] = field(default_factory=dict)
    _out: int = 0
    """Reports of ranks that are still to come."""

    def go(self, kind: Stage, ranks: int) -> None:
        """A job went out to every rank."""
        if kind != self.stage:
            return
        if not self.outcome:
            self.state = "writing" if self.stage == "publish" else "reading"
        self._out += ranks
        for number in range(ranks):
            self.ranks.setdefault(number, Rank()).state = "busy"

    def reported(self, kind: Stage, reports: Iterable[Report]) -> None:
        """Ranks have done a job, or have failed."""
        if kind != self.stage:
            return
        for report in reports:
            rank = self.ranks.setdefault(report.rank, Rank())
            rank.nbytes += report.nbytes
            rank.seconds += report.seconds
            rank.failure = rank.failure or report.failure
            rank.state = "failed" if rank.failure else "done"
            self._out -= 1
        if self._out <= 0 and not self.outcome:
            self.state = "computing" if self.stage == "publish" else "reading"

    def end(self, outcome: str) -> None:
        """It is over; the first call counts."""
        if not self.outcome:
            self.outcome, self.ended = outcome, time.monotonic()
            self.state = outcome if outcome in ("committed", "loaded") else "failed"

    def message(self, now: float) -> pb.Handoff:
        """As it is told to a router."""
        return pb.Handoff(
            request_id=self.request_id,
            stage=self.stage,
            boundary=self.boundary,
            tokens=self.tokens,
            age=now - self.began,
            took=self.ended - self.began if self.outcome else 0.0,
            state=self.state,
            outcome=self.outcome,
            ranks=[
                pb.RankProgress(
                    rank=number,
                    state=rank.state,
                    bytes=rank.nbytes,
                    seconds=rank.seconds,
                    failure=rank.failure,
                )
                for number, rank in sorted(self.ranks.items())
            ],
        )


class Board:
    """The handoffs of one worker, newest last."""

    def __init__(self) -> None:
        self._all: deque[Progress] = deque(maxlen=KEPT)

    def begin(self, request_id: str, stage: Stage, tokens: int, boundary: str = "") -> Progress:
        """Remember a handoff that has just begun."""
        made = Progress(request_id, stage, tokens, boundary)
        self._all.append(made)
        return made

    def messages(self) -> list[pb.Handoff]:
        """Those under way, and those that ended within ENDED_SECONDS."""
        now = time.monotonic()
        return [one.message(now) for one in self._all if not one.outcome or now - one.ended < ENDED_SECONDS]
