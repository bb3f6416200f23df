# SPDX-License-Identifier: Apache-2.0
"""The traces are those that the baselines were tuned on and the planner is measured on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling.traces import HELD_OUT_SEEDS, LONGEST_PROMPT, NAMES, SECONDS, TRAINING_SEEDS, make

DIGESTS = json.loads(
    (Path(__file__).parents[3] / "benchmarks" / "scaling" / "digests.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", NAMES)
def test_every_trace_is_the_pinned_one(name: str) -> None:
    seeds = (*TRAINING_SEEDS, *HELD_OUT_SEEDS)
    assert list(DIGESTS[name]) == [str(seed) for seed in seeds]
    # One maker serves all seeds, so that some of them tell whether it has changed.
    made = {str(seed): make(name, seed).digest() for seed in seeds[::5]}
    assert made.items() <= DIGESTS[name].items()
    assert make(name, 1).digest() not in made.values(), "the control: another seed is another trace"


def test_training_and_held_out_seeds_are_apart() -> None:
    assert not set(TRAINING_SEEDS) & set(HELD_OUT_SEEDS)
    assert len(HELD_OUT_SEEDS) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_requests_are_in_order_and_in_bounds(name: str) -> None:
    trace = make(name, TRAINING_SEEDS[0])
    assert trace.arrivals == sorted(trace.arrivals)
    assert 0 <= trace.arrivals[0] <= trace.arrivals[-1] < SECONDS
    assert all(16 <= tokens <= LONGEST_PROMPT for tokens in trace.prompts)
    assert min(trace.outputs) >= 2


@pytest.mark.parametrize("seed", TRAINING_SEEDS[:5])
def test_the_shapes_are_what_their_names_say(seed: int) -> None:
    counts = {
        name: np.histogram(make(name, seed).arrivals, bins=60, range=(0, SECONDS))[0] / 60 for name in NAMES
    }
    assert counts["bursty"].max() > 2.5 * np.median(counts["bursty"])
    assert counts["diurnal"][25:35].mean() > 3 * counts["diurnal"][:5].mean()
    trace = make("long_context", seed)
    prompts = np.asarray(trace.prompts)
    when = np.asarray(trace.arrivals)
    middle = prompts[(when > 1600) & (when < 2200)].mean()
    assert middle > 2.5 * prompts[when < 800].mean()
    assert middle > 2.5 * prompts[when > 3000].mean()
