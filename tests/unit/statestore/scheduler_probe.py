# SPDX-License-Identifier: Apache-2.0
"""The scheduler half with a cache manager of plain tables and ranks that report when they are told to."""

from __future__ import annotations

import uuid
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry
from statestore.connector.events import listen
from statestore.connector.intents import (
    PARAMS,
    Intents,
    LoadIntent,
    PublishIntent,
    PublishOutcome,
)
from statestore.connector.messages import RankReport, RankReports
from statestore.connector.scheduler_half import SchedulerHalf

BLOCK = 16
KDA = SimpleNamespace(
    kv_cache_spec=MambaSpec(
        block_size=BLOCK, shapes=((3, 24), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32)
    )
)
MLA = SimpleNamespace(
    kv_cache_spec=MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=6, dtype=torch.bfloat16)
)


class Manager:
    """What the half uses of vLLM's cache manager: block tables, and references to blocks."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.references: Counter[int] = Counter()
        self.block_pool = SimpleNamespace(touch=self._touch, free_blocks=self._free)

    def get_block_ids(self, key: str) -> tuple[list[int], ...]:
        return self.tables[key]

    def get_blocks(self, key: str) -> Any:
        groups = [[SimpleNamespace(block_id=i, is_null=i == 0) for i in table] for table in self.tables[key]]
        return SimpleNamespace(blocks=tuple(groups))

    def _touch(self, blocks: Any) -> None:
        self.references.update(block.block_id for block in blocks)

    def _free(self, blocks: Any) -> None:
        self.references.subtract(block.block_id for block in blocks)

    @property
    def pinned(self) -> list[int]:
        """Blocks with a reference of ours; each must have one only."""
        assert set(self.references.values()) <= {0, 1}, self.references
        return sorted(block for block, count in self.references.items() if count)


class Half:
    """A scheduler half with `world` ranks, its block tables, and what it told the service."""

    def __init__(
        self, world: int = 2, dcp: int = 1, groups: tuple[Any, ...] = (KDA, MLA), speculative: bool = False
    ) -> None:
        self.worker = f"test-{uuid.uuid4().hex}"
        self.events: list[tuple[Any, ...]] = []
        self.manager = Manager()
        self.tables = self.manager.tables
        self.half = SchedulerHalf(self.worker, world, dcp, list(groups), speculative)
        self.half.bind(self.manager)
        listen(self.worker, lambda *event: self.events.append(event))

    def add(self, key: str, intents: Any = None, tokens: int = 1 << 20) -> Any:
        request = SimpleNamespace(
            request_id=key,
            kv_transfer_params=None if intents is None else {PARAMS: intents},
            num_computed_tokens=0,
            num_tokens=tokens,
            num_in_flight_tokens=0,
            num_stale_output_tokens=0,
            all_token_ids=list(range(1000, 1000 + min(tokens, 500))),
            status=RequestStatus.RUNNING,
        )
        self.half.added(request)
        return request

    def load(self, key: str, length: int, tokens: int = 1 << 20, publish: PublishIntent | None = None) -> Any:
        return self.add(key, Intents(LoadIntent((record(length),)), publish), tokens)

    def publish(self, key: str, length: int | None, tables: tuple[list[int], ...], **intent: Any) -> Any:
        self.tables[key] = tables
        return self.add(key, Intents(publish=PublishIntent(Epoch(7, 1), length, "segment", **intent)))

    def step(self, offers: Any = None, **scheduled: int) -> Any:
        """Metadata of the step that schedules so many tokens; `offers`: the states that vLLM offers in it."""
        return self.half.build_metadata(scheduled, offers)

    def steps(self, request: Any, *ends: int) -> list[Any]:
        """Steps of one request that end there; the publish jobs that they start."""
        jobs = []
        for end in ends:
            jobs += self.step(**{request.request_id: end - request.num_computed_tokens}).publish
            request.num_computed_tokens = end
        return jobs

    def end(self, request: Any, status: Any = RequestStatus.FINISHED_LENGTH_CAPPED) -> None:
        request.status = status
        self.half.finished(request)

    def written(self, key: str, *ranks: int, link: int = 0, failure: str = "") -> None:
        reports = [RankReport(rank, failure=failure, detail=failure) for rank in ranks]
        self.half.collect(RankReports(publish={(key, link): reports}))

    def loaded(self, key: str, *ranks: int, failure: str = "") -> None:
        self.half.collect(RankReports(load={key: [RankReport(rank, failure=failure) for rank in ranks]}))

    @property
    def pinned(self) -> list[int]:
        return self.manager.pinned

    @property
    def names(self) -> list[tuple[str, str]]:
        return [(event[0], event[1]) for event in self.events]

    @property
    def outcome(self) -> PublishOutcome:
        """Of the last event, which is a publish that is over."""
        name, _, outcome = self.events[-1]
        assert name == "written"
        assert isinstance(outcome, PublishOutcome)
        return outcome


def record(length: int, **changes: Any) -> BoundaryRecord:
    entry = ObjectEntry("k", "kda", 4, ("ab",), 0, length, True)
    values: dict[str, Any] = {
        "id": f"b{length}",
        "model_digest": "ab",
        "prefix_hash": "cd",
        "length": length,
        "epoch": Epoch(7, 1),
        "owner": "p",
        "geometry": "{}",
        "state": "committed",
        "ranks": (RankEntry(0, "written", (entry,)),),
    }
    return BoundaryRecord(**{**values, **changes})


LONG = (list(range(1, 9)), list(range(11, 19)))
