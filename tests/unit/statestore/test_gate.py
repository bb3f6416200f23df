# SPDX-License-Identifier: Apache-2.0
"""The gate before early loads: every order in which reports, verdict, end and the request itself can come."""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from statestore.connector.gate import Gate, settle


class Scheduler:
    """vLLM's part: who has been told that their load has ended."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.told: list[str] = []

    def get_kv_connector(self) -> Any:
        return SimpleNamespace(gate=self.gate)

    def report(self, *keys: str) -> None:
        """The ranks of these requests have all reported."""
        self._update_from_kv_xfer_finished(SimpleNamespace(finished_recving=set(keys) or None))

    def _update_from_kv_xfer_finished(self, output: Any) -> None:
        self.gate.hold(output)
        self.told += sorted(output.finished_recving or ())


def settled(scheduler: Scheduler, key: str, opened: bool) -> None:
    settle(SimpleNamespace(scheduler=scheduler), key, opened)


ORDERS = [
    order
    for order in itertools.permutations(["add", "report", "open"])
    if order.index("add") < order.index("report")  # ranks report of requests that have been added
]


@pytest.mark.parametrize("order", ORDERS)
def test_told_once_all_of_it_has_come(order: tuple[str, ...]) -> None:
    scheduler = Scheduler()
    acts = {
        "add": lambda: scheduler.gate.add("a"),
        "report": lambda: scheduler.report("a"),
        "open": lambda: settled(scheduler, "a", True),
    }
    for number, act in enumerate(order):
        assert scheduler.told == [], "too early"
        acts[act]()
        assert bool(scheduler.told) == (number == 2)
    assert scheduler.told == ["a"]
    settled(scheduler, "a", False)
    assert scheduler.told == ["a"], "and once only"
    assert len(scheduler.gate) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(["report", "end"])))
def test_a_request_that_is_over_leaves(order: tuple[str, ...]) -> None:
    """vLLM is told, and frees its blocks; an open gate that comes after it changes nothing."""
    scheduler = Scheduler()
    scheduler.gate.add("a")
    for act in order:
        assert scheduler.told == []
        if act == "end":
            settled(scheduler, "a", False)
        else:
            scheduler.report("a")
    assert scheduler.told == ["a"]
    assert len(scheduler.gate) == 0


def test_a_verdict_on_a_request_that_never_comes_is_forgotten_with_it() -> None:
    scheduler = Scheduler()
    settled(scheduler, "a", True)
    assert len(scheduler.gate) == 1
    settled(scheduler, "a", False)
    assert len(scheduler.gate) == 0
    assert scheduler.told == []


def test_others_are_told_of_at_once() -> None:
    scheduler = Scheduler()
    scheduler.gate.add("a")
    scheduler.report("a", "b")
    scheduler.report("c")
    assert scheduler.told == ["b", "c"]
    settled(scheduler, "a", True)
    assert scheduler.told == ["b", "c", "a"]


def test_vllm_still_takes_it_so() -> None:
    """The one private method that the gate calls, and the field that it changes."""
    from vllm.v1.core.sched.scheduler import Scheduler as VllmScheduler
    from vllm.v1.outputs import KVConnectorOutput

    method = VllmScheduler._update_from_kv_xfer_finished
    assert list(inspect.signature(method).parameters) == ["self", "kv_connector_output"]
    source = inspect.getsource(method)
    assert source.index("update_connector_output") < source.index("finished_recving or ()")
    output = KVConnectorOutput(finished_recving={"a"})
    output.finished_recving = None
    assert output.finished_recving is None
