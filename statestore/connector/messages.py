# SPDX-License-Identifier: Apache-2.0
"""What the connector's halves tell each other.

scheduler half ──StepMetadata (jobs)──▶ worker half of every rank
scheduler half ◀──RankReports──────────  worker half of every rank, merged by vLLM over the ranks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry

LinkName = tuple[str, int]
"""The request's name in the engine, and the number of the link."""


@dataclass
class PublishJob:
    """Write one link of a publish: every rank its shards."""

    key: str
    """The request's name in the engine."""
    epoch: Epoch
    length: int
    """Tokens whose state the blocks hold."""
    blocks: tuple[list[int], ...]
    """Per KV cache group: the one block with the state (KDA), or the table (MLA). They stay pinned until every rank has
    reported."""
    segment: str
    """Preferred Mooncake segments, the reader's ranks in order, comma-separated; empty: the writer's own."""
    packing_dcp: int
    packing_interleave: int
    base: int = 0
    """MLA rows of the tokens [base, length) are written."""
    link: int = 0
    """Number of the link; part of the objects' keys."""
    final: bool = True
    """False: a checkpoint, whose KDA state the reader of the boundary does not want."""
    tokens: int = 0
    """Of the request, in the step that the job goes out with; 0: that step does not compute its state."""

    @property
    def name(self) -> LinkName:
        """Names the job in reports."""
        return self.key, self.link


@dataclass
class LoadJob:
    """Restore one boundary: every rank the shards that it owns."""

    key: str
    records: tuple[BoundaryRecord, ...]
    """Its chain, oldest record first, the boundary itself last."""
    blocks: tuple[list[int], ...]
    local_tokens: int
    """Tokens that this worker's own prefix cache holds: their MLA rows are not read again."""

    @property
    def name(self) -> str:
        """Names the job in reports."""
        return self.key


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The jobs that start with one engine step."""

    publish: list[PublishJob] = field(default_factory=list)
    load: list[LoadJob] = field(default_factory=list)


@dataclass
class RankReport:
    """What one rank did with one job."""

    rank: int
    objects: list[ObjectEntry] = field(default_factory=list)
    """Publish: what it wrote."""
    failure: str = ""
    """Kind of failure, empty when all went well: the counter's label."""
    detail: str = ""
    """The failure in words."""
    nbytes: int = 0
    seconds: float = 0.0
    streamed: int = 0
    """Of `nbytes`, what was final and went while the step still computed."""


@dataclass
class RankReports(KVConnectorWorkerMetadata):
    """Reports of this step: by job, one a rank."""

    publish: dict[LinkName, list[RankReport]] = field(default_factory=dict)
    load: dict[str, list[RankReport]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RankReports:
        """Merge another rank's reports; vLLM calls it once a further rank."""
        assert isinstance(other, RankReports)
        merged = RankReports(
            {k: list(v) for k, v in self.publish.items()}, {k: list(v) for k, v in self.load.items()}
        )
        for name, reports in other.publish.items():
            merged.publish.setdefault(name, []).extend(reports)
        for key, reports in other.load.items():
            merged.load.setdefault(key, []).extend(reports)
        return merged
