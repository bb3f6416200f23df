# SPDX-License-Identifier: Apache-2.0
"""The kernels of copies on a machine without a GPU, in a process of their own, because Triton decides when it is
imported whether it interprets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.probes import run_interpreted

TESTS = Path(__file__).with_name("test_shard_kernels.py")


@pytest.mark.cluster  # a process of its own
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_the_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    output = run_interpreted([TESTS], "-p", "no:cacheprovider")
    assert "18 passed" in output, "a run that selects nothing must not pass for one that passed"
