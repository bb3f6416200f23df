# SPDX-License-Identifier: Apache-2.0
"""The portable Triton kernels on a machine without a GPU: tests of the kernels and of the engine's steps in a
process of their own, because Triton decides when it is imported whether it interprets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.probes import run_interpreted

TESTS = [Path(__file__).with_name(name) for name in ("test_replay_kernels.py", "test_replay_engine.py")]


@pytest.mark.cluster  # a process of its own, for 20 s
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_portable_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    output = run_interpreted(TESTS, "-k", "zero or align")
    assert "4 passed" in output, "a run that selects nothing must not pass for one that passed"
