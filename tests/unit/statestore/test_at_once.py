# SPDX-License-Identifier: Apache-2.0
"""Reports that are told between two steps: what succeeded, once; what failed is left to a step's own output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from statestore.connector import at_once
from statestore.connector.connector import DeltaserveConnector
from statestore.connector.messages import RankReport, RankReports, StepMetadata
from tests.unit.statestore.test_prepared_publish import Rank, rank

__all__ = ["rank"]

GOOD, BAD = RankReport(0), RankReport(0, failure="digest")


def ended(half: Any, loads: dict[str, RankReport], publishes: dict[tuple[str, int], RankReport]) -> None:
    """What the I/O threads leave behind."""
    half._received |= set(loads)
    half._failed |= {key for key, report in loads.items() if report.failure}
    half._reports.load.update({key: [report] for key, report in loads.items()})
    half._reports.publish.update({name: [report] for name, report in publishes.items()})


def test_what_succeeded_is_told_once(rank: Rank) -> None:
    half = rank.half
    assert half.ended_well() == (set(), None)
    ended(half, {"good": GOOD, "bad": BAD}, {("p", 0): GOOD, ("q", 1): BAD})
    received, reports = half.ended_well()
    assert received == {"good"}
    assert reports == RankReports({("p", 0): [GOOD], ("q", 1): [BAD]}, {"good": [GOOD]})
    assert half.ended_well() == (set(), None)
    rest = half.results()
    assert (rest.finished_recving, rest.failed_recving) == ({"bad"}, {"bad"})
    assert half.take_reports() == RankReports({}, {"bad": [BAD]})
    assert half.take_reports() is None


def test_a_load_that_ends_while_a_steps_output_is_put_together(rank: Rank) -> None:
    """vLLM asks what has ended first, and for the reports a little later: a load in between goes with both."""
    half = rank.half
    assert half.results().finished_recving == set()
    ended(half, {"good": GOOD}, {})
    assert half.take_reports() == RankReports({}, {"good": [GOOD]})
    received, reports = half.ended_well()
    assert received == {"good"}
    assert reports == RankReports({}, {}), "its report is on its way already"
    assert half.ended_well() == (set(), None)


def test_a_failed_load_alone_waits_for_the_step(rank: Rank) -> None:
    """vLLM sets back what it has counted for the request in a step's output, before it hears that the load is over."""
    ended(rank.half, {"bad": BAD}, {})
    assert rank.half.ended_well() == (set(), None)
    assert rank.half.results().failed_recving == {"bad"}


@pytest.mark.parametrize("here", [True, False])
def test_the_scheduler_hears_of_it(rank: Rank, monkeypatch: pytest.MonkeyPatch, here: bool) -> None:
    """`here`: the rank lives in the engine's process."""
    from vllm.distributed import kv_transfer

    heard: list[Any] = []
    core = SimpleNamespace(scheduler=SimpleNamespace(_update_from_kv_xfer_finished=heard.append))
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: here)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: rank.half)
    at_once.tell(core)
    assert heard == [], "nothing has ended"
    ended(rank.half, {"good": GOOD}, {})
    at_once.tell(core)
    assert len(heard) == here
    if here:
        assert heard[0].finished_recving == {"good"}
        assert heard[0].kv_connector_worker_meta == RankReports({}, {"good": [GOOD]})
    else:
        assert rank.half.results().finished_recving == {"good"}


def test_a_load_begins_before_its_step_is_launched() -> None:
    """vLLM calls `bind_connector_metadata` before the forward pass, and `start_load_kv` behind it."""
    begun: list[Any] = []
    half = SimpleNamespace(start_loads=begun.extend, prepare_publishes=lambda jobs: None)
    connector: Any = object.__new__(DeltaserveConnector)
    connector._scheduler, connector._worker = None, half
    connector.bind_connector_metadata(StepMetadata(load=["job"]))  # type: ignore[list-item]
    assert begun == ["job"]
    connector.start_load_kv(None)
    assert begun == ["job"], "once"
