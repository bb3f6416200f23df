# SPDX-License-Identifier: Apache-2.0
"""The simulator against arithmetic that can be done by hand, and the autoscaler against its definition."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.scaling.baselines import HIGHEST, Autoscaler, AutoscalerSettings, Static
from benchmarks.scaling.model import SLO, WORKER, Slo
from benchmarks.scaling.simulator import INTERVAL, Observation, PoolView, Result, Simulator
from benchmarks.scaling.traces import Trace

POOL = PoolView(2, 0, 0, 4, 2, 6000, 10, 9000, 0.5, 0.25, ())


def trace(*requests: tuple[float, int, int]) -> Trace:
    """Requests as (arrival, prompt, output)."""
    return Trace("by hand", 0, [r[0] for r in requests], [r[1] for r in requests], [r[2] for r in requests])


def run(of: Trace, prefill: int = 1, decode: int = 1, slo: Slo = SLO) -> Result:
    return Simulator(of, WORKER, slo, Static(prefill, decode), (prefill, decode)).run()


def alone(prompt: int, output: int) -> tuple[float, float]:
    """Seconds to the first token, and a token, of a request that has the cluster for itself."""
    step = WORKER.step_seconds(1, prompt + output / 2)
    return WORKER.prefill_seconds(prompt) + WORKER.handoff_seconds(prompt) + step, step


def test_one_request_alone() -> None:
    result = run(trace((1.0, 1000, 101)))
    ttft, tpot = alone(1000, 101)
    assert result.ttfts == [pytest.approx(ttft)]
    assert result.tpots == [pytest.approx(tpot, rel=0.02)]
    assert result.attained == 1.0
    finish = 1.0 + ttft + tpot * 100
    assert result.gpu_hours == pytest.approx(2 * finish / 3600, rel=0.01)


def test_prompts_wait_for_each_other_unless_there_are_two_workers() -> None:
    two = trace((0.0, 8000, 2), (0.0, 8000, 2))
    own = alone(8000, 2)[0]
    assert max(run(two).ttfts) == pytest.approx(own + WORKER.prefill_seconds(8000), rel=0.02)
    assert max(run(two, prefill=2).ttfts) == pytest.approx(own, rel=0.05)


def test_running_together_takes_longer_a_token() -> None:
    crowd = trace(*[(0.0, 16, 400)] * 10)
    together = run(crowd, prefill=10)
    assert max(together.tpots) == pytest.approx(WORKER.step_seconds(10, 10 * 216), rel=0.05)
    assert max(run(crowd, prefill=10, decode=10).tpots) == pytest.approx(alone(16, 400)[1], rel=0.02)


def test_more_than_there_are_slots_wait() -> None:
    crowd = trace(*[(0.0, 16, 200)] * (WORKER.slots + 1))
    assert max(run(crowd, prefill=20).ttfts) > 200 * WORKER.step_fixed
    roomier = dataclasses.replace(WORKER, slots=WORKER.slots + 1)
    result = Simulator(crowd, roomier, SLO, Static(20, 1), (20, 1)).run()
    assert max(result.ttfts) < 200 * WORKER.step_fixed, "the control: a slot more, and nobody waits"


def test_more_than_the_cache_holds_wait() -> None:
    half = WORKER.kv_tokens // 2
    crowd = trace(*[(0.0, half, 200)] * 3)
    ttfts = sorted(run(crowd, prefill=3).ttfts)
    assert ttfts[2] - ttfts[0] > 200 * WORKER.step_fixed


def test_missing_either_limit_counts() -> None:
    one = trace((0.0, 1000, 101))
    ttft, tpot = alone(1000, 101)
    assert run(one, slo=Slo(ttft=ttft * 0.9, tpot=1.0)).attained == 0.0
    assert run(one, slo=Slo(ttft=9.0, tpot=tpot * 0.9)).attained == 0.0
    assert run(one, slo=Slo(ttft=ttft * 1.1, tpot=tpot * 1.1)).attained == 1.0


def test_a_worker_costs_while_it_starts_and_while_it_drains() -> None:
    late = trace((0.0, 16, 2), (200.0, 16, 2))

    def up_and_down(seen: Observation) -> tuple[int, int]:
        return (1, 2) if INTERVAL * 2 <= seen.now < INTERVAL * 4 else (1, 1)

    result = Simulator(late, WORKER, SLO, up_and_down, (1, 1)).run()
    extra = result.gpu_hours - run(late).gpu_hours
    assert extra * 3600 == pytest.approx(2 * INTERVAL, abs=0.1), "dropped while starting: it cost until then"

    # Two long answers on two workers; told to shrink, the one that drains finishes first.
    pair = trace((0.0, 16, 4000), (0.0, 16, 4000))
    kept = Simulator(pair, WORKER, SLO, lambda seen: (1, 1), (2, 2)).run()
    assert len(kept.tpots) == 2
    seconds = alone(16, 4000)[1] * 4000
    assert kept.gpu_hours * 3600 > 3 * seconds, "one prefill worker and both decode workers to the end"


def test_new_workers_serve_only_once_they_have_started() -> None:
    views: list[Observation] = []

    def grow(seen: Observation) -> tuple[int, int]:
        views.append(seen)
        return 2, 1

    Simulator(trace((0.0, 16, 2), (100.0, 16, 2)), WORKER, SLO, grow, (1, 1)).run()
    first = next(seen.now for seen in views if seen.prefill.ready == 2)
    assert first >= INTERVAL + WORKER.start_seconds
    assert all(seen.prefill.starting == 1 for seen in views if INTERVAL < seen.now < first)


def test_a_run_can_be_ended_early() -> None:
    flood = trace(*[(0.01 * n, 8000, 2) for n in range(200)])
    cut = Simulator(flood, WORKER, SLO, Static(1, 1), (1, 1), most_violations=10).run()
    assert cut.ended_early
    assert not run(flood).ended_early


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Simulator(trace((0.0, 16, 2), (50.0, 16, 2)), WORKER, SLO, lambda seen: (0, 1), (1, 1)).run()


def seen(now: float, prefill: PoolView, decode: PoolView = POOL) -> Observation:
    return Observation(now, prefill, decode)


def test_the_autoscaler_divides_by_its_target_and_waits_before_it_shrinks() -> None:
    scaler = Autoscaler(AutoscalerSettings("in_flight", 1.0, 2.0, window=60.0))
    assert scaler(seen(0, POOL)) == (4, 2)
    four = dataclasses.replace(POOL, ready=4, requests=1)
    assert scaler(seen(30, four))[0] == 4, "within the window its highest wish counts"
    assert scaler(seen(120, four))[0] == 1
    near = dataclasses.replace(POOL, ready=20, requests=21)
    assert scaler(seen(300, near))[0] == 20, "within the tolerance nothing changes"
    flooded = dataclasses.replace(POOL, requests=10_000)
    assert scaler(seen(301, flooded))[0] == HIGHEST


@pytest.mark.parametrize(
    ("metric", "wanted"),
    [
        ("utilization", (math.ceil(0.5 * 2 / 0.25), math.ceil(0.5 * 2 / 0.25))),
        ("tokens", (math.ceil(6000 / 0.25), 2)),
    ],
)
def test_the_autoscalers_other_metrics(metric: str, wanted: tuple[int, int]) -> None:
    scaler = Autoscaler(AutoscalerSettings(metric, 0.25, 0.25, window=60.0))  # type: ignore[arg-type]
    assert scaler(seen(0, POOL)) == (min(HIGHEST, wanted[0]), min(HIGHEST, wanted[1]))
