# SPDX-License-Identifier: Apache-2.0
"""The torch path of ReplaySSM against the recurrence in float64. Every test has a control that must fail."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from decode_worker.replay_ssm import reference as chunk_reference
from decode_worker.replay_ssm.torch_path import advance_window, flush_pending
from tests.unit.reference import kda as recurrence
from tests.unit.replay_ssm.windows import Speculation, distance

GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["k3", "kimi-linear"])
F64 = torch.float64


@GATES
def test_the_chunk_form_is_the_recurrence(lower_bound: float | None) -> None:
    rng = torch.Generator().manual_seed(1)
    heads, key_dim, value_dim, length = 3, 24, 16, 8
    q, k, g = (torch.randn(length, heads, key_dim, generator=rng, dtype=F64) for _ in range(3))
    v = torch.randn(length, heads, value_dim, generator=rng, dtype=F64)
    beta = torch.randn(length, heads, generator=rng, dtype=F64)
    state = torch.randn(heads, value_dim, key_dim, generator=rng, dtype=F64)
    gate = {
        "a_log": torch.randn(heads, generator=rng, dtype=F64),
        "dt_bias": torch.randn(heads * key_dim, generator=rng, dtype=F64),
        "lower_bound": lower_bound,
    }
    window = chunk_reference.verify(state, q, k, v, g, beta, **gate)
    out, states = recurrence.kda(q, k, v, g, beta, **gate, state=state)
    assert distance(window.out, out) < 1e-13
    for n in range(1, length + 1):
        folded = chunk_reference.fold(state, window.u[:n], window.k[:n], window.g[:n])
        assert distance(folded, states[n - 1]) < 1e-13
    # Control: a fold of one record too few is another state.
    assert distance(chunk_reference.fold(state, window.u[:3], window.k[:3], window.g[:3]), states[3]) > 1e-2


@GATES
@pytest.mark.parametrize("flush_at", [1, 16], ids=["fold-at-start", "ring"])
def test_400_random_windows(lower_bound: float | None, flush_at: int) -> None:
    run = Speculation(advance_window, requests=8, lower_bound=lower_bound, flush_at=flush_at)
    for _ in range(50):
        lengths = torch.randint(1, run.window + 1, (run.requests,), generator=run.rng).tolist()
        accept = [int(torch.randint(0, n + 1, (1,), generator=run.rng)) for n in lengths]
        run.step(accept, lengths)
    run.flush(flush_pending)
    assert run.windows == 400
    assert run.worst_state() < 1e-6
    assert run.worst_out < 5e-6
    assert run.worst_history() == 0


def test_a_lost_record_is_seen() -> None:
    run = Speculation(advance_window)
    run.step([4, 4, 4, 4])
    run.accepted -= 1
    run.flush(flush_pending)
    assert run.worst_state() > 1e-3


@pytest.mark.parametrize("flush_at", [1, 16])
def test_zero_accepted_changes_no_byte_of_the_state(flush_at: int) -> None:
    run = Speculation(advance_window, flush_at=flush_at)
    run.state[1, 0, 0, :4] = torch.tensor([0.0, -0.0, 1e-42, -1e-42])
    state, history = run.state.clone(), run.conv[1:, :, :3].clone()
    for _ in range(3):
        run.step([0] * run.requests)
        assert torch.equal(run.state[1:].view(torch.int32), state[1:].view(torch.int32))
        assert torch.equal(run.conv[1:, :, :3], history)
    run.flush(flush_pending)
    assert torch.equal(run.state[1:].view(torch.int32), state[1:].view(torch.int32))
    assert torch.equal(run.conv[1:, :, :3], history)
    # Control: one accepted token changes both.
    run.step([1] * run.requests)
    run.flush(flush_pending)
    assert not torch.equal(run.state[1:], state[1:])
    assert not torch.equal(run.conv[1:, :, :3], history)


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("dropped", [0, 1])
def test_all_drafts_accepted_plus_the_bonus_token(window: int, dropped: int) -> None:
    """A window of T positions is T-1 drafts and the token before them; all accepted means T tokens kept."""
    run = Speculation(advance_window, window=window, dropped=dropped)
    for _ in range(6):
        run.step([window] * run.requests)
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6
    assert run.worst_out < 5e-6
    assert run.worst_history() == 0


def test_padding_rows_and_block_zero_are_not_touched() -> None:
    run = Speculation(advance_window, slots=[1, 0, 3, -1])
    before = run.state.clone(), run.conv.clone()
    for _ in range(3):
        outputs = run.step([3, 0, 2, 0], [8, 5, 1 + 2, 1])
        assert not outputs[1].any()
        assert not outputs[3].any()
        assert all(o.isfinite().all() for o in outputs)
    run.flush(flush_pending)
    assert run.state[0].isnan().all()
    assert run.conv[0].isnan().all()
    for untouched in (2, 4):
        assert torch.equal(run.state[untouched], before[0][untouched])
        assert torch.equal(run.conv[untouched], before[1][untouched])
    assert run.worst_state() < 1e-6
    # Control: a row that takes the null block for a state is poisoned at once.
    bad = Speculation(advance_window)
    bad.state[1] = bad.state[0]
    assert bad.step([1] * bad.requests)[0].isnan().any()


def test_rows_are_reused_with_poisoned_records() -> None:
    run = Speculation(advance_window)
    run.step([8, 3, 5, 1])
    run.flush(flush_pending)
    for pair in run.pairs.tolist():
        run.rows.release(pair)
    run.records.u.fill_(float("nan"))
    run.records.key_gate.fill_(float("inf"))
    run.pairs = torch.tensor([run.rows.acquire() for _ in range(run.requests)])
    for _ in range(4):
        assert all(o.isfinite().all() for o in run.step([2, 0, 8, 5]))
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6
    # Control: the poison is real; one record more than was accepted brings it in.
    run.step([0] * run.requests, [2] * run.requests)
    run.records.u[:, :, 2:] = float("nan")
    run.accepted = torch.full_like(run.accepted, 3)
    run.flush(flush_pending)
    assert run.worst_state() == float("inf")


@GATES
@pytest.mark.parametrize("raw_g", [30.0, -30.0])
@pytest.mark.parametrize("flush_at", [1, 16])
def test_gates_at_their_extremes_for_64_tokens(
    lower_bound: float | None, raw_g: float, flush_at: int
) -> None:
    run = Speculation(advance_window, lower_bound=lower_bound, flush_at=flush_at)
    for _ in range(8):
        outputs = run.step([8] * run.requests, raw_g=raw_g)
        assert all(o.isfinite().all() for o in outputs)
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6
    assert run.worst_out < 5e-6


def test_a_weak_decay_behind_strong_ones_keeps_its_digits() -> None:
    """Decays are products, not quotients e^(G_i - G_j): e^-G overflows at the softplus gate's extremes."""
    run = Speculation(advance_window, lower_bound=None)
    x = torch.full((8, 2, 16), 30.0)
    total = recurrence.log_decay(x, run.a_log, run.dt_bias, None).cumsum(0)
    assert (-total.float()).exp().isinf().any()
    for raw_g in (30.0, 30.0, -30.0, 0.0):
        run.step([5, 8, 2, 1], raw_g=raw_g)
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6


def test_a_request_is_preempted_and_resumed_on_other_blocks() -> None:
    run = Speculation(advance_window, slots=[1, 2, 3, 4])
    run.state = torch.cat([run.state, run.state[1:5] * float("nan")])
    run.conv = torch.cat([run.conv, run.conv[1:5] * float("nan")])
    run.step([3, 8, 0, 1])
    run.step([2, 0, 1, 8])
    run.flush(flush_pending, targets=[6, 7, 8, 9])
    assert run.worst_state() < 1e-6
    assert run.worst_history() == 0
    run.step([8, 8, 8, 8])
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6
    assert run.worst_out < 5e-6


def test_a_boundary_inside_a_window_is_published_while_the_window_goes_on() -> None:
    """The state after m < n accepted tokens goes to another block; the request's own state folds all n later."""
    run = Speculation(advance_window, requests=1, slots=[1])
    run.state = torch.cat([run.state, torch.full_like(run.state[:1], float("nan"))])
    run.conv = torch.cat([run.conv, torch.full_like(run.conv[:1], float("nan"))])
    twin = dataclasses.replace(run, advance=advance_window)
    run.step([6])
    twin.step([4])
    flush_pending(
        **run.gate,
        state=run.state,
        conv_cache=run.conv,
        records=run.records,
        read_rows=run.rows.read_rows(run.pairs),
        counts=torch.tensor([4]),
        conv_first=torch.tensor([4]),
        source_slots=torch.tensor([1]),
        target_slots=torch.tensor([3]),
        conv_width=4,
    )
    assert distance(run.state[3], twin.expected[0].state) < 1e-6
    assert distance(run.conv[3, :, :3].t(), twin.expected[0].history) == 0
    assert distance(run.state[3], run.expected[0].state) > 1e-3
    run.step([8])
    run.flush(flush_pending)
    assert run.worst_state() < 1e-6


def test_the_ring_writes_the_state_once_enough_tokens_gathered() -> None:
    run = Speculation(advance_window, requests=2, flush_at=16)
    state = run.state.clone()
    for accept in ([5, 8], [5, 7], [5, 0]):
        run.step(accept)
        assert torch.equal(run.state[1:], state[1:])
    run.step([8, 8])
    assert torch.equal(run.state[1:], state[1:]), "15 pending records are fewer than 16"
    run.step([0, 0])
    assert not torch.equal(run.state[1], state[1])
    assert not torch.equal(run.state[2], state[2])
    assert run.worst_state() < 1e-6
