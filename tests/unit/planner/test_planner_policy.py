# SPDX-License-Identifier: Apache-2.0
"""The planner's arithmetic: what grows a pool, what must not shrink it, and what it remembers."""

from __future__ import annotations

import dataclasses
import random

import pytest

from deploy.planner.forecast import Care, Forecast, rise
from deploy.planner.load import DecodeLoad, Load, PrefillLoad, Profile, Promise
from deploy.planner.policy import Plan, Planner, Settings

PROFILE = Profile(
    prefill_fixed=0.03,
    prefill_token=160e-6,
    handoff_fixed=0.02,
    step_fixed=0.010,
    step_sequence=0.001,
    step_context=0.0,
    slots=24,
    kv_tokens=120_000,
    start_seconds=35.0,
)
PROMISE = Promise(ttft=4.0, tpot=0.025)
CARE = Care(level=20.0, doubt=1.5, judged=15.0, quantile=0.99, memory=1500.0)
QUICK = Settings(learning=0.0, window=30.0, cooldown=0.0, hysteresis=0.0, prefill_least=0.0, decode_least=0.0)
INTERVAL = 5.0


def load(now: float, **fields: float) -> Load:
    """A calm cluster of two workers a role at second `now`, with fields of either pool laid over it."""
    prefill = PrefillLoad(2, 0, 1, 2000, 8, 16_000, 0.0)
    decode = DecodeLoad(2, 0, 14, 0, 0.2, 8, None)
    of_prefill = {k.removeprefix("p_"): v for k, v in fields.items() if k.startswith("p_")}
    of_decode = {k.removeprefix("d_"): v for k, v in fields.items() if k.startswith("d_")}
    return Load(
        now, INTERVAL, dataclasses.replace(prefill, **of_prefill), dataclasses.replace(decode, **of_decode)
    )


def feed(planner: Planner, seconds: float, begin: float = 0.0, **fields: float) -> Plan:
    """The same load for so long; the last plan."""
    plan = None
    for step in range(int(seconds / INTERVAL)):
        plan = planner.plan(load(begin + step * INTERVAL, **fields))
    assert plan is not None
    return plan


def test_a_calm_cluster_stays_as_it_is() -> None:
    plan = feed(Planner(PROFILE, PROMISE, QUICK), 300)
    assert (plan.prefill.replicas, plan.decode.replicas) == (1, 2) or (
        plan.prefill.replicas,
        plan.decode.replicas,
    ) == (2, 2)


def test_more_prompt_tokens_grow_prefill_alone() -> None:
    calm = feed(Planner(PROFILE, PROMISE, QUICK), 200)
    busy = feed(Planner(PROFILE, PROMISE, QUICK), 200, p_arrived_tokens=100_000)
    assert busy.prefill.replicas >= 4 > calm.prefill.replicas
    assert busy.decode.replicas == calm.decode.replicas


def test_more_requests_at_once_grow_decode_alone() -> None:
    busy = feed(Planner(PROFILE, PROMISE, QUICK), 200, d_requests=60)
    assert busy.decode.replicas >= 5
    assert busy.prefill.replicas <= 2


def test_long_contexts_grow_decode_by_room_and_not_by_slots() -> None:
    # 14 requests that take 90 % of two caches: 15 K tokens each, so that a worker holds 8 of them.
    full = feed(Planner(PROFILE, PROMISE, QUICK), 200, d_kv_usage=0.9)
    assert full.decode.replicas >= 3
    assert feed(Planner(PROFILE, PROMISE, QUICK), 200, d_kv_usage=0.2).decode.replicas == 2, "the control"


def test_tokens_slower_than_the_profile_says_mean_fewer_requests_a_worker() -> None:
    slow = Planner(PROFILE, PROMISE, QUICK)
    feed(slow, 600, d_tpot=0.034, d_requests=20)
    exact = Planner(PROFILE, PROMISE, QUICK)
    as_said = feed(exact, 600, d_tpot=0.020, d_requests=20)
    assert slow.correction == pytest.approx(0.034 / 0.020, rel=0.05)
    assert exact.correction == pytest.approx(1.0, rel=0.05)
    more = feed(slow, 60, begin=600, d_tpot=0.034, d_requests=20)
    assert more.decode.replicas > as_said.decode.replicas


def test_late_first_tokens_over_a_queue_ask_for_one_more_at_once() -> None:
    planner = Planner(PROFILE, PROMISE, QUICK)
    feed(planner, 100)
    plan = planner.plan(load(100, p_ttft_late=0.5, p_queued_requests=10, p_queued_tokens=25_000))
    assert plan.prefill.replicas >= 3
    assert "late" in plan.prefill.why
    again = planner.plan(
        load(105, p_ttft_late=0.5, p_queued_requests=10, p_queued_tokens=25_000, p_starting=3)
    )
    assert "late" not in again.prefill.why, "what is starting is waited for"


@pytest.mark.parametrize("grown", ["requests", "lengths"])
def test_a_rise_is_met_before_it_has_arrived(grown: str) -> None:
    planner = Planner(PROFILE, PROMISE, QUICK)
    feed(planner, 120)
    requests, tokens, plan = 8.0, 16_000.0, None
    for step in range(12):
        tokens += 5_000
        requests += 2.5 if grown == "requests" else 0.0
        plan = planner.plan(load(120 + step * INTERVAL, p_arrived_tokens=tokens, p_arrived_requests=requests))
    assert plan is not None
    now = (requests * PROFILE.prefill_fixed + tokens * PROFILE.prefill_token) / INTERVAL
    assert plan.prefill.replicas > now * 1.4, "a worker asked for now comes in 35 s"


def test_about_a_worker_is_always_in_reserve() -> None:
    without = feed(Planner(PROFILE, PROMISE, QUICK), 600)
    reserved = Planner(PROFILE, PROMISE, dataclasses.replace(QUICK, prefill_least=1.0, decode_least=1.0))
    with_one = feed(reserved, 600)
    assert with_one.prefill.replicas == without.prefill.replicas + 1
    assert with_one.decode.replicas == without.decode.replicas + 1


def test_the_reserve_is_what_forecasts_missed() -> None:
    steady, bursty = (Forecast(35.0, CARE) for _ in range(2))
    for step in range(200):
        steady.add(step * 5.0, 5.0, 1.0)
        bursty.add(step * 5.0, 5.0, 5.0 if step % 40 > 30 else 1.0)
    assert steady.reserve == 0.0
    assert bursty.reserve > 1.5


def test_what_counting_explains_is_no_miss() -> None:
    """Poisson counts of an even demand, against those of one that jumps as far again."""
    draw = random.Random(1)
    noisy, jumping = (Forecast(35.0, CARE) for _ in range(2))
    for step in range(400):
        count = sum(draw.random() < 0.02 for _ in range(1000))  # 20 in 5 s, near enough Poisson's
        noisy.add(step * 5.0, 5.0, count / 5.0)
        jumping.add(step * 5.0, 5.0, count / 5.0 * (2 if step % 100 > 80 else 1))
    assert noisy.reserve < 0.25 * 4.0
    assert jumping.reserve > 0.5 * 4.0


def test_noise_is_no_rise() -> None:
    forecast = Forecast(35.0, CARE)
    for step in range(20):
        forecast.add(step * 5.0, 5.0, 1.0 + 0.2 * (-1) ** step)
    assert forecast.expected == forecast.level
    for step in range(20, 28):
        forecast.add(step * 5.0, 5.0, 1.0 + 0.2 * (step - 19))
    assert forecast.expected > 3.0, "the control: a ramp to 2.6 is one"
    assert forecast.expected <= 3 * 2.6


def test_a_rise_is_believed_as_far_as_its_counts_bear_it() -> None:
    ramp = [(2.5 + 5.0 * step, 1.0 + 0.1 * (2.5 + 5.0 * step)) for step in range(6)]
    assert rise([1.0] * 12, ramp, 5.0, 0.0) == (1.0, pytest.approx(0.1))
    _, few = rise([1.0] * 12, ramp, 5.0, 2.0)
    _, many = rise([100.0] * 12, [(t, 100 * rate) for t, rate in ramp], 5.0, 2.0)
    assert 0.0 < few < 0.1 * 0.8, "two standard errors below"
    assert many / 100 > few, "a hundred times the requests say the same more surely"
    assert rise([1.0] * 12, [(t, 1.0) for t, _ in ramp], 5.0, 0.0) == (1.0, 0.0)
    assert rise([1.0] * 12, [(t, 0.5) for t, _ in ramp], 5.0, 0.0)[1] == 0.0, "a fall is no rise"


def test_workers_that_still_start_are_given_up_at_once_and_those_that_serve_are_not() -> None:
    def after_a_flurry(ready: int, starting: int) -> int:
        planner = Planner(PROFILE, PROMISE, dataclasses.replace(QUICK, window=300.0))
        pool = {"p_ready": ready, "p_starting": starting}
        assert feed(planner, 30, p_arrived_tokens=200_000, **pool).prefill.replicas >= 8
        return feed(planner, 200, begin=30, **pool).prefill.replicas

    assert after_a_flurry(ready=3, starting=5) == 3
    assert after_a_flurry(ready=8, starting=0) == 8, "the control: those that serve stay for the window"


def test_nothing_is_scaled_away_while_the_planner_learns_or_within_the_window() -> None:
    settings = dataclasses.replace(QUICK, learning=100.0, window=60.0)
    planner = Planner(PROFILE, PROMISE, settings)
    idle = {"p_arrived_requests": 0, "p_arrived_tokens": 0, "p_queued_tokens": 0, "p_queued_requests": 0}
    idle |= {"d_requests": 0, "d_arrived_requests": 0, "d_kv_usage": 0.0, "p_ready": 6, "d_ready": 6}
    assert feed(planner, 95, **idle).prefill.replicas == 6
    assert feed(planner, 65, begin=100, **idle).prefill.replicas == 1
    busy = feed(planner, 20, begin=165, p_arrived_tokens=200_000, p_ready=6)
    assert busy.prefill.replicas >= 6
    soon = planner.plan(load(190, **idle))
    assert soon.prefill.replicas >= 6, "the wish of a moment ago counts"


def test_those_that_stay_can_take_what_is_there() -> None:
    planner = Planner(PROFILE, PROMISE, QUICK)
    # Nothing arrives any more, but 60 requests still run: five workers' worth at the promised speed.
    plan = feed(planner, 300, d_ready=6, d_requests=60, d_arrived_requests=0, p_arrived_requests=0)
    assert plan.decode.replicas >= 4
    plan = feed(planner, 300, begin=300, d_ready=6, d_requests=0, d_arrived_requests=0, d_kv_usage=0.0)
    assert plan.decode.replicas == 1, "the control: an empty pool shrinks"


def test_bounds_are_kept() -> None:
    planner = Planner(PROFILE, PROMISE, dataclasses.replace(QUICK, lowest=2, highest=5))
    assert feed(planner, 100, p_arrived_tokens=1e6).prefill.replicas == 5
    empty = {"p_arrived_requests": 0, "p_arrived_tokens": 0, "p_queued_tokens": 0, "p_queued_requests": 0}
    assert feed(planner, 3000, begin=100, p_ready=5, **empty).prefill.replicas == 2
