# SPDX-License-Identifier: Apache-2.0
"""Tests in processes of their own: what an engine, or Triton's interpreter, leaves in a process stays there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MARK = "PROBE "

ENGINE_HERE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""The environment of a probe whose engine runs in the probe's own process; to be set before vLLM is imported."""


def probe_result(module: str, *arguments: str, timeout: float) -> dict[str, Any]:
    """What `python -m module` prints as JSON behind `MARK`, on the last such line; asserts that it exits with 0."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def run_interpreted(tests: Sequence[Path], *options: str) -> str:
    """pytest's output for `tests` under Triton's interpreter; asserts that none failed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, tests), "-q", *options],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
