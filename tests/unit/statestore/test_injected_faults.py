# SPDX-License-Identifier: Apache-2.0
"""Every kind of damage on purpose is found by the check that is there for it, and by that one alone."""

from __future__ import annotations

import dataclasses
from itertools import cycle

import pytest

from statestore.connector import faults
from statestore.connector.cache_view import CacheView
from statestore.connector.loading import Loader
from statestore.connector.messages import LoadJob, RankReport
from statestore.connector.worker_half import failure_kind
from tests.unit.statestore.test_publish_load import PAIRS, Handoff

FOUND = {
    "flip": "digest",
    "truncate": "size",
    "foreign": "digest",
    "null": "null_state",
    "stale": "epoch",
    "dtype": "geometry",
}
NEEDS_ANOTHER = ("foreign", "stale", "swap")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_earlier", {})
    monkeypatch.setattr(faults, "_turns", cycle(faults.FOUND))


@pytest.fixture(params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest) -> tuple[Handoff, Handoff]:
    """Two boundaries of different requests in one store."""
    first = Handoff(PAIRS[request.param], seed=1)
    second = Handoff(PAIRS[request.param], seed=2, store=first.store)
    first.publish()
    second.publish()
    return first, second


def load(handoff: Handoff, kind: str, verify: bool = True) -> str:
    """Outcome of rank 0's damaged load: exact, wrong, or the kind of its failure."""
    assert handoff.record is not None
    target = handoff.case.target
    caches = handoff._caches(target)
    before = caches.memory.copy()
    view = CacheView(caches.caches, caches.config, target)
    loader = Loader(view, handoff.pool, 0, 1.0, verify, kind)
    tables = caches.tables(handoff.case.length, 5)
    try:
        loader.load(LoadJob("k", (handoff.record,), tables, 0), RankReport(0))
    except Exception as error:
        assert (caches.memory == before).all(), "a failed load has written into the caches"
        return failure_kind(error)
    return "exact" if handoff.is_exact(0, caches) else "wrong"


@pytest.mark.parametrize("kind", sorted(FOUND))
def test_damage_is_found_by_its_check(pair: tuple[Handoff, Handoff], kind: str) -> None:
    first, second = pair
    if kind in NEEDS_ANOTHER:
        assert load(first, kind) == "exact", "there is no earlier request to take from"
    assert load(second, kind) == FOUND[kind]


@pytest.mark.parametrize("kind", ["flip", "foreign", "null", "stale", "swap"])
def test_without_verification_damage_becomes_state(pair: tuple[Handoff, Handoff], kind: str) -> None:
    first, second = pair
    load(first, kind, verify=False)
    assert load(second, kind, verify=False) == "wrong"


def test_an_exchanged_state_is_the_other_requests(pair: tuple[Handoff, Handoff]) -> None:
    first, second = pair
    assert load(first, "swap", verify=False) == "exact"
    assert load(second, "swap", verify=False) == "wrong"
    assert load(second, "none") == "digest", "it stays in the store, and a check would have found it"


def test_another_kind_is_refused(pair: tuple[Handoff, Handoff]) -> None:
    assert load(pair[0], "none") == "exact"
    assert load(pair[0], "melt") == "error"


def test_each_kind_in_turn(pair: tuple[Handoff, Handoff]) -> None:
    found = []
    for seed in range(3, 9):
        handoff = Handoff(pair[0].case, seed=seed, store=pair[0].store)
        handoff.publish()
        found.append(load(handoff, "each"))
    assert found == list(FOUND.values())


@pytest.mark.parametrize(("verify", "outcome"), [(False, "wrong"), (True, "epoch")])
def test_a_stale_object_of_a_longer_request_that_has_ended(
    pair: tuple[Handoff, Handoff], verify: bool, outcome: str
) -> None:
    first, second = pair
    assert first.record is not None
    assert load(first, "stale", verify=False) == "exact"
    longer = faults._earlier.copy()
    for nbytes, earlier in longer.items():
        entry = dataclasses.replace(earlier.entry, token_hi=earlier.entry.token_hi + 100)
        faults._earlier[nbytes] = dataclasses.replace(earlier, entry=entry)
    first.pool.remove([entry.key for entry in first.record.objects()])
    assert load(second, "stale", verify) == outcome
