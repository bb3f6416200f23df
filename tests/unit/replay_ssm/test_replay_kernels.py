# SPDX-License-Identifier: Apache-2.0
"""The GPU kernels of ReplaySSM against the recurrence in float64: every variant on a GPU; on a CPU that has Triton
installed, the Hopper kernels' text in torch (``gluon_emulation.py``), and under Triton's interpreter
(TRITON_INTERPRET=1) the portable ones. Inputs are fp32, so that no rounding to bf16 hides what the kernels add."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decode_worker.replay_ssm import gpu_path, torch_path
from decode_worker.replay_ssm.gpu_path import KernelConfig, Workspace
from decode_worker.replay_ssm.records import RecordRows, WindowRecords
from tests.unit.replay_ssm.gluon_emulation import Emulated
from tests.unit.replay_ssm.windows import Speculation, distance

pytest.importorskip("triton", reason="Triton is not part of a CPU installation")
GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not GPU
EMULATED = not (GPU or INTERPRETED)
FEW = not GPU
"""Emulated or interpreted, a window takes some 50 ms."""

PORTABLE = KernelConfig(kernel="portable", warps=2, registers=None)
VARIANTS = {
    "portable": PORTABLE,
    "fused": KernelConfig(),
    "fused-alone": KernelConfig(overlap=False, first_out=False),
    "fused-4": KernelConfig(warps=4, registers=None),
    "fused-stream": KernelConfig(warps=4, registers=168, stream=True),
}
CONFIGS = ["portable"] if INTERPRETED else list(VARIANTS)
if EMULATED:
    CONFIGS = ["fused", "fused-stream"]
FLUSH = torch_path.flush_pending if EMULATED else gpu_path.flush_pending
RINGS = pytest.mark.parametrize("flush_at", [1, 16], ids=["start", "ring"])
GATES = pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["k3", "kimi-linear"])


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    if EMULATED:
        from decode_worker.replay_ssm import gluon_kernels

        monkeypatch.setattr(gluon_kernels, "advance_window", Emulated())


def speculation(
    name: str, heads: int = 3, requests: int = 4, flush_at: int = 1, **options: object
) -> Speculation:
    device = "cuda" if GPU else "cpu"
    config = VARIANTS[name]
    if INTERPRETED:
        config = replace(config, overlap=False)
    if FEW:
        heads = 1
    capacity = int(options.get("window", 8)) + flush_at - 1  # type: ignore[call-overload]
    workspace = Workspace(requests, heads, capacity, dtype=torch.float32, device=device)
    for scratch in (workspace.rows, workspace.values, workspace.keys):
        scratch.fill_(float("nan"))
    advance = partial(gpu_path.advance_window, workspace=workspace, config=config)
    return Speculation(
        advance, requests=requests, heads=heads, dim=128, device=device, flush_at=flush_at, **options
    )


@pytest.mark.parametrize("name", CONFIGS)
@GATES
@RINGS
def test_random_windows(name: str, lower_bound: float | None, flush_at: int) -> None:
    rounds = (2 if INTERPRETED else 4) if FEW else 100
    run = speculation(name, lower_bound=lower_bound, flush_at=flush_at)
    for _ in range(rounds):
        lengths = torch.randint(1, run.window + 1, (run.requests,), generator=run.rng).tolist()
        run.step([int(torch.randint(0, n + 1, (1,), generator=run.rng)) for n in lengths], lengths)
    run.flush(FLUSH)
    assert run.windows == 4 * rounds
    assert run.worst_state() < 1e-6
    assert run.worst_out < 1e-5
    assert run.worst_history() == 0


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("window", "dropped"), [(2, 1), (3, 1), (4, 0), (8, 1)])
@RINGS
def test_all_accepted_and_a_lost_record(name: str, window: int, dropped: int, flush_at: int) -> None:
    run = speculation(name, window=window, dropped=dropped, flush_at=flush_at)
    for _ in range(3):
        run.step([window] * run.requests)
    assert run.worst_out < 1e-5
    run.accepted -= 1
    run.flush(FLUSH)
    assert run.worst_out < 1e-5
    assert run.worst_state() > 1e-4, "the control: one record too few"


@pytest.mark.parametrize("name", CONFIGS)
@RINGS
def test_zero_accepted_padding_and_poison(name: str, flush_at: int) -> None:
    run = speculation(name, slots=[1, 0, 3, 2], flush_at=flush_at)
    state, history = run.state.clone(), run.conv[:, :, :3].clone()
    outputs = run.step([0] * 4, [8, 3, 5, 1])
    assert not outputs[1].any()
    assert all(o.isfinite().all() for o in outputs)
    outputs = run.step([5, 0, 0, 1], [8, 3, 5, 1])
    run.step([0] * 4)
    for slot in (2, 3, 4):
        if slot != 2:
            assert torch.equal(run.state[slot], state[slot])
            assert torch.equal(run.conv[slot, :, :3], history[slot])
    assert run.state[0].isnan().all()
    assert run.conv[0].isnan().all()
    assert torch.equal(run.state[1], state[1]) == (flush_at > 1)
    run.flush(FLUSH)
    assert not torch.equal(run.state[1], state[1])
    assert torch.equal(run.state[3], state[3])
    assert run.worst_state() < 1e-6
    assert run.worst_history() == 0


@pytest.mark.parametrize("name", CONFIGS)
@GATES
@pytest.mark.parametrize("raw_g", [30.0, -30.0])
@RINGS
def test_gates_at_their_extremes(name: str, lower_bound: float | None, raw_g: float, flush_at: int) -> None:
    run = speculation(name, requests=1 if FEW else 2, lower_bound=lower_bound, flush_at=flush_at)
    for _ in range(2 if INTERPRETED else 8):
        assert all(o.isfinite().all() for o in run.step([8] * run.requests, raw_g=raw_g))
    run.flush(FLUSH)
    assert run.worst_state() < 1e-6
    assert run.worst_out < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_the_ring(name: str) -> None:
    """The state is written where 16 accepted tokens have gathered, and nowhere else; each request at its own time."""
    run = speculation(name, requests=2, flush_at=16)
    state = run.state.clone()
    for accept in ([5, 8], [5, 7], [5, 0]):
        run.step(accept)
        assert torch.equal(run.state[1:], state[1:])
    run.step([8, 8])
    assert torch.equal(run.state[1:], state[1:])
    run.step([0, 0])
    for slot in (1, 2):
        assert not torch.equal(run.state[slot], state[slot])
    folded = run.state.clone()
    run.step([3, 0])
    run.step([0, 0])
    assert torch.equal(run.state[1:], folded[1:])
    assert run.worst_out < 1e-5
    run.flush(FLUSH)
    assert torch.equal(run.state[2], folded[2])
    assert run.worst_state() < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pair_that_is_reused(name: str) -> None:
    """A request that takes over a slot and a pair of rows full of records meets none of them."""
    run = speculation(name, requests=2, flush_at=16)
    for _ in range(3):
        run.step([5, 4])
    run.rows.release(int(run.pairs[0]))
    run.records.u[2 * int(run.pairs[0]) : 2 * int(run.pairs[0]) + 2] = float("nan")
    assert run.rows.acquire() == int(run.pairs[0])
    run.accepted[0] = 0
    run.expected[0] = replace(
        run.expected[0], state=run.state[1].cpu().double(), history=run.conv[1, :, :3].cpu().t().double()
    )
    for _ in range(6):
        run.step([4, 5])
    run.flush(FLUSH)
    assert run.worst_out < 1e-5
    assert run.worst_state() < 1e-6


@pytest.mark.skipif(not EMULATED, reason="damages the emulation")
@pytest.mark.parametrize("name", ["_decayed_keys", "_read_rows"])
def test_the_emulation_sees_damage(name: str) -> None:
    """Decays of a tile that the tile before it does not see; a record's correction that is not read."""
    from decode_worker.replay_ssm import gluon_kernels

    def wrong(right: Callable[..., Any]) -> Callable[..., Any]:
        def keys(*args: Any) -> Any:
            found, tail = right(*args)
            return found, tail * 0

        def rows(buffer: Any, base: Any, count: Any, *rest: Any) -> None:
            right(buffer, base, count - 1, *rest)

        return keys if name == "_decayed_keys" else rows

    gluon_kernels.advance_window.damage(name, wrong)
    run = speculation("fused", requests=1, flush_at=16)
    for _ in range(3):
        run.step([8])
    assert not run.worst_out < 1e-5


def test_what_the_kernels_do_not_take_is_refused() -> None:
    run = Speculation(
        lambda *a, **k: gpu_path.advance_window(*a, **k, workspace=workspace), window=9, dim=128
    )
    workspace = Workspace(4, 2, 9, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="at most 8"):
        run.step([1] * 4)
    run = Speculation(lambda *a, **k: gpu_path.advance_window(*a, **k, workspace=workspace), dim=64)
    with pytest.raises(ValueError, match="torch path"):
        run.step([1] * 4)


def test_the_cut_that_is_chosen() -> None:
    """What was measured to be fastest on an H200 (docs/replay_ssm.md), at these numbers of programs."""
    assert gpu_path.choose(8, 12) == KernelConfig()
    for programs in (12 * 32, 12 * 128, 24 * 64, 24 * 128):
        assert gpu_path.choose(8, programs) == KernelConfig(warps=4, registers=168, stream=True)
        assert gpu_path.choose(23, programs) == KernelConfig()
    assert gpu_path.choose(25, 12).kernel == "portable"


@pytest.mark.skipif(not GPU, reason="the interpreter rounds to bf16 in its own way")
@pytest.mark.parametrize("name", list(VARIANTS))
def test_bf16_agrees_with_the_torch_path(name: str) -> None:
    """Both round where the model rounds: after the convolution and at the output."""
    heads, batch, window, dim = 3, 4, 8, 128
    rng = torch.Generator("cuda").manual_seed(3)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").to(dtype)

    f32 = torch.float32
    gate = {
        "a_log": randn(heads, dtype=f32) * 0.3,
        "dt_bias": randn(heads * dim, dtype=f32) - 2,
        "lower_bound": -5.0,
    }
    channels = 3 * heads * dim
    weight = (randn(4, channels) * 0.4).t()
    shared_state = randn(batch + 1, heads, dim, dim, dtype=f32) * 0.3
    shared_conv = randn(batch + 1, window + 2, channels).transpose(1, 2)
    steps = [
        (randn(batch * window, channels), randn(batch * window, heads, dim), randn(batch * window, heads))
        for _ in range(4)
    ]
    accepted = [[0] * 4, [8, 3, 1, 5], [2, 8, 8, 1], [1, 4, 6, 8]]
    results = []
    for disturbed in (None, name, "torch", "damaged"):
        state, conv = shared_state.clone(), shared_conv.clone()
        rows = RecordRows(batch, window, device="cuda")
        records = WindowRecords.allocate(
            rows.rows, heads, dim, dim, rows.capacity, dtype=torch.bfloat16, device="cuda"
        )
        pairs = torch.tensor([rows.acquire() for _ in range(batch)], device="cuda")
        slots = torch.arange(1, batch + 1, device="cuda")
        cu = torch.arange(0, batch * window + 1, window, device="cuda")
        space = Workspace(batch, heads, window, dtype=torch.bfloat16, device="cuda")
        outs = []
        for (x, raw_g, raw_beta), n in zip(steps, accepted, strict=True):
            plan = rows.plan(pairs, torch.tensor(n, device="cuda"), slots, cu, conv_dropped=1)
            out = torch.empty(batch * window, heads, dim, dtype=torch.bfloat16, device="cuda")
            kernel = disturbed == name
            extra = {"workspace": space, "config": VARIANTS[name]} if kernel else {}
            (gpu_path if kernel else torch_path).advance_window(
                x,
                weight,
                conv,
                raw_g,
                raw_beta + (0.25 if disturbed == "damaged" else 0.0),
                **gate,
                state=state,
                records=records,
                plan=plan,
                out=out,
                **extra,
            )
            outs.append(out)
        results.append((state[1:], torch.cat(outs), conv[1:]))
    wanted, kernels, again, damaged = results
    assert torch.equal(kernels[2], wanted[2])
    assert distance(kernels[0], wanted[0]) < 5e-4
    assert distance(kernels[1], wanted[1]) < 5e-3
    assert distance(again[0], wanted[0]) == 0
    assert distance(damaged[0], wanted[0]) > 5e-3
