# SPDX-License-Identifier: Apache-2.0
"""The workers: the register's view of them, and a link to each.

A link lives as long as its worker is in the register, and longer while requests are on it: a worker that drains or
whose lease lapsed finishes what it holds. When the register cannot be reached, the last view stays in force.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from deltaserve.config import Role
from deltaserve.membership import Membership, View
from router.metrics import Metrics
from router.worker_link import Dial, LinkEvents, WorkerLink
from statestore.reshard import meaning, refusal

log = logging.getLogger(__name__)

DEFAULT_SEQS = 8
"""Requests that a worker runs at once when it does not say."""
ROLES: tuple[Role, ...] = ("prefill", "decode")
WATCH_PAUSE = 1.0


@dataclass(frozen=True)
class Team:
    """The workers that take new requests, of one model and with caches between which state can move."""

    prefills: list[WorkerLink]
    decodes: list[WorkerLink]

    def decodes_but(self, excluded: Collection[str]) -> list[WorkerLink]:
        """The decode workers that are not excluded."""
        if not excluded:
            return self.decodes
        return [link for link in self.decodes if link.worker_id not in excluded]


class Roster:
    """Keeps the links in step with the register. `start` and `close` frame its life."""

    def __init__(self, membership: Membership, events: LinkEvents, metrics: Metrics) -> None:
        self._membership = membership
        self._events = events
        self._metrics = metrics
        self._links: dict[str, WorkerLink] = {}
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._decode_up = asyncio.Event()
        self._teams: list[Team] | None = None
        self._slots: int | None = None
        self._refused: list[str] = []
        self.dial = Dial()
        """How workers are reached; to be set before `start`."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when workers have come or gone."""
        self.view: View | None = None
        """The last view seen; None: none yet."""

    def start(self) -> None:
        """Begin to follow the register."""
        self._task = asyncio.create_task(self._follow(), name="roster")

    async def close(self) -> None:
        """Stop following, close every link. Never raises."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(
            *(link.close() for link in self._links.values()), *self._closing, return_exceptions=True
        )
        self._links.clear()

    def ready(self, role: Role) -> list[WorkerLink]:
        """Links of a role that take new requests."""
        return [link for link in self._links.values() if link.member.role == role and link.ready]

    def decodes(self, excluded: Collection[str] = ()) -> list[WorkerLink]:
        """Decode workers that take new requests and are not excluded."""
        return [link for team in self.teams() for link in team.decodes_but(excluded)]

    @property
    def decode_slots(self) -> int:
        """Requests that the decode workers can run at once; counted anew only after a change."""
        if self._slots is None:
            self._slots = sum(link.description.max_num_seqs or DEFAULT_SEQS for link in self.ready("decode"))
        return self._slots

    def teams(self) -> list[Team]:
        """The workers that take new requests, by model and meaning of their state; made anew only after a change."""
        if self._teams is None:
            found: dict[tuple[str, str], Team] = {}
            for role in ROLES:
                for link in self.ready(role):
                    key = (link.member.model_digest, meaning(link.member.cache))
                    team = found.setdefault(key, Team([], []))
                    (team.prefills if role == "prefill" else team.decodes).append(link)
            self._teams = list(found.values())
        return self._teams

    def _refusals(self) -> list[str]:
        """Why workers of one model are not paired with each other, one sentence for each two caches."""
        # A cluster has many workers and few kinds of caches.
        kinds = [
            {
                (link.member.model_digest, link.member.cache): link
                for link in self._links.values()
                if link.member.role == role
            }
            for role in ROLES
        ]
        return [
            f"{one.worker_id} is not paired with {other.worker_id}: {why}"
            for (model, cache), one in kinds[0].items()
            for (model_too, cache_too), other in kinds[1].items()
            if model == model_too and (why := refusal(cache, cache_too))
        ]

    def links(self, role: Role) -> list[WorkerLink]:
        """Every link of a role, whatever its state; to look at."""
        return [link for link in self._links.values() if link.member.role == role]

    def outstanding(self, role: Role) -> int:
        """Tokens given to the workers of a role and not yet done with."""
        return sum(link.outstanding for link in self.links(role))

    async def wait_decode(self, timeout: float) -> bool:
        """True as soon as a decode worker takes requests; False after `timeout` seconds without one."""
        if self._decode_up.is_set():
            return True
        try:
            await asyncio.wait_for(self._decode_up.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def changed(self) -> None:
        """Recompute what depends on the links' states; links' owners call it after an up or a down."""
        self._teams = self._slots = None
        if self.ready("decode"):
            self._decode_up.set()
        else:
            self._decode_up.clear()
        self.on_change()
        for role in ROLES:
            links = [link for link in self._links.values() if link.member.role == role]
            ready = sum(link.ready for link in links)
            self._metrics.workers.labels(role, "ready").set(ready)
            self._metrics.workers.labels(role, "away").set(len(links) - ready)

    def stalled(self, link: WorkerLink) -> None:
        """Give a worker that was late nothing new until it makes progress (worker_link.py notices)."""
        link.stalled = True
        self.changed()

    def retire_idle(self, link: WorkerLink) -> None:
        """Close a retiring link whose last request has ended."""
        if (
            link.retiring
            and not link.legs
            and self._links.get(link.worker_id) is link
            and not self._is_member(link)
        ):
            self._drop(link)

    def report(self) -> dict[str, Any]:
        """Roles, what is missing, and what that comes to in a word, for /health and the status page."""
        roles: dict[str, Any] = {}
        for role in ROLES:
            links = [link for link in self._links.values() if link.member.role == role]
            roles[role] = {
                "members": len(links),
                "ready": sum(link.ready for link in links),
                "workers": [self._describe(link) for link in sorted(links, key=lambda each: each.worker_id)],
            }
        missing: list[str] = []
        if self.view is None:
            missing.append("register: etcd has not been reached yet")
        elif not self.view.connected:
            missing.append("register: etcd is away; serving goes on with the workers last seen")
        if not roles["decode"]["ready"]:
            missing.append("decode: no decode worker is reachable; requests are answered 503")
        if not roles["prefill"]["ready"]:
            missing.append("prefill: no prefill worker is reachable; prompts are prefilled on decode workers")
        missing += self._refusals()
        status = "unavailable" if not roles["decode"]["ready"] else "degraded" if missing else "ok"
        return {
            "status": status,
            "roles": roles,
            "register": bool(self.view and self.view.connected),
            "missing": missing,
        }

    @staticmethod
    def _describe(link: WorkerLink) -> dict[str, Any]:
        return {
            "id": link.worker_id,
            "address": link.member.address,
            "state": link.state,
            "error": "" if link.up else link.error,
            "requests": len(link.legs),
            "outstanding_tokens": link.outstanding,
            "running": link.load.running,
            "waiting": link.load.waiting,
            "kv_usage": round(link.load.kv_usage, 4),
        }

    def _is_member(self, link: WorkerLink) -> bool:
        return self.view is not None and any(m.worker_id == link.worker_id for m in self.view.members)

    async def _follow(self) -> None:
        while True:
            try:
                async for view in self._membership.watch():
                    self._apply(view)
                log.error("the register's watch ended; starting it again")
            except Exception as error:
                log.error(
                    "the register's watch failed, starting it again: %s: %s", type(error).__name__, error
                )
                if self.view is not None:
                    self.view = View(self.view.members, connected=False)
            await asyncio.sleep(WATCH_PAUSE)

    def _apply(self, view: View) -> None:
        if self.view is None or self.view.connected != view.connected:
            log.info("register: %s", "connected" if view.connected else "away; the last view stays in force")
        self.view = view
        seen = set()
        going: list[WorkerLink] = []
        for member in view.members:
            seen.add(member.worker_id)
            link = self._links.get(member.worker_id)
            if link is not None and link.member.address != member.address:
                self._drop(link)
                link = None
            if link is None:
                link = self._links[member.worker_id] = WorkerLink(member, self._events, self.dial)
                link.start()
            link.member = member
            if member.draining and not link.retiring:
                going.append(link)
            link.retiring = member.draining
        for worker_id, link in list(self._links.items()):
            if worker_id not in seen:
                if not link.retiring:
                    going.append(link)
                    # Its stream may end a moment later or earlier; whichever is first, operators hear of it here.
                    log.warning(
                        "%s at %s: left the register without draining: its lease ended, or it was stopped",
                        worker_id,
                        link.member.address,
                    )
                link.retiring = True
                if not link.legs:
                    self._drop(link)
        refused = self._refusals()
        for sentence in refused:
            if sentence not in self._refused:
                log.error("%s", sentence)
        self._refused = refused
        self.changed()
        for link in going:
            self._events.retiring(link)

    def _drop(self, link: WorkerLink) -> None:
        self._links.pop(link.worker_id, None)
        self._teams = self._slots = None
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
