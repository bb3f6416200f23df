# SPDX-License-Identifier: Apache-2.0
"""The router's own Prometheus metrics; they share /metrics with those of vLLM's front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from deltaserve import __version__
from router.placement import LOCAL_REASONS

if TYPE_CHECKING:
    from router.roster import Roster
    from router.trace import Trace

TPOT_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

EARLY_OUTCOMES = ("used", "withdrawn", "dropped", "aside")
"""What becomes of an early read: docs/early_reads.md."""


class Metrics:
    """Every counter, gauge and histogram, registered once a registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.requests = Counter(
            "deltaserve_router_requests", "Engine requests that ended", ["outcome"], registry=registry
        )
        self.handovers = Counter(
            "deltaserve_router_handovers",
            "Prompts handed over: a committed boundary reached decode",
            registry=registry,
        )
        self.local_prefills = Counter(
            "deltaserve_router_local_prefill",
            "Prompts sent to a decode worker without a boundary, by reason",
            ["reason"],
            registry=registry,
        )
        self.load_failures = Counter(
            "deltaserve_router_load_failures",
            "Boundaries that a decode worker could not use; it computed the prompt itself",
            ["failure"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "deltaserve_router_prompt_tokens",
            "Prompt tokens by where decode got them: store, local (its own prefix cache) or computed",
            ["source"],
            registry=registry,
        )
        self.tokens = Counter("deltaserve_router_tokens", "Tokens delivered", registry=registry)
        self.releases = Counter(
            "deltaserve_router_boundary_releases",
            "Boundaries given back to their publisher",
            registry=registry,
        )
        self.orphans = Counter(
            "deltaserve_router_orphan_boundaries",
            "Boundaries committed after their request had gone, released at once",
            registry=registry,
        )
        self.early_reads = Counter(
            "deltaserve_router_early_reads",
            "Reads of a boundary that began beside its commit, by what became of them",
            ["outcome"],
            registry=registry,
        )
        self.retries = Counter(
            "deltaserve_router_decode_retries",
            "Requests moved to another decode worker",
            ["reason"],
            registry=registry,
        )
        self.resume_seconds = Histogram(
            "deltaserve_router_resume_seconds",
            "From the last token of a lost decode worker to the next token of another",
            buckets=SECONDS,
            registry=registry,
        )
        self.links_lost = Counter(
            "deltaserve_router_links_lost", "Streams to workers that broke", ["role"], registry=registry
        )
        self.refused = Counter(
            "deltaserve_router_refused",
            "HTTP requests that the router answered itself",
            ["status"],
            registry=registry,
        )
        self.queued = Gauge(
            "deltaserve_router_queued", "HTTP requests that wait to be let in", registry=registry
        )
        self.inside = Gauge(
            "deltaserve_router_inside", "HTTP requests let in and not ended", registry=registry
        )
        self.in_flight = Gauge("deltaserve_router_in_flight", "Engine requests held now", registry=registry)
        self.workers = Gauge(
            "deltaserve_router_workers", "Workers by role and state", ["role", "state"], registry=registry
        )
        self.publish_seconds = Histogram(
            "deltaserve_router_publish_seconds",
            "From dispatch to a prefill worker to its committed boundary",
            buckets=SECONDS,
            registry=registry,
        )
        self.ttft = Histogram(
            "deltaserve_router_ttft_seconds",
            "From a request's arrival at the dispatcher to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.tpot = Histogram(
            "deltaserve_router_tpot_seconds",
            "Mean time between the tokens of one answer, pauses included; answers of two tokens and more",
            buckets=TPOT_SECONDS,
            registry=registry,
        )
        self.handover_bytes = Counter(
            "deltaserve_router_handover_bytes",
            "Bytes of the boundaries that requests were handed over with",
            registry=registry,
        )
        self.outstanding = Gauge(
            "deltaserve_router_outstanding_tokens",
            "Tokens given to workers and not yet done with",
            ["role"],
            registry=registry,
        )
        self.register = Gauge(
            "deltaserve_router_register_connected",
            "1 while etcd answers; 0: the workers last seen stay in use",
            registry=registry,
        )
        self.info = Gauge(
            "deltaserve_router_info", "1, with what this router is", ["version", "policy"], registry=registry
        )
        for outcome in EARLY_OUTCOMES:
            self.early_reads.labels(outcome)
        for reason in LOCAL_REASONS:  # so that a rate over a reason exists before its first event
            self.local_prefills.labels(reason)

    def ended(self, trace: Trace) -> None:
        """A request is over: what its client has seen of time, and what it was handed over with."""
        if trace.first_token_after is not None:
            self.ttft.observe(trace.first_token_after)
        if (tpot := trace.tpot) is not None:
            self.tpot.observe(tpot)
        self.handover_bytes.inc(trace.boundary_bytes)

    def watch(self, roster: Roster, policy: str) -> None:
        """Ask the roster at each scrape."""
        self.info.labels(__version__, policy).set(1)
        self.register.set_function(lambda: float(bool(roster.view and roster.view.connected)))
        self.outstanding.labels("prefill").set_function(lambda: float(roster.outstanding("prefill")))
        self.outstanding.labels("decode").set_function(lambda: float(roster.outstanding("decode")))
