# SPDX-License-Identifier: Apache-2.0
"""Whole requests: which share of the time to the first token does the handoff cost?

A cluster of the demonstration model answers the same kind of prompt under placement `handover` and under `local`, in
turns; every prompt is new, so that no cache helps. The share is (handover − local) / handover, of medians: what a
request pays for being computed on one worker and continued on another. The router's traces tell what of it is what:
from the commit that it heard of to the first token is load, verification and one decode step (`after commit`); what
else a handover takes longer than `local` is a slower prefill, because it leaves checkpoints (`--no-checkpoints` starts
a cluster whose prefill leaves none), and writing the state.

Prefill compute is this machine's, so shares are its own too; where prefill is faster, the handoff's share is larger.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.handoff.memory import machine
from benchmarks.handoff.table import render, spread
from deltaserve.config import ClusterConfig
from deltaserve.up.cluster import Cluster
from deltaserve.verify.client import Endpoint
from deltaserve.verify.prompts import Case, Prompt

LENGTHS = (500, 2000, 8000)
TURNS = 5
QUICK_TURNS = 2
_TOKENS = range(300, 1100)
"""Ordinary tokens of the demonstration model's vocabulary."""


@dataclass
class LengthResult:
    """Requests of one prompt length; seconds from arrival at the router."""

    length: int
    handover: list[float] = field(default_factory=list)
    """To the first token."""
    published: list[float] = field(default_factory=list)
    """To the commit that the router heard of."""
    local: list[float] = field(default_factory=list)
    nbytes: int = 0

    @property
    def share(self) -> float:
        """Of the time to the first token that the handoff costs."""
        took = statistics.median(self.handover)
        return (took - statistics.median(self.local)) / took

    @property
    def share_after_commit(self) -> float:
        """Of the time to the first token that passes after the commit."""
        return self.after_commit() / statistics.median(self.handover)

    def after_commit(self) -> float:
        """Median seconds from the commit to the first token: load, verification, one decode step."""
        return statistics.median(
            first - committed for first, committed in zip(self.handover, self.published, strict=True)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; seconds."""
        return {
            **asdict(self),
            "share": self.share,
            "share_after_commit": self.share_after_commit,
            "after_commit": self.after_commit(),
            "ttft_handover": spread(self.handover),
            "ttft_local": spread(self.local),
        }


def run_cluster(
    where: str, quick: bool, checkpoints: bool = True, early_reads: bool = False
) -> dict[str, Any]:
    """Measure and print; `where` is the URL of an endpoint, or "start". Raises EndpointError, ClusterError.

    `checkpoints`: whether the prefill worker of a started cluster leaves any. `early_reads`: whether it reads
    boundaries beside their commit.
    """
    with _endpoint(where, checkpoints, early_reads) as url:
        results = measure(Endpoint(url), QUICK_TURNS if quick else TURNS)
    host = machine()
    print(f"{host['cpu']}, {host['cores']} cores, load {host['load'][0]:.1f}\n")
    print(table(results))
    return {"machine": host, "lengths": [result.to_dict() for result in results]}


def measure(endpoint: Endpoint, turns: int) -> list[LengthResult]:
    """`turns` prompts of every length under either placement, after one that is not counted."""
    results = [LengthResult(length) for length in LENGTHS]
    for result in results:
        for turn in range(turns + 1):
            for placement in ("handover", "local") if turn % 2 else ("local", "handover"):
                trace = _first_token(endpoint, result.length, placement)
                if turn == 0:
                    continue
                if placement == "local":
                    result.local.append(trace["first_token_after"])
                    continue
                if trace["from_store"] < result.length - 1:
                    raise RuntimeError(
                        f"a prompt of {result.length} tokens took {trace['from_store']} from the store: {trace}"
                    )
                result.handover.append(trace["first_token_after"])
                result.published.append(trace["published_after"])
                result.nbytes = trace["boundary_bytes"]
    return results


def table(results: list[LengthResult]) -> str:
    """One line a length; milliseconds."""

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.0f}"

    return render(
        (
            "tokens",
            "bytes",
            "TTFT handover ms",
            "TTFT local ms",
            "commit heard ms",
            "from there ms",
            "share",
            "after commit",
        ),
        [
            (
                str(r.length),
                str(r.nbytes),
                ms(statistics.median(r.handover)),
                ms(statistics.median(r.local)),
                ms(statistics.median(r.published)),
                ms(r.after_commit()),
                f"{r.share:.0%}",
                f"{r.share_after_commit:.1%}",
            )
            for r in results
        ],
    )


def _first_token(endpoint: Endpoint, length: int, placement: str) -> dict[str, Any]:
    tokens = tuple(random.choices(_TOKENS, k=length))
    case = Case(f"{length} tokens", Prompt(tokens), max_tokens=2)
    _, trace = endpoint.complete(case, placement, salt=uuid.uuid4().hex)
    return trace


@contextlib.contextmanager
def _endpoint(where: str, checkpoints: bool, early_reads: bool) -> Iterator[str]:
    if where != "start":
        yield where
        return
    options: dict[str, object] = {} if checkpoints else {"checkpoint_bytes": 0}
    router: dict[str, object] = {"early_reads": early_reads}
    with Cluster(ClusterConfig(port=0, prefill_options=options, router_options=router)) as cluster:
        yield cluster.endpoint
