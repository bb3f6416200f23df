# SPDX-License-Identifier: Apache-2.0
"""Placement policies: what they choose, what they learn, and that they forget who has gone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import pytest
from vllm.v1.engine import FinishReason

from router.policy import POLICIES, Choice, Policy, Prompt, make
from router.policy.base import PREFIX_UNIT, STATE_TOKEN_BYTES, W, lowest, works
from router.policy.costs import Line
from router.policy.least import Least
from router.policy.prefix import PrefixAware
from router.policy.price import Price
from router.policy.warmth import Warmth
from tests.doubles.worker import expected_tokens
from tests.unit.router.harness import cluster


@dataclass
class Worker:
    worker_id: str
    outstanding: int = 0
    state_bytes: int = 0
    running: int = 0
    others: int = 0


def prompt(length: int, first: int = 0, **fields: object) -> Prompt:
    return Prompt(range(first, first + length), **fields)  # type: ignore[arg-type]


# ---- what every policy does


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_other_routers_have_given_a_worker_counts(name: str) -> None:
    policy = make(name, 256)
    busy, idle = Worker("d0", others=5000), Worker("d1", outstanding=1000)
    choice = policy.choose(prompt(20), [busy, idle], [])
    assert choice is not None
    assert choice.decode is idle
    busy.others = 0  # the control
    choice = policy.choose(prompt(20), [busy, idle], [])
    assert choice is not None
    assert choice.decode is busy


@pytest.mark.parametrize("name", POLICIES)
class TestEvery:
    def test_without_a_decode_worker_there_is_no_choice(self, name: str) -> None:
        assert make(name, 256).choose(prompt(500), [], [Worker("p")]) is None

    def test_without_a_prefill_worker_the_decode_worker_computes(self, name: str) -> None:
        choice = make(name, 256).choose(prompt(5000), [Worker("d")], [])
        assert choice is not None
        assert (choice.decode.worker_id, choice.prefill) == ("d", None)

    def test_the_limit_holds_before_anything_is_learned(self, name: str) -> None:
        for length, handed in ((100, False), (4000, True)):
            choice = make(name, 256).choose(prompt(length), [Worker("d", running=1)], [Worker("p")])
            assert choice is not None
            assert (choice.prefill is not None) == handed
            assert choice.why

    def test_forced_is_handed_over_whatever_it_costs(self, name: str) -> None:
        choice = make(name, 256).choose(prompt(2, state_bytes=1 << 40), [Worker("d")], [Worker("p")], True)
        assert choice is not None
        assert choice.prefill is not None

    def test_work_is_spread(self, name: str) -> None:
        decodes = [Worker("d0", 5000), Worker("d1", 10)]
        prefills = [Worker("p0", 9000), Worker("p1", 0)]
        choice = make(name, 256).choose(prompt(4000), decodes, prefills, True)
        assert choice is not None
        assert choice.prefill is not None
        assert (choice.decode.worker_id, choice.prefill.worker_id) == ("d1", "p1")


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match="policy: 'dearest' is none of least, prefix, price"):
        make("dearest", 256)


def test_state_that_is_held_counts_as_work() -> None:
    decodes = [Worker("d0", 100, 200 * STATE_TOKEN_BYTES), Worker("d1", 200)]
    choice = make("least", 256).choose(prompt(500), decodes, [Worker("p")])
    assert choice is not None
    assert choice.decode.worker_id == "d1"


# ---- least


def test_the_lowest_price_and_ties() -> None:
    workers = [Worker("b", 5), Worker("a", 5), Worker("c", 9)]
    assert lowest(workers, works(workers)) == (workers[1], 5)
    assert lowest(workers[::-1], works(workers[::-1])) == (workers[1], 5)
    assert lowest([], []) == (None, inf)


def misplaced(policy: Policy) -> int:
    """Of many decisions, those that did not go to the workers with the least to do."""
    noise, wrong = random.Random(5), 0
    for _ in range(200):
        decodes, prefills = (
            [
                Worker(f"{role}{i}", noise.randrange(5000), noise.randrange(3000) * STATE_TOKEN_BYTES)
                for i in noise.sample(range(9), noise.randrange(1, 9))
            ]
            for role in "dp"
        )
        choice = policy.choose(prompt(500), decodes, prefills, True)
        assert choice is not None
        assert choice.prefill is not None
        for chosen, workers in ((choice.decode, decodes), (choice.prefill, prefills)):
            wrong += works([chosen])[0] > min(works(workers))
    return wrong


class Careless(Least):
    """The control: looks at tokens only, and forgets the state that a worker holds."""

    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        decode, _ = lowest(decodes, [worker.outstanding for worker in decodes])
        prefill, _ = lowest(prefills, [worker.outstanding for worker in prefills])
        return None if decode is None else Choice(decode, prefill, "")


class First(Least):
    """The control: whoever comes first."""

    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        return Choice(decodes[0], prefills[0], "")


def test_least_is_the_least() -> None:
    assert misplaced(Least(256)) == 0


@pytest.mark.parametrize("careless", [Careless, First])
def test_a_policy_that_looks_elsewhere_is_found_out(careless: type[Least]) -> None:
    assert misplaced(careless(256)) > 50


# ---- warmth


def test_prefixes_carry_the_salt_and_everything_before_them() -> None:
    one, two = prompt(3 * PREFIX_UNIT).prefixes, prompt(3 * PREFIX_UNIT + 5).prefixes
    assert (len(one), one) == (3, two)
    assert not set(one) & set(prompt(3 * PREFIX_UNIT, cache_salt="other").prefixes)
    changed = [*range(3 * PREFIX_UNIT)]
    changed[0] += 1
    assert not set(one) & set(Prompt(changed).prefixes)
    assert not prompt(PREFIX_UNIT - 1).prefixes


def test_no_more_is_digested_than_somebody_may_hold() -> None:
    warmth, cold = Warmth(), prompt(20 * PREFIX_UNIT)
    assert warmth.tokens(cold) == {}
    assert len(cold._digests) == 1
    warmth.add("a", prompt(3 * PREFIX_UNIT))
    assert warmth.tokens(cold) == {"a": 3 * PREFIX_UNIT}
    assert len(cold._digests) == 4
    assert len(cold.prefixes) == 20, "and all of it when it is wanted"


def test_an_answer_is_digested_from_the_prompt_on() -> None:
    whole, one = range(5 * PREFIX_UNIT), prompt(2 * PREFIX_UNIT + 7)
    one.prefix(1)
    assert one.followed_by(whole[2 * PREFIX_UNIT + 7 :]).prefixes == Prompt(whole).prefixes
    assert len(one._digests) == 1, "the prompt's own stay as they were"


def test_warmth_is_what_a_search_of_everything_finds() -> None:
    """Against the plain definition, while prompts share beginnings and old ones are forgotten."""
    noise, warmth = random.Random(7), Warmth(capacity=12)
    beginnings = [[noise.randrange(1000) for _ in range(6 * PREFIX_UNIT)] for _ in range(3)]

    def some() -> Prompt:
        shared = noise.choice(beginnings)[: noise.randrange(7) * PREFIX_UNIT]
        return Prompt([*shared, *(noise.randrange(1000) for _ in range(noise.randrange(700)))])

    deep = 0
    for _ in range(400):
        warmth.add(noise.choice("abcde"), some())
        wanted = some()
        plain = {
            worker: max(n for n, prefix in enumerate(wanted.prefixes, 1) if prefix in held) * PREFIX_UNIT
            for worker, held in warmth._of_worker.items()
            if any(prefix in held for prefix in wanted.prefixes)
        }
        assert warmth.tokens(wanted) == plain
        deep += len(set(plain.values())) > 1
    assert deep > 50, "the control: workers held different lengths"


def test_the_longest_prefix_of_each_worker() -> None:
    warmth = Warmth()
    warmth.add("a", prompt(2 * PREFIX_UNIT))
    warmth.add("b", prompt(4 * PREFIX_UNIT))
    assert warmth.tokens(prompt(9 * PREFIX_UNIT)) == {"a": 2 * PREFIX_UNIT, "b": 4 * PREFIX_UNIT}
    assert warmth.tokens(prompt(9 * PREFIX_UNIT, first=1)) == {}
    warmth.forget(["b", "nobody"])
    assert warmth.tokens(prompt(9 * PREFIX_UNIT)) == {"a": 2 * PREFIX_UNIT}


def test_warmth_is_bounded_and_keeps_the_youngest() -> None:
    warmth = Warmth(capacity=4)
    for first in range(10):
        warmth.add("a", prompt(2 * PREFIX_UNIT, first * 100_000))
    assert len(warmth._of_worker["a"]) == len(warmth._holders) == 4
    assert warmth.tokens(prompt(2 * PREFIX_UNIT, 900_000)) == {"a": 2 * PREFIX_UNIT}
    assert warmth.tokens(prompt(2 * PREFIX_UNIT, 0)) == {}


def test_a_warm_worker_is_chosen_until_it_is_too_busy() -> None:
    policy = PrefixAware(256)
    policy.ended("d1", prompt(2000), range(2000, 2048))
    cold, warm = Worker("d0"), Worker("d1", outstanding=1000)
    choice = policy.choose(prompt(2048), [cold, warm], [Worker("p")])
    assert choice is not None
    assert (choice.decode, choice.prefill, choice.reason) == (warm, None, "warm_prefix")
    warm.outstanding = 3000
    choice = policy.choose(prompt(2048), [cold, warm], [Worker("p")])
    assert choice is not None
    assert (choice.decode, choice.prefill is not None) == (cold, True)


# ---- the price


def test_a_line_is_learned_and_unlearned() -> None:
    line = Line(1.0, 0.1, 100)
    noise = random.Random(3)
    for _ in range(300):
        amount = noise.uniform(10, 1000)
        line.learn(amount, (0.2 + 0.003 * amount) * noise.uniform(0.98, 1.02))
    assert line.fixed == pytest.approx(0.2, rel=0.15)
    assert line.slope == pytest.approx(0.003, rel=0.05)
    for _ in range(300):
        amount = noise.uniform(10, 1000)
        line.learn(amount, 0.01 * amount)
    assert line(500) == pytest.approx(5.0, rel=0.05)
    assert line.fixed >= 0


def test_a_line_never_promises_less_than_nothing() -> None:
    line = Line(0.0, 0.001, 100)
    for amount, seconds in ((10, 0.0), (1000, 5.0), (900, 0.1), (5, 0.0)) * 20:
        line.learn(amount, seconds)
        assert line(0) >= 0
        assert line.slope >= 0


def test_amounts_that_are_all_alike_keep_a_slope() -> None:
    """A prior of another speed bends the line to a slope of zero, and a queue costs nothing then."""
    line, bent = Line(0.02, 0.0005, 1000), Line(0.02, 0.0005, 1000)
    bent.learned = True  # the control: a prior that is not scaled
    for _ in range(200):
        line.learn(8191, 0.1)
        bent.learn(8191, 0.1)
    assert line(8191) == pytest.approx(0.1, rel=0.05)
    assert line.slope == pytest.approx(0.1 / 8191, rel=0.1)
    assert bent.slope == 0.0


def test_prompts_go_to_the_decode_worker_when_the_prefill_worker_has_a_queue() -> None:
    """On machines that are much faster than the prior, and before a decode worker has computed anything alone."""
    policy = Price(256)
    for number in range(8):
        policy.prefilled("p", prompt(8192, first=number * 10**5), 8191, 0.1, True)
        policy.loaded(57_000_000, 0.02)
    policy.gone(["p"])
    wanted = prompt(8192, first=10**8, state_bytes=57_000_000)
    decodes = [Worker("d", running=8)]
    handed = [
        choice.prefill is not None
        for waiting in range(12)
        if (choice := policy.choose(wanted, decodes, [Worker("p", outstanding=8192 * waiting)]))
    ]
    assert handed[0]
    assert not handed[-1]
    assert handed == sorted(handed, reverse=True), "the longer the queue, the rather here"


@pytest.mark.parametrize("bandwidth", [1e7, 1e10])
def test_slow_networks_keep_prompts_where_they_are(bandwidth: float) -> None:
    policy = Price(256)
    for length in (500, 1000, 2000, 4000) * 10:
        policy.prefilled("p", prompt(length), length, 0.02 + length / 2000, True)
        policy.computed("d", prompt(length), length, 0.02 + length / 2000, True)
        policy.loaded(length * 50_000, 0.005 + length * 50_000 / bandwidth)
    policy.gone(["p", "d"])
    wanted = prompt(2000, first=10**6, state_bytes=2000 * 50_000)
    choice = policy.choose(wanted, [Worker("d", running=4)], [Worker("p")])
    assert choice is not None
    assert (choice.prefill is not None) == (bandwidth > 1e9), choice.why


def test_a_warm_decode_worker_is_cheaper_than_a_move() -> None:
    policy = Price(256)
    wanted = prompt(4096, state_bytes=50_000_000)
    workers = [Worker("d", running=4)], [Worker("p")]
    choice = policy.choose(wanted, *workers)
    assert choice is not None
    assert choice.prefill is not None, "the control: cold, it is handed over"
    policy.ended("d", wanted, [])
    choice = policy.choose(wanted, *workers)
    assert choice is not None
    assert (choice.prefill, choice.reason) == (None, "cheaper_here")


# ---- in the dispatcher


async def test_the_dispatcher_asks_the_policy_and_tells_it_what_came_of_it() -> None:
    wanted = list(range(100, 100 + 3 * PREFIX_UNIT))
    async with cluster(decode=2, placement="auto", policy="prefix", handover_min_tokens=64) as c:
        first = c.add(wanted)
        assert await c.finish(first) == (expected_tokens(wanted, 6), FinishReason.LENGTH)
        assert c.trace(first)["route"] == "handover p0 d0"
        assert c.trace(first)["why"] == f"p0 lacks {len(wanted)} of {len(wanted)} tokens"
        again = c.add(wanted)
        assert await c.finish(again) == (expected_tokens(wanted, 6), FinishReason.LENGTH)
        assert c.trace(again)["route"] == "local warm_prefix d0"
        await c.everything_returned()
        await c.role("decode")[0].die()
        third = c.add(wanted)
        await c.finish(third)
        assert c.trace(third)["route"] == "handover p0 d1", "what the worker held has gone with it"
        await c.everything_returned()
        assert all(link.state_bytes == 0 for link in c.dispatcher.roster._links.values())
