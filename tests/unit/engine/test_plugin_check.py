# SPDX-License-Identifier: Apache-2.0
"""An engine that vLLM would run without this package's entry points is not started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.engine import plugin_check
from deltaserve.engine.plugin_check import PluginMissingError, require_plugins

ROOT = Path(plugin_check.__file__).parents[2]


@pytest.mark.parametrize("allowed", [None, "deltaserve_cpu", "another,deltaserve_cpu"])
def test_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch, allowed: str | None) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    require_plugins()


@pytest.mark.parametrize("allowed", ["", "another", "deltaserve"])
def test_a_list_that_leaves_it_out_is_refused(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    with pytest.raises(PluginMissingError, match=r"VLLM_PLUGINS.*add deltaserve_cpu"):
        require_plugins()


def test_sources_that_are_not_installed_are_refused_by_a_worker(tmp_path: Path) -> None:
    """A folder of sources on the path of a Python whose own installation of it is hidden."""
    shutil.copytree(ROOT / "deltaserve", tmp_path / "deltaserve")
    hide = (
        "import importlib.metadata as m\n"
        "m.entry_points = lambda group: ()\n"
        "from deltaserve.engine.worker import run\n"
        "from deltaserve.config import WorkerConfig\n"
        f"config = WorkerConfig(role='decode', model={str(ROOT / 'models' / 'demo')!r})\n"
        "raise SystemExit(run(config, None))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
