# SPDX-License-Identifier: Apache-2.0
"""Windows, boundaries and crash paths over block tables, in a paged engine in small. Every test has its control."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.unit.replay_ssm.paged import BLOCK, WINDOW, PagedEngine, Work


def started(*lengths: int, seed: int = 0) -> PagedEngine:
    """An engine whose requests "r0", "r1", ... have computed prompts of ``lengths`` tokens."""
    engine = PagedEngine(seed)
    for i, length in enumerate(lengths):
        engine.add(f"r{i}")
        while (at := engine.requests[f"r{i}"].computed) < length:
            # As vLLM splits a prompt: a chunk ends at a block's end, the last where the prompt ends.
            engine.step([Work(f"r{i}", min(length, at + BLOCK - at % BLOCK) - at)])
    return engine


def good(engine: PagedEngine) -> bool:
    return engine.worst_out < 5e-6 and engine.worst_state < 1e-6 and engine.worst_history == 0


def random_step(engine: PagedEngine, names: Sequence[str]) -> None:
    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=engine.rng))

    work = []
    for name in names:
        length = draw(1, WINDOW)
        work.append(Work(name, length, draw(1, length)))
    engine.step(work)


def test_400_random_windows_over_blocks() -> None:
    """Of a layer each; requests come, go, sit out steps and change their places in the batch."""
    engine = started(3, 8, 13, 21)
    while engine.windows < 400:
        names = [f"r{i}" for i in range(4)]
        left = int(torch.randint(0, 4, (1,), generator=engine.rng))
        del names[left]  # one sits out every step, and comes back to the batch's end
        random_step(engine, names[left % 3 :] + names[: left % 3])
        for name in list(engine.requests):
            if engine.requests[name].computed > 60:
                engine.leave(name)
                engine.take_over(name, 5 + left)
    engine.settle_all()
    assert good(engine), (engine.worst_out, engine.worst_state, engine.worst_history)


def broken(monkeypatch: pytest.MonkeyPatch, what: str) -> PagedEngine:
    engine = started(5, 9)
    steps: Any = engine.steps
    accept, begin = steps.accept, steps.begin
    if what == "a boundary is not folded":
        monkeypatch.setattr(steps, "boundary", lambda cuts: None)
    elif what == "a move folds nothing":
        monkeypatch.setattr(steps, "move", lambda moves: steps._fold([(*m, 0) for m in moves]))
    elif what == "one token too many":
        monkeypatch.setattr(steps, "accept", lambda counts: accept([min(c + 1, WINDOW) for c in counts]))
    else:
        monkeypatch.setattr(steps, "begin", lambda requests, gone: begin(requests, ()))
    return engine


@pytest.mark.parametrize("what", ["a boundary is not folded", "a move folds nothing", "one token too many"])
def test_control_a_lost_fold_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = broken(monkeypatch, what)
    for _ in range(12):
        random_step(engine, ["r0", "r1"])
    engine.settle_all()
    assert not good(engine)


@pytest.mark.parametrize("accept", [1, 2, WINDOW])
@pytest.mark.parametrize("before", range(BLOCK - WINDOW, BLOCK + 1))
def test_a_window_at_every_distance_from_a_boundary(before: int, accept: int) -> None:
    """Ends before, on and behind the boundary; all accepted with the bonus; then with no draft at all."""
    engine = started(before)
    engine.step([Work("r0", WINDOW, accept)])
    engine.step([Work("r0", 1, 1)])
    engine.step([Work("r0", WINDOW, WINDOW)])
    engine.settle_all()
    assert good(engine), (engine.worst_out, engine.worst_state, engine.worst_history)


def test_the_state_moves_back_when_fewer_are_accepted_than_reached_over() -> None:
    engine = started(6)
    engine.step([Work("r0", 4, 1)])
    assert engine.requests["r0"].column == 1, "the window reached into the next block"
    engine.step([Work("r0", 1, 1)])
    assert engine.requests["r0"].column == 0
    engine.step([Work("r0", 3, 3)])
    engine.settle_all()
    assert good(engine)


def test_a_request_is_preempted_and_resumed_between_windows() -> None:
    engine = started(6, 12)
    for _ in range(3):
        engine.step([Work("r0", 4, 3), Work("r1", 4, 4)])
    assert engine.steps.pending("r0") > 0
    computed = engine.requests["r0"].computed
    boundary = computed // BLOCK * BLOCK
    assert 0 < boundary < computed
    engine.leave("r0", keep=True)
    engine.step([Work("r1", 4, 2)])
    assert engine.steps.pending("r0") == 0
    engine.resume("r0", boundary)
    engine.step([Work("r1", 2, 1), Work("r0", computed - boundary)])
    for _ in range(4):
        engine.step([Work("r0", 4, 2), Work("r1", 4, 3)])
    engine.settle_all()
    assert good(engine)


@pytest.mark.parametrize("forgotten", [False, True], ids=["", "control"])
def test_a_request_that_is_aborted_leaves_nothing_to_the_next_owner(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request has the same name, the same block and the same pair; its state was handed over."""
    engine = broken(monkeypatch, "nobody is gone") if forgotten else started(5, 9)
    engine.step([Work("r0", 4, 2), Work("r1", 4, 4)])
    engine.leave("r0")
    engine.take_over("r0", 6)
    engine.step([Work("r0", 1), Work("r1", 3, 1)])
    engine.step([Work("r0", 4, 4), Work("r1", 1, 1)])
    engine.settle_all()
    assert good(engine) is not forgotten


def test_pairs_are_as_many_as_requests_may_run() -> None:
    engine = started(5, 9, 3, 4)
    for round_ in range(6):
        random_step(engine, [f"r{i}" for i in range(4)])
        engine.leave(f"r{round_ % 4}")
        engine.take_over(f"r{round_ % 4}", 3)
    engine.settle_all()
    assert good(engine)
    # Control: without word of those that are gone the pairs run out.
    engine.step([Work(f"r{i}", 2, 1) for i in range(4)])
    engine.take_over("one too many", 3)
    with pytest.raises(RuntimeError, match="raise max_requests"):
        engine.step([Work("one too many", 2, 1)])


def test_a_prompt_chunk_folds_what_is_pending_before_it_continues() -> None:
    engine = started(3)
    engine.step([Work("r0", 4, 2)])
    assert engine.steps.pending("r0") == 2
    engine.step([Work("r0", 2)])
    assert engine.steps.pending("r0") == 0
    engine.step([Work("r0", 4, 4)])
    engine.settle_all()
    assert good(engine)


def test_block_zero_and_padding_rows_are_not_touched() -> None:
    engine = started(5)
    random_step(engine, ["r0"])
    layer = engine.layers["a"]
    assert layer.state[0].isnan().all()
    assert layer.conv_cache[0].isnan().all()
    free = list(engine.free)
    assert layer.state[free].isnan().all()
    # A row whose block is null: zeros out, nothing written.
    steps = engine.steps
    steps.begin(["r0", "pad"])
    state = torch.where(layer.state.isnan(), 0, layer.state)
    block = torch.tensor([engine.requests["r0"].blocks[0][0], 0])
    out = torch.full((3, 2, 16), float("nan"))
    x, g, beta = torch.randn(3, 96), torch.randn(3, 2, 16), torch.randn(3, 2)
    steps.advance("a", [0, 1], x, g, beta, blocks=block, cu_seqlens=torch.tensor([0, 2, 3]), out=out)
    assert out[:2].isfinite().all()
    assert not out[2].any()
    assert layer.state[0].isnan().all()
    changed = torch.where(layer.state.isnan(), 0, layer.state) != state
    assert changed.flatten(1).any(1).nonzero().flatten().tolist() == [int(block[0])], (
        "the control: r0's was folded"
    )
