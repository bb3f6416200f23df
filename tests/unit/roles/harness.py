# SPDX-License-Identifier: Apache-2.0
"""Roles without an engine: a stream that collects messages, a register, a ledger and a pool in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm import SamplingParams

from decode_worker.role import DecodeRole
from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job
from deltaserve.membership import Member
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from prefill_worker.role import PrefillRole
from statestore.boundary import BoundaryRecord, ObjectEntry, object_key
from statestore.connector.intents import PARAMS, Intents, PublishIntent, PublishOutcome
from statestore.connector.links import Links
from statestore.connector.messages import RankReport
from statestore.geometry import Geometry
from tests.doubles.ledger import LedgerDouble
from tests.doubles.membership import MembershipDouble, Register
from tests.doubles.pool import PoolDouble, Store

MODEL = "0123456789abcdef"


def geometry(**changes: Any) -> Geometry:
    """A small hybrid geometry."""
    values: dict[str, Any] = {
        "model_digest": MODEL,
        "quantisation": "none",
        "kda_layers": (0, 1),
        "mla_layers": (2,),
        "num_heads": 4,
        "head_k": 4,
        "head_v": 4,
        "conv_width": 4,
        "conv_layout": "SD",
        "num_spec": 0,
        "recurrent_dtype": "float32",
        "conv_dtype": "float32",
        "kv_cache_dtype": "float32",
        "latent_width": 8,
        "block_size": 16,
        "page_bytes": 4096,
        "tp": 1,
    }
    return Geometry(**{**values, **changes})


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what a worker does beside its requests."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 - what is asked has no event to wait for
            await asyncio.sleep(0.01)


class Stream:
    """What a role needs of a router's stream."""

    def __init__(self) -> None:
        self.sent: list[pb.FromWorker] = []
        self.boundaries: set[str] = set()
        self.closed = False
        self.arrived = asyncio.Event()

    def send(self, message: pb.FromWorker) -> None:
        self.sent.append(message)
        self.arrived.set()

    async def next(self) -> pb.FromWorker:
        """The first message not yet taken."""
        while not self.sent:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 30)
        return self.sent.pop(0)


def job(stream: Stream, prompt: list[int], **handoff: Any) -> Job:
    """A job as the service makes it from an `Add`."""
    add = pb.Add(
        id=7,
        request_id="cmpl-7",
        prompt=prompt,
        sampling=codec.encode_sampling(SamplingParams(max_tokens=4, temperature=0.0)),
        arrival=time.time(),
        **handoff,
    )
    return Job(key="s1-7", add=add, stream=stream)


class Harness:
    """A role, joined, with everything it writes to. Several may share a register and a store."""

    role: Any
    worker_id: str
    object_bytes = 64
    """Of each of the two objects that `written` stores."""

    def __init__(self, tp: int = 1, beside: Harness | None = None, **config: Any) -> None:
        """`beside`: another harness of the same cluster; `config`: fields of WorkerConfig."""
        self.register = Register() if beside is None else beside.register
        self.membership = MembershipDouble(self.register)
        self.ledger = LedgerDouble(self.register, None if beside is None else beside.ledger.records)
        self.store = Store() if beside is None else beside.store
        self.pool = PoolDouble(self.store)
        self.forgotten: list[Job] = []
        self.geometry = geometry(tp=tp)
        self.config = WorkerConfig(**{"load_timeout": 1.0, "checkpoint_tokens": 16, **config})

    async def join(self) -> None:
        """Register the worker and tell the role its lease."""
        role = self.worker_id.partition("-")[0]
        member = Member(self.worker_id, role, "127.0.0.1:1", MODEL, self.geometry.fingerprint(), 0)  # type: ignore[arg-type]
        self.membership.on_lease = self.role.on_lease
        joined = await self.membership.join(member)
        await self.role.on_lease(joined.lease)

    def see(self) -> None:
        """The role's index catches up with the ledger."""
        self.role.publisher.index.apply(self.ledger._checkpoints())

    def intents(self, request: Any) -> Intents:
        """What the role asks of the connector."""
        given = (request.sampling_params.extra_args or {}).get("kv_transfer_params", {})
        found = given.get(PARAMS, Intents())
        assert isinstance(found, Intents)
        return found

    def intent(self, request: Any) -> PublishIntent:
        """What the role asks to publish."""
        publish = self.intents(request).publish
        assert publish is not None
        return publish

    def outcome(self, request: Any, *reports: RankReport) -> PublishOutcome:
        """What the connector says when these ranks have reported the only link."""
        intent = self.intent(request)
        assert intent.length is not None
        links = Links(replace(intent, checkpoint_tokens=0), len(reports))
        link = links.due(intent.length, 16)
        assert link is not None
        links.report(link.number, list(reports))
        return links.outcome([])

    def outcome_of(
        self,
        request: Any,
        steps: Sequence[int],
        tokens: Sequence[int] = (),
        failed: str = "",
        load_failed: bool = False,
    ) -> PublishOutcome:
        """What the connector says after steps that end at these numbers of tokens, with every object really stored.

        `tokens`: those of an answer's end. `failed`: a kind of failure of the final link.
        """
        intent = self.intent(request)
        links = Links(intent, self.geometry.tp)
        if load_failed:
            links.rebase()
        ends = [link for step in steps if (link := links.due(step, 16)) is not None]
        if intent.length is None and (end := links.finish(len(tokens))) is not None:
            ends.append(end)
        for link in ends:
            bad = failed if link.final else ""
            reports = [
                self.written(request, rank, bad, link.number, link.base, link.length)
                for rank in range(self.geometry.tp)
            ]
            links.report(link.number, reports)
        links.close()
        return links.outcome(list(tokens))

    def written(
        self, request: Any, rank: int = 0, failure: str = "", link: int = 0, base: int = 0, length: int = 0
    ) -> RankReport:
        """What a rank reports after it has written its two objects (they are really in the store)."""
        intent = self.intent(request)
        report = RankReport(rank, failure=failure, detail=failure and f"{failure} on purpose")
        for group in ("kda", "mla") if not failure else ():
            key = object_key(MODEL, intent.epoch, group, rank, link)  # type: ignore[arg-type]
            with self.pool.staging(self.object_bytes, 1.0) as data:
                data[:] = 7
                placement = self.pool.put(key, [data])
            high = length or intent.length or 1
            report.objects.append(
                ObjectEntry(key, group, self.object_bytes, ("00" * 16,), base, high, True, placement.segment)  # type: ignore[arg-type]
            )
            report.nbytes += self.object_bytes
        return report

    async def settle(self) -> None:
        """Wait for what the role does after its message."""
        for _ in range(250):
            if not self.role._tasks:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the role's tasks do not end")

    def checkpoints(self) -> dict[str, BoundaryRecord]:
        """Committed ones in the ledger."""
        return self.ledger._checkpoints()

    def own(self) -> list[str]:
        """Ids of what is in the ledger and no checkpoint."""
        return [name for name in self.ledger.records if name not in self.checkpoints()]


class PrefillHarness(Harness):
    """A prefill role."""

    def __init__(self, tp: int = 1, name: str = "a", beside: Harness | None = None, **config: Any) -> None:
        super().__init__(tp, beside, role="prefill", **config)
        self.worker_id = f"prefill-{name}"
        self.role = PrefillRole(
            self.config, self.worker_id, self.geometry, self.ledger, self.pool, self.forgotten.append
        )


class DecodeHarness(Harness):
    """A decode role."""

    def __init__(self, tp: int = 1, name: str = "a", beside: Harness | None = None, **config: Any) -> None:
        super().__init__(tp, beside, **{"role": "decode", "checkpoint_min_tokens": 8, **config})
        self.worker_id = f"decode-{name}"
        self.role = DecodeRole(
            self.config, self.worker_id, self.geometry, self.ledger, self.pool, self.forgotten.append
        )
