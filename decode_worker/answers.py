# SPDX-License-Identifier: Apache-2.0
"""The end of an answer as a checkpoint, so that the next turn of a conversation starts there.

The record is opened when the request comes, with the pin on what the prompt rests on; it is committed under the prefix
of prompt and answer when the request has ended by itself, off every critical path. A request that is aborted, that ends
too short, or whose state does not fit into this worker's budget, leaves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job
from deltaserve.telemetry import HANDOFF
from statestore.checkpoints.keeping import Background
from statestore.checkpoints.publication import Publication, Publisher
from statestore.connector.intents import PublishIntent, PublishOutcome
from statestore.ledger import Chain, LedgerError
from statestore.reshard import Packing

log = logging.getLogger(__name__)

EXPECTED_TOKENS = 512
"""Tokens of an answer for which room is made; limits of clients are far above what they get."""

_KEY = "answer"


class Answers:
    """See the module's description. Belongs to one event loop."""

    def __init__(
        self,
        config: WorkerConfig,
        publisher: Publisher,
        background: Background,
        forget: Callable[[Job], None],
    ) -> None:
        self._publisher, self._background, self._forget = publisher, background, forget
        self._least = config.checkpoint_min_tokens
        # The state after a speculative step holds tokens that may not have been accepted.
        self._on = config.checkpoint_limit > 0 and publisher.geometry.num_spec == 0

    async def begin(
        self,
        job: Job,
        prompt: Sequence[int],
        parents: Chain,
        max_tokens: int | None,
        after: asyncio.Future[None] | None = None,
    ) -> PublishIntent | None:
        """What the connector is asked to do when the request ends; None: nothing will be kept.

        `after`: done when `parents` are committed.
        """
        answer = EXPECTED_TOKENS if max_tokens is None else max_tokens
        if not self._on or len(prompt) + answer <= self._least:
            return None
        publication = await self._publisher.start(
            prompt, job.add.cache_salt, parents, Packing(), answer=min(answer, EXPECTED_TOKENS), after=after
        )
        if publication is None:
            HANDOFF.failed("answer", "store_full")
            return None
        job.state.update({_KEY: publication, "keep": True})
        if job.ended:
            # Aborted while it was being prepared: the engine never hears of it.
            self.failed(job, "aborted")
        return PublishIntent(publication.epoch, None, base=publication.base)

    def ended(self, job: Job, reason: str) -> None:
        """The request has left the engine."""
        if reason == "finished":
            return
        job.state["ended"] = reason
        if reason != "aborted":
            # Refused: no rank will ever report.
            self.failed(job, reason)

    def written(self, job: Job, outcome: PublishOutcome) -> None:
        """Every rank has reported."""
        if job.state.pop("keep", False):
            self._background(self._settle(job, outcome))

    def failed(self, job: Job, reason: str) -> None:
        """No rank has written or will."""
        if job.state.pop("keep", False):
            log.debug("request %s: the end of its answer is not kept: %s", job.add.request_id, reason)
            self._background(self._drop(job, None))

    async def _settle(self, job: Job, outcome: PublishOutcome) -> None:
        publication: Publication = job.state[_KEY]
        if not outcome.complete:
            if outcome.failure != "aborted":
                HANDOFF.failed("answer", outcome.failure)
                log.warning("request %s: its end is not kept: %s", job.add.request_id, outcome.detail)
            if outcome.failure == "store_full":
                await self._publisher.keeper.evict_some(self._publisher.missing_room(publication))
            await self._drop(job, outcome)
            return
        if "ended" in job.state or outcome.length < self._least:
            await self._drop(job, outcome)
            return
        if not await self._publisher.has_room():
            HANDOFF.failed("answer", "store_full")
            await self._drop(job, outcome)
            return
        try:
            links = self._publisher.links(publication, outcome, outcome.tokens)
            await self._publisher.commit(publication, links)
            nbytes = sum(link.nbytes for link in outcome.links)
            HANDOFF.published(nbytes, time.monotonic() - publication.began, "answer")
        except (LedgerError, ConnectionError, TimeoutError, ValueError) as error:
            HANDOFF.failed("answer", "ledger")
            log.warning("request %s: the end of its answer is not kept: %s", job.add.request_id, error)
            await self._drop(job, outcome)
            return
        self._done(job)

    def _done(self, job: Job) -> None:
        # The connector may speak before the step that ends the request has been delivered: its tokens must find the
        # job, and its end forgets it.
        if job.ended:
            self._forget(job)

    async def _drop(self, job: Job, outcome: PublishOutcome | None) -> None:
        self._done(job)
        await self._publisher.discard(job.state[_KEY], outcome)
