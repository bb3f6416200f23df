# SPDX-License-Identifier: Apache-2.0
"""Negative controls of the scheduler half's tests: each of these mistakes in it is noticed by one of them."""

from __future__ import annotations

from typing import Any

import pytest

from statestore.connector.links import Links
from statestore.connector.pins import Pins
from statestore.connector.scheduler_half import SchedulerHalf
from tests.unit.statestore import test_scheduler_half as publishes
from tests.unit.statestore import test_scheduler_loads as loads
from tests.unit.statestore.scheduler_probe import Half


def _first_block(
    self: SchedulerHalf, tables: tuple[list[int], ...], length: int, *_: Any
) -> tuple[list[int], ...]:
    return tuple([table[0]] for table in tables)


def _last_block(
    self: SchedulerHalf, tables: tuple[list[int], ...], length: int, *_: Any
) -> tuple[list[int], ...]:
    return tuple([table[-1]] if i == 0 else list(table) for i, table in enumerate(tables))


def _last_state_that_is_not_null(
    self: SchedulerHalf, tables: tuple[list[int], ...], length: int, *_: Any
) -> tuple[list[int], ...]:
    return tuple([[block for block in table if block][-1]] for table in tables)


def _first_report_ends_it(self: SchedulerHalf, reports: Any) -> None:
    self._world_size = 1
    for publish in self._publish.values():
        publish.links._ranks = 1
    _collect(self, reports)


def _failures_do_not_count(self: SchedulerHalf, reports: Any) -> None:
    for of_ranks in (*reports.load.values(), *reports.publish.values()):
        for report in of_ranks:
            report.failure = ""
    _collect(self, reports)


def _always_offered(self: SchedulerHalf, request: Any, local_tokens: int) -> tuple[int, bool]:
    return self._load[request.request_id].intent.length - local_tokens, True


def _at_once(self: SchedulerHalf, scheduled: dict[str, int], *_: Any) -> Any:
    for key in scheduled:
        if key in self._publish:
            self._publish[key].request.num_computed_tokens = 1 << 20
    return _build(self, scheduled)


def _pins_nothing(self: Pins, name: Any, request_id: str, spans: list[tuple[int, int]]) -> None:
    self._blocks[name] = []


def _pins_rows_only(self: Pins, name: Any, request_id: str, spans: list[tuple[int, int]]) -> None:
    _pin(self, name, request_id, [(1, 0), *spans[1:]])


def _never_unpins(self: Pins, name: Any) -> None:
    self._blocks.pop(name)


def _unpins_all(self: Pins, name: Any) -> None:
    for each in list(self._blocks):
        _unpin(self, each)


def _any_step_end(self: Links, computed: int, block: int) -> Any:
    return _due(self, computed, 1)


def _never_rebased(self: Links) -> None:
    """Keeps the base of the parent that could not be loaded."""


def _everything_counts(self: Links, unreported: bool = False) -> Any:
    return self._sent


_collect, _build, _pin, _unpin, _due = (
    SchedulerHalf.collect,
    SchedulerHalf.build_metadata,
    Pins.pin,
    Pins.unpin,
    Links.due,
)


@pytest.mark.parametrize(
    ("where", "method", "mistake", "scenario"),
    [
        (
            SchedulerHalf,
            "_blocks",
            _first_block,
            publishes.test_the_job_is_built_in_the_step_that_ends_the_prompt,
        ),
        (SchedulerHalf, "_blocks", _last_block, loads.test_a_load_takes_no_block_past_its_length),
        (
            SchedulerHalf,
            "collect",
            _first_report_ends_it,
            publishes.test_blocks_are_pinned_until_every_rank_has_reported,
        ),
        (SchedulerHalf, "collect", _failures_do_not_count, loads.test_a_failed_load_is_never_offered_again),
        (
            SchedulerHalf,
            "collect",
            _failures_do_not_count,
            publishes.test_what_rests_on_a_failed_link_is_dropped,
        ),
        (
            SchedulerHalf,
            "collect",
            _failures_do_not_count,
            loads.test_after_a_failed_load_everything_is_published,
        ),
        (SchedulerHalf, "matched", _always_offered, loads.test_a_failed_load_is_never_offered_again),
        (
            SchedulerHalf,
            "build_metadata",
            _at_once,
            publishes.test_a_chunked_prompt_is_published_after_its_last_chunk,
        ),
        (
            SchedulerHalf,
            "build_metadata",
            _at_once,
            publishes.test_an_abort_before_the_last_chunk_publishes_nothing,
        ),
        (Pins, "pin", _pins_nothing, publishes.test_blocks_are_pinned_until_every_rank_has_reported),
        (Pins, "pin", _pins_nothing, publishes.test_an_abort_after_the_job_went_out_waits_for_the_ranks),
        (Pins, "pin", _pins_nothing, publishes.test_the_end_of_an_answer_is_published_with_the_next_step),
        (
            Pins,
            "pin",
            _pins_rows_only,
            publishes.test_a_state_is_pinned_beyond_the_steps_that_recycle_its_block,
        ),
        (Pins, "unpin", _never_unpins, publishes.test_a_failed_rank_ends_the_pin_too),
        (Pins, "unpin", _unpins_all, publishes.test_an_abort_with_links_out_waits_for_them),
        (
            Links,
            "due",
            _any_step_end,
            lambda half: publishes.test_where_checkpoints_are(half, (30, 62, 100), [(0, 100)]),
        ),
        (Links, "rebase", _never_rebased, loads.test_after_a_failed_load_everything_is_published),
        (
            Links,
            "_chain",
            _everything_counts,
            publishes.test_a_link_after_a_failed_one_begins_where_that_began,
        ),
        (Links, "_chain", _everything_counts, publishes.test_what_rests_on_a_failed_link_is_dropped),
    ],
)
def test_a_mistake_is_noticed(
    half: Half, where: Any, method: str, mistake: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, method, mistake)
    with pytest.raises(AssertionError):
        scenario(half)


def test_taking_another_block_for_a_null_one_is_noticed(
    half: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SchedulerHalf, "_blocks", _last_state_that_is_not_null)
    with pytest.raises(AssertionError, match="another block was taken"):
        publishes.test_a_null_running_state_is_handed_over_to_be_refused(half, caplog)
