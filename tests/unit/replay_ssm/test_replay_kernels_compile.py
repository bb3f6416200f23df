# SPDX-License-Identifier: Apache-2.0
"""The kernels of ReplaySSM compile for Hopper with the Triton at hand, on any machine: an emulation runs what a
compiler refuses, and Gluon's names change between versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_worker.replay_ssm import gpu_path
from decode_worker.replay_ssm.gpu_path import RING_RECORDS, TILE, KernelConfig, choose
from decode_worker.replay_ssm.records import RecordRows, WindowRecords

pytest.importorskip("triton.backends.nvidia")

HEADS, DIM = 2, 128
LOWER_BOUND = -5.0
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


class _Compiler:
    """Stands where a kernel stands: `kernel[grid](...)` compiles what it would launch."""

    def __init__(self, kernel: Any, made: list[Any]) -> None:
        self._kernel, self._made = kernel, made

    def __getitem__(self, grid: Any) -> Any:
        return self._compile

    def _compile(self, *arguments: Any, **options: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        names = self._kernel.arg_names
        constants = {name: value for name, value in options.items() if name in names}
        signature = {name: _type(one) for name, one in zip(names, arguments, strict=False)}
        assert set(signature) | set(constants) == set(names)
        kind = GluonASTSource if isinstance(self._kernel, GluonJITFunction) else ASTSource
        source = kind(
            self._kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        rest = {name: value for name, value in options.items() if name not in names}
        self._made.append(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=rest))


def _type(one: Any) -> str:
    if isinstance(one, torch.Tensor):
        return TYPES[one.dtype]
    return "fp32" if isinstance(one, float) else "i32"


def _arguments(window: int, flush_at: int) -> dict[str, Any]:
    """A step of two requests, in host memory: nothing is launched."""
    rows = RecordRows(2, window, flush_at=flush_at, device="cpu")
    cu = torch.arange(0, 2 * window + 1, window, dtype=torch.int32)
    pairs, slots = torch.arange(2), torch.arange(1, 3, dtype=torch.int32)
    channels, tokens = 3 * HEADS * DIM, 2 * window
    made: dict[str, Any] = {
        "x": torch.zeros(tokens, channels, dtype=torch.bfloat16),
        "conv_weight": torch.zeros(4, channels, dtype=torch.bfloat16).t(),
        "conv_cache": torch.zeros(3, 2 + window, channels, dtype=torch.bfloat16).transpose(1, 2),
        "raw_g": torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16),
        "raw_beta": torch.zeros(tokens, HEADS, dtype=torch.bfloat16),
        "a_log": torch.zeros(HEADS),
        "dt_bias": torch.zeros(HEADS * DIM),
        "state": torch.zeros(3, HEADS, DIM, DIM),
        "records": WindowRecords.allocate(
            4, HEADS, DIM, DIM, rows.capacity, dtype=torch.bfloat16, device="cpu"
        ),
        "plan": rows.plan(pairs, torch.ones(2, dtype=torch.int32), slots, cu, conv_dropped=1),
        "out": torch.zeros(tokens, HEADS, DIM, dtype=torch.bfloat16),
    }
    return made


@pytest.mark.parametrize(
    ("window", "flush_at", "programs", "bounded"),
    [(2, 1, 12, True), (8, 1, 12, False), (8, 1, 4096, True), (8, 16, 12, True)],
)
def test_the_fused_step_compiles(
    monkeypatch: pytest.MonkeyPatch, window: int, flush_at: int, programs: int, bounded: bool
) -> None:
    from decode_worker.replay_ssm import gluon_kernels

    made: list[Any] = []
    monkeypatch.setattr(gluon_kernels, "advance_window", _Compiler(gluon_kernels.advance_window, made))
    arguments = _arguments(window, flush_at)
    capacity = arguments["records"].u.shape[2]
    assert (capacity <= TILE) == (flush_at == 1)
    assert capacity <= RING_RECORDS
    config = choose(capacity, programs)
    gpu_path.advance_window(**arguments, lower_bound=LOWER_BOUND if bounded else None, config=config)
    (kernel,) = made
    assert "cubin" in kernel.asm
    # As many programs share a multiprocessor, with 228 KiB of shared memory, as the cut is made for.
    assert kernel.metadata.shared * (3 if config.stream else 2) <= 227 << 10


def test_the_portable_step_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from decode_worker.replay_ssm import triton_kernels

    made: list[Any] = []
    for name in ("prepare_window", "advance_state"):
        monkeypatch.setattr(triton_kernels, name, _Compiler(getattr(triton_kernels, name), made))
    arguments = _arguments(8, 16)
    workspace = gpu_path.Workspace(2, HEADS, 23, dtype=torch.bfloat16, device="cpu")
    gpu_path.advance_window(
        **arguments,
        lower_bound=LOWER_BOUND,
        workspace=workspace,
        config=KernelConfig(kernel="portable", warps=2, registers=None),
    )
    assert ["cubin" in kernel.asm for kernel in made] == [True, True]
