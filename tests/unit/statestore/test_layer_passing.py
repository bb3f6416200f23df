# SPDX-License-Identifier: Apache-2.0
"""Which parts of a step's state are told to be final, when, and what a publish does with it (docs/layer_streams.md)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltaserve.config import StoreConfig
from statestore.boundary import Epoch
from statestore.connector import worker_half
from statestore.connector.cache_view import CacheView
from statestore.connector.messages import PublishJob, RankReport
from statestore.connector.passing import GROUPS_VARIABLE, Layers, Passing, StepFailed, layer_groups
from statestore.connector.publishing import Publisher
from statestore.connector.worker_half import WorkerHalf
from tests.doubles.pool import PoolDouble, Store
from tests.property.rank_caches import RankCaches, blocks_for
from tests.property.reshard_cases import geometry
from tests.property.reshard_reference import World
from tests.support.patience import HUNG
from tests.support.processes import wait_until

G = geometry(tp=1, head_v=4, kda_layers=(0, 1, 2, 4, 5), mla_layers=(3, 6), num_spec=0)
GROUPS = (range(2), range(2, 4), range(4, 5))
LENGTH = 300
ORDER = range(7)


class Rank:
    """A worker half over a pool in memory whose caches are computed layer by layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: tuple[range, ...] = GROUPS) -> None:
        """No `groups`: it writes when its step has ended."""
        monkeypatch.setattr(worker_half, "geometry_of", lambda *arguments: G)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=1),
            model_config=SimpleNamespace(max_model_len=LENGTH),
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
        extra: dict[str, Any] = {
            "worker_id": "prefill-1",
            "model_digest": G.model_digest,
            "store": StoreConfig().model_dump(mode="json"),
            "load_timeout": HUNG,
        }
        self.half = WorkerHalf(config, None, extra)
        self.store = Store()
        self.pool = PoolDouble(self.store)
        self.caches, self.done = (RankCaches(G, blocks_for(G, LENGTH)) for _ in range(2))
        self.tables = self.caches.tables(LENGTH, 1)
        self.done.lay_out(World.random(G, LENGTH, 1), 0, self.tables)
        view = CacheView(self.caches.caches, self.caches.config, G)
        self.half._view, self.half._pool = view, self.pool
        self.half._publisher = Publisher(view, self.pool, 0, HUNG)
        self.layers = Layers(G, groups, view.fence)
        if groups:
            self.half._layers = self.layers
        self.job = PublishJob("r", Epoch(7, 1), LENGTH, self.tables, "", 1, 1, tokens=LENGTH)

    def compute(self, layer: int) -> None:
        """What the layer's kernels would leave in the caches, and its hook."""
        self.land(layer)
        self.half._layers.passed(layer)  # type: ignore[union-attr]

    def land(self, layer: int) -> None:
        """What the layer's kernels would leave in the caches."""
        of_slot, of_block = self.caches._strides()
        for number, group in enumerate(self.caches.config.kv_cache_groups):
            for slot, name in enumerate(group.layer_names):
                if f".{layer}." in name:
                    for block in self.tables[number]:
                        at = slot * of_slot + block * of_block
                        page = slice(at, at + self.caches.page)
                        self.caches.memory[page] = self.done.memory[page]

    def written(self) -> int:
        """Bytes that have come into the store so far."""
        return sum(stored.written for stored in list(self.store.objects.values()))

    def report(self) -> RankReport:
        reports: list[RankReport] = []

        def told() -> bool:
            found = self.half.take_reports()
            reports.extend(found.publish[self.job.name] if found is not None else [])
            return bool(reports)

        wait_until(told, HUNG, "the job is reported")
        (report,) = reports
        return report

    def objects(self) -> dict[str, bytes]:
        return {key: bytes(stored.data) for key, stored in self.store.objects.items()}


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(monkeypatch)
    yield made
    made.half.close()


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """One that writes when its step has ended."""
    made = Rank(monkeypatch, ())
    for layer in ORDER:
        made.land(layer)
    made.half.prepare_publishes([made.job])
    made.half.start_publishes([made.job])
    yield made
    made.half.close()


def test_parts_leave_while_the_step_computes_and_are_the_same_bytes(rank: Rank, whole: Rank) -> None:
    expected = whole.report()
    assert expected.failure == "", expected.detail
    rank.half.prepare_publishes([rank.job])
    for layer in ORDER:
        rank.compute(layer)
        if layer in (1, 4):  # the groups are layers 0 and 1, 2 and 4, 5
            part = (layer + 1) // 2 * 2 * G.sizes.kda // 5
            wait_until(lambda part=part: rank.written() == part, HUNG, "the group is written")
    assert not any(stored.sealed for stored in rank.store.objects.values()), "nobody can read them"
    rank.half.start_publishes([rank.job])
    report = rank.report()
    assert report.failure == "", report.detail
    assert [entry.digests for entry in report.objects] == [entry.digests for entry in expected.objects]
    assert expected.streamed == 0
    assert report.streamed >= 4 * G.sizes.kda // 5, "the last parts may have come with the end"
    assert rank.objects() == whole.objects()


def test_one_group_leaves_with_the_last_layer_that_has_it(
    monkeypatch: pytest.MonkeyPatch, whole: Rank
) -> None:
    whole.report()
    rank = Rank(monkeypatch, (range(5),))
    rank.half.prepare_publishes([rank.job])
    for layer in ORDER[:-1]:
        rank.compute(layer)
    wait_until(
        lambda: rank.written() == G.sizes.kda, HUNG, "the states are written before the last layer runs"
    )
    rank.compute(6)
    rank.half.start_publishes([rank.job])
    assert rank.report().failure == ""
    assert rank.objects() == whole.objects()
    rank.half.close()


def test_control_a_layer_that_is_told_of_before_it_has_computed_is_refused(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    rank.land(1)
    for layer in (0, 1):
        rank.half._layers.passed(layer)  # type: ignore[union-attr]
    report = rank.report()
    assert report.failure in ("null_state", "not_finite")
    assert not rank.store.objects


@pytest.mark.parametrize("told", [[], [0], [0, 2, 1, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]], ids=str)
def test_what_no_hook_told_of_is_taken_at_the_end(rank: Rank, whole: Rank, told: list[int]) -> None:
    whole.report()
    rank.half.prepare_publishes([rank.job])
    for layer in told:
        rank.half._layers.passed(layer)  # type: ignore[union-attr]
    # Had any of it been taken, it would have been refused.
    for layer in ORDER:
        rank.land(layer)
    rank.half.start_publishes([rank.job])
    report = rank.report()
    assert (report.failure, report.streamed) == ("", 0)
    assert rank.objects() == whole.objects()


def test_a_layer_that_runs_twice_fails_the_step_and_ends_the_streams(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    for layer in ORDER:
        rank.compute(layer)
    rank.compute(1)
    rank.half.start_publishes([rank.job])
    report = rank.report()
    assert (report.failure, "twice" in report.detail) == ("step", True)
    assert not rank.store.objects, "its room has been given back"
    rank.job = replace(rank.job, epoch=Epoch(7, 2))
    rank.half.prepare_publishes([rank.job])
    assert rank.half._prepared[rank.job.name].groups == ()
    rank.half.start_publishes([rank.job])
    assert rank.report().failure == ""


@pytest.mark.parametrize("tokens", [0, 255])
def test_a_short_step_is_not_streamed(rank: Rank, tokens: int) -> None:
    rank.job = replace(rank.job, tokens=tokens)
    rank.half.prepare_publishes([rank.job])
    for layer in ORDER:
        rank.compute(layer)
    assert rank.written() == 0
    rank.half.start_publishes([rank.job])
    assert rank.report().failure == ""


def test_a_step_that_never_ends_gives_everything_back(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    for layer in (0, 1):
        rank.compute(layer)
    wait_until(lambda: rank.written() > 0, HUNG, "the first group is written")
    held = rank.pool.staging_free
    rank.half.close()
    assert not rank.store.objects
    assert rank.pool.staging_free > held


def test_the_next_step_fails_a_publish_whose_step_did_not_end(rank: Rank) -> None:
    rank.half.prepare_publishes([rank.job])
    for layer in (0, 1):
        rank.compute(layer)
    rank.half.prepare_publishes([])
    assert rank.report().failure == "step"
    assert not rank.store.objects


def test_a_wait_gives_up() -> None:
    passing = Passing(0.05, GROUPS)
    passing.reach(0, None)
    passing.wait(0)
    with pytest.raises(TimeoutError, match=r"did not end within 0\.05 s"):
        passing.wait(1)


def test_a_failed_step_wakes_who_waits() -> None:
    passing = Passing(HUNG, GROUPS)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            passing.wait_end()
        except StepFailed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    passing.fail("why")
    passing.end(None)
    thread.join(HUNG)
    assert [str(error) for error in errors] == ["why"]


def test_fences_are_waited_for() -> None:
    waited: list[str] = []

    def fence(name: str) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(name))

    passing = Passing(HUNG, GROUPS)
    passing.reach(0, fence("first"))
    passing.reach(0, fence("a second word is not heard"))
    passing.wait(0)
    passing.end(fence("end"))
    passing.wait(1)
    passing.wait_end()
    assert waited == ["first", "end", "end"]


def test_hooks_tell_of_the_models_own_layers() -> None:
    modules = {layer: torch.nn.Identity() for layer in ORDER}
    layers = Layers(G, GROUPS, lambda: None)
    layers.install(modules)
    job = Passing(HUNG, GROUPS)
    modules[0](torch.zeros(1))  # no step: not counted
    layers.begin([job])
    for layer in ORDER:
        modules[layer](torch.zeros(1))
        assert sorted(job._fences) == [mark for mark, last in enumerate((1, 4, 5, 6)) if last <= layer]
    with pytest.raises(KeyError):
        layers.install({0: modules[0]})


@pytest.mark.parametrize(
    ("value", "proves", "changes", "groups"),
    [
        ("", False, {}, 0),
        ("", True, {}, 1),  # so few bytes a head
        ("", True, {"head_k": 128, "head_v": 128, "kda_layers": tuple(range(69)), "mla_layers": (69,)}, 4),
        ("", True, {"head_k": 128, "head_v": 128, "kda_layers": tuple(range(12)), "mla_layers": (12,)}, 3),
        ("3", False, {}, 3),
        ("9", False, {}, 5),
        ("1", True, {"head_k": 128, "head_v": 128, "kda_layers": tuple(range(69)), "mla_layers": (69,)}, 0),
        ("", True, {"num_spec": 2}, 0),
        ("3", True, {"num_spec": 2}, 0),
        ("3", True, {"kda_layers": (0,), "mla_layers": (1,)}, 1),
    ],
)
def test_how_many_groups(
    monkeypatch: pytest.MonkeyPatch, value: str, proves: bool, changes: dict[str, Any], groups: int
) -> None:
    monkeypatch.setenv(GROUPS_VARIABLE, value)
    g = replace(G, **changes)
    found = layer_groups(g, proves)
    assert len(found) == groups
    assert [layer for group in found for layer in group] == (list(range(len(g.kda_layers))) if groups else [])


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_number_of_groups_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(GROUPS_VARIABLE, value)
    with pytest.raises(ValueError, match=f"{GROUPS_VARIABLE}='{value}' is not a number of at least 1"):
        layer_groups(G, True)
