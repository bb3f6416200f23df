# SPDX-License-Identifier: Apache-2.0
"""The portable Triton kernels on a machine without a GPU: tests of the kernels and of the engine's steps in a
process of their own, because Triton decides when it is imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = [Path(__file__).with_name(name) for name in ("test_replay_kernels.py", "test_replay_engine.py")]


@pytest.mark.cluster  # a process of its own, for 20 s
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_portable_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *map(str, TESTS), "-q", "-k", "zero or align"]
    done = subprocess.run(
        command,
        env=environment,
        cwd=TESTS[0].parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout, "a run that selects nothing must not pass for one that passed"
