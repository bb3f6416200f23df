# SPDX-License-Identifier: Apache-2.0
"""The kernels of copies on a machine without a GPU, in a process of their own, because Triton decides when it is
imported whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).with_name("test_shard_kernels.py")


@pytest.mark.cluster  # a process of its own
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(TESTS), "-q", "-p", "no:cacheprovider"],
        env=environment,
        cwd=TESTS.parents[3],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "12 passed" in done.stdout, "a run that selects nothing must not pass for one that passed"
