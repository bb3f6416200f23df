# SPDX-License-Identifier: Apache-2.0
"""Roles without an engine: a stream that collects messages, a register, a ledger and a pool in memory."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm import SamplingParams

from deltaserve.config import WorkerConfig
from deltaserve.engine.role import Job
from deltaserve.membership import Member
from deltaserve.wire import codec
from deltaserve.wire import worker_pb2 as pb
from prefill_worker.role import PrefillRole
from statestore.boundary import ObjectEntry, object_key
from statestore.connector.intents import PARAMS, PublishIntent, PublishOutcome
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
            await asyncio.wait_for(self.arrived.wait(), 5)
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


class PrefillHarness:
    """A prefill role, joined, with everything it writes to."""

    def __init__(self, tp: int = 1) -> None:
        self.register = Register()
        self.membership = MembershipDouble(self.register)
        self.ledger = LedgerDouble(self.register)
        self.store = Store()
        self.pool = PoolDouble(self.store)
        self.forgotten: list[Job] = []
        self.geometry = geometry(tp=tp)
        config = WorkerConfig(role="prefill", load_timeout=1.0)
        self.role = PrefillRole(
            config, "prefill-a", self.geometry, self.ledger, self.pool, self.forgotten.append
        )

    async def join(self) -> None:
        """Register the worker and tell the role its lease."""
        member = Member("prefill-a", "prefill", "127.0.0.1:1", MODEL, self.geometry.fingerprint(), 0)
        self.membership.on_lease = self.role.on_lease
        joined = await self.membership.join(member)
        await self.role.on_lease(joined.lease)

    def intent(self, request: Any) -> PublishIntent:
        """What the role asks of the connector."""
        publish = request.sampling_params.extra_args["kv_transfer_params"][PARAMS].publish
        assert isinstance(publish, PublishIntent)
        return publish

    def outcome(self, request: Any, *reports: RankReport) -> PublishOutcome:
        """What the connector says when these ranks have reported the only link."""
        intent = self.intent(request)
        assert intent.length is not None
        links = Links(intent, len(reports))
        link = links.due(intent.length, 16)
        assert link is not None
        links.report(link.number, list(reports))
        return links.outcome([])

    def written(self, request: Any, rank: int = 0, failure: str = "") -> RankReport:
        """What a rank reports after it has written its two objects (they are really in the store)."""
        intent = self.intent(request)
        report = RankReport(rank, failure=failure, detail=failure and f"{failure} on purpose")
        for group in ("kda", "mla") if not failure else ():
            key = object_key(MODEL, intent.epoch, group, rank)
            with self.pool.staging(64, 1.0) as data:
                data[:] = 7
                placement = self.pool.put(key, [data])
            report.objects.append(
                ObjectEntry(key, group, 64, ("00" * 16,), 0, intent.length, True, placement.segment)
            )
            report.nbytes += 64
        return report
