# SPDX-License-Identifier: Apache-2.0
"""The planner as a policy of the simulator: it sees what a cluster's metrics would tell it."""

from __future__ import annotations

from benchmarks.scaling.baselines import HIGHEST
from benchmarks.scaling.model import Slo, WorkerModel
from benchmarks.scaling.simulator import INTERVAL, Observation
from deploy.planner.load import DecodeLoad, Load, PrefillLoad, Profile, Promise
from deploy.planner.policy import Planner, Settings


def profile(worker: WorkerModel) -> Profile:
    """What calibration would say of the simulated worker."""
    return Profile(
        prefill_fixed=worker.prefill_fixed,
        prefill_token=worker.prefill_token,
        handoff_fixed=worker.handoff_fixed,
        step_fixed=worker.step_fixed,
        step_sequence=worker.step_sequence,
        step_context=worker.step_context,
        slots=worker.slots,
        kv_tokens=worker.kv_tokens,
        start_seconds=worker.start_seconds,
    )


class Planned:
    """The policy; make a new one for each run."""

    def __init__(self, known: Profile, slo: Slo, settings: Settings | None = None) -> None:
        """`known`: what the planner believes of a worker."""
        self._slo = slo
        self._planner = Planner(
            known, Promise(slo.ttft, slo.tpot, slo.target), settings or Settings(highest=HIGHEST)
        )

    def __call__(self, seen: Observation) -> tuple[int, int]:
        """The policy."""
        ttfts, tpots = seen.prefill.latencies, seen.decode.latencies
        plan = self._planner.plan(
            Load(
                now=seen.now,
                interval=INTERVAL,
                prefill=PrefillLoad(
                    ready=seen.prefill.ready,
                    starting=seen.prefill.starting,
                    queued_requests=seen.prefill.requests,
                    queued_tokens=seen.prefill.queued_tokens,
                    arrived_requests=seen.prefill.arrived_requests,
                    arrived_tokens=seen.prefill.arrived_tokens,
                    ttft_late=sum(t > self._slo.ttft for t in ttfts) / max(1, len(ttfts)),
                ),
                decode=DecodeLoad(
                    ready=seen.decode.ready,
                    starting=seen.decode.starting,
                    requests=seen.decode.requests,
                    waiting=seen.decode.waiting,
                    kv_usage=seen.decode.kv_usage,
                    arrived_requests=seen.decode.arrived_requests,
                    tpot=sum(tpots) / len(tpots) if tpots else None,
                ),
            )
        )
        return plan.prefill.replicas, plan.decode.replicas
