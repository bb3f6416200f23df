# SPDX-License-Identifier: Apache-2.0
"""What a worker's service asks of the connector with a request, and what it hears when a publish is over.

A publish is a chain of links (docs/checkpoints.md): checkpoints on the way, and one final link. All of them share the
publish's epoch and are told apart by their number. Plain data; nothing here imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry
from statestore.connector.passes import Passes
from statestore.ledger import MAX_LINKS

if TYPE_CHECKING:
    from statestore.connector.messages import RankReport

PARAMS = "deltaserve"
"""Key in a request's kv_transfer_params under which the service hands over its `Intents`."""


@dataclass
class PublishIntent:
    """Publish this request's state as a boundary, and checkpoints on the way."""

    epoch: Epoch
    length: int | None
    """Tokens whose state the final link is: the request's prompt. None: whatever has been computed when the request
    ends by itself, which is the end of an answer."""
    segment: str = ""
    """Preferred Mooncake segments, the reader's ranks in order, comma-separated; empty: the writer's own."""
    packing_dcp: int = 1
    packing_interleave: int = 1
    base: int = 0
    """Length of the checkpoint that the first link rests on."""
    checkpoint_tokens: int = 0
    """Least distance of two checkpoints; 0: none on the way."""
    first_link: int = 0
    """Number of the first link."""

    def __post_init__(self) -> None:
        if self.base < 0 or (self.length is not None and self.base >= self.length):
            raise ValueError(f"base: {self.base} must be at least 0 and less than length {self.length}")
        if self.checkpoint_tokens < 0 or self.first_link < 0:
            raise ValueError(
                f"checkpoint_tokens {self.checkpoint_tokens} and first_link {self.first_link} must be at least 0"
            )


@dataclass
class LoadIntent:
    """Restore this boundary first: its chain, oldest record first, the boundary itself last."""

    records: tuple[BoundaryRecord, ...]
    early: bool = False
    """It is not committed yet: nothing is scheduled before the service has opened the gate (gate.py)."""

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("records: a chain has at least one record")

    @property
    def length(self) -> int:
        """Tokens whose state is restored."""
        return self.records[-1].length


@dataclass
class Intents:
    """What a request carries: a load, a publish, or both."""

    load: LoadIntent | None = None
    publish: PublishIntent | None = None


@dataclass(frozen=True)
class LinkOutcome:
    """One link, reported by every rank."""

    link: int
    base: int
    length: int
    reports: tuple[RankReport, ...]
    """In order of rank."""

    @property
    def failure(self) -> RankReport | None:
        """The first rank that failed; None when all have written."""
        return next((report for report in self.reports if report.failure), None)

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks have written."""
        return sum(report.nbytes for report in self.reports)

    @property
    def streamed(self) -> int:
        """Of them, those that left while their step still computed."""
        return sum(report.streamed for report in self.reports)

    def objects(self) -> list[ObjectEntry]:
        """What lies in the pool."""
        return [entry for report in self.reports for entry in report.objects]


@dataclass(frozen=True)
class PublishOutcome:
    """A publish that is over: every link that went out has been reported by every rank."""

    epoch: Epoch
    base: int
    """Where the first of `links` begins: the intent's base; 0 when the request's own load has failed, because then
    every row was computed here."""
    links: tuple[LinkOutcome, ...]
    """Whole links that join without a gap, oldest first. When `complete`, the last one is the boundary itself."""
    dropped: tuple[LinkOutcome, ...] = ()
    """Links that failed, and those that rest on them: their objects are of no use."""
    complete: bool = False
    failure: str = ""
    """Why it is not complete: a rank's kind of failure, or "aborted"; the counter's label."""
    detail: str = ""
    tokens: list[int] = field(default_factory=list)
    """The tokens that the final link covers, of a publish whose intent did not say its length."""
    passes: Passes = field(default_factory=Passes)
    """The forward passes that computed the prompt; none for the end of an answer."""

    @property
    def length(self) -> int:
        """Tokens of the boundary; 0 without one."""
        return self.links[-1].length if self.complete else 0

    def objects(self) -> list[ObjectEntry]:
        """Everything of this epoch that lies in the pool."""
        return [entry for link in (*self.links, *self.dropped) for entry in link.objects()]


__all__ = [
    "MAX_LINKS",
    "PARAMS",
    "Intents",
    "LinkOutcome",
    "LoadIntent",
    "PublishIntent",
    "PublishOutcome",
]
