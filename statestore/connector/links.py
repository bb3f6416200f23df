# SPDX-License-Identifier: Apache-2.0
"""The links of one publish: when the next one is due, where it begins, and what has become of all of them.

A link begins where the last whole one ended. When a rank reports that it could not write one, that link and those that
rest on it are of no use, and the next begins where the failed one began. So what is whole always joins without a gap.

A checkpoint is due where a step ends on a block boundary: there the state stays in a block of its own, which the next
step copies from and does not write to. Anywhere else the running state is overwritten in place by the next step. It is
due as well where a step has taken the state on its way, into a block of its own (inside.py). Plain arithmetic; nothing
here imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statestore.connector.intents import MAX_LINKS, LinkOutcome, PublishIntent, PublishOutcome

if TYPE_CHECKING:
    from statestore.connector.messages import RankReport


@dataclass(frozen=True)
class Link:
    """One link that is going out."""

    number: int
    base: int
    length: int
    final: bool


@dataclass
class _Sent:
    link: Link
    reports: list[RankReport] = field(default_factory=list)

    def outcome(self) -> LinkOutcome:
        ordered = tuple(sorted(self.reports, key=lambda report: report.rank))
        return LinkOutcome(self.link.number, self.link.base, self.link.length, ordered)


class Links:
    """The links of one publish, by one request."""

    def __init__(self, intent: PublishIntent, ranks: int) -> None:
        self.intent = intent
        self._ranks = ranks
        self._base = intent.base
        self._sent: list[_Sent] = []
        self._closed = False

    @property
    def started(self) -> bool:
        """Whether a link has gone out."""
        return bool(self._sent)

    @property
    def closed(self) -> bool:
        """Whether no further link will go out: the prompt is computed, or the request has ended."""
        return self._closed

    @property
    def over(self) -> bool:
        """No further link will go out, and every rank has reported all that did."""
        return self._closed and all(len(sent.reports) == self._ranks for sent in self._sent)

    @property
    def end(self) -> int:
        """Where the next link begins."""
        chain = self._chain(unreported=True)
        return chain[-1].link.length if chain else self._base

    def rebase(self) -> None:
        """The request's load has failed: it computes everything, so the first link begins at 0."""
        assert not self._sent, "a link went out before the load was over"
        self._base = 0

    def due(self, computed: int, block: int) -> Link | None:
        """The link to send with the step after which `computed` tokens have been computed; None when none is due.

        `block`: tokens of one block of KDA state.
        """
        length = self.intent.length
        if self._closed:
            return None
        if length is not None and computed >= length:
            return self._send(length, final=True)
        return None if computed % block else self._checkpoint(computed)

    def passed(self, length: int) -> Link | None:
        """The link of a state that a step takes after `length` tokens, before its end; None when none is due. Asked
        before `due` of the same step."""
        if self._closed or self.intent.length is None or length >= self.intent.length:
            return None
        return self._checkpoint(length)

    def _checkpoint(self, length: int) -> Link | None:
        if self.intent.checkpoint_tokens == 0 or len(self._sent) >= MAX_LINKS - 1:
            return None
        return self._send(length, final=False) if length - self.end >= self._spacing else None

    def finish(self, computed: int) -> Link | None:
        """The final link of a publish that did not say its length; None when there is nothing new to publish."""
        assert self.intent.length is None
        return self._send(computed, final=True) if not self._closed and computed > self.end else None

    def close(self) -> None:
        """The request has ended: no further link."""
        self._closed = True

    def report(self, number: int, reports: list[RankReport]) -> bool:
        """Ranks have reported link `number`; True when the last of them has."""
        sent = next(sent for sent in self._sent if sent.link.number == number)
        sent.reports.extend(reports)
        return len(sent.reports) == self._ranks

    def outcome(self, tokens: list[int]) -> PublishOutcome:
        """What has become of the publish, once it is over."""
        assert self.over
        chain = self._chain()
        complete = bool(chain) and chain[-1].link.final
        links = tuple(sent.outcome() for sent in chain)
        dropped = tuple(sent.outcome() for sent in self._sent if sent not in chain)
        failure, detail = "", ""
        if not complete:
            failure, detail = "aborted", "the request ended before its last prompt token"
            failed = next((report for link in dropped if (report := link.failure) is not None), None)
            if failed is not None:
                failure, detail = failed.failure, f"rank {failed.rank}: {failed.detail}"
        covered = tokens if complete else []
        return PublishOutcome(
            self.intent.epoch, self._base, links, dropped, complete, failure, detail, covered
        )

    @property
    def _spacing(self) -> int:
        """Least distance of two checkpoints: wider in a prompt that would have more links than a commit can hold."""
        span = (self.intent.length or 0) - self._base
        return max(self.intent.checkpoint_tokens, -(-span // (MAX_LINKS - 1)))

    def _send(self, length: int, final: bool) -> Link:
        link = Link(self.intent.first_link + len(self._sent), self.end, length, final)
        self._sent.append(_Sent(link))
        self._closed = self._closed or final
        return link

    def _chain(self, unreported: bool = False) -> list[_Sent]:
        """Links that are whole (or may still be: `unreported`) and join, oldest first."""
        chain: list[_Sent] = []
        end = self._base
        for sent in self._sent:
            whole = not any(report.failure for report in sent.reports)
            if whole and sent.link.base == end and (unreported or len(sent.reports) == self._ranks):
                chain.append(sent)
                end = sent.link.length
        return chain
