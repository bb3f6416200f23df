# SPDX-License-Identifier: Apache-2.0
"""Clusters whose roles are doubles: etcd and the master are real, the rest is `tests/support/fake_role.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import ClusterConfig
from deltaserve.up import Cluster
from deltaserve.up.supervisor import Event
from tests.support import processes

FAKE_ROLE = Path(__file__).parents[2] / "support" / "fake_role.py"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mark that everything started by this test carries."""
    value = processes.new_mark()
    monkeypatch.setenv(processes.MARK, value)
    return value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a hybrid model."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = '{"architectures": ["X"], "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}'
    (folder / "config.json").write_text(config)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def make_cluster(mark: str, model: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Makes clusters with doubles; `events` of each cluster is its list of events. Stops what a test leaves."""
    made: list[Cluster] = []

    def make(on_folder: Callable[[Path], None] = lambda folder: None, **fields: Any) -> Cluster:
        events: list[Event] = []
        config = ClusterConfig(**{"model": model, "port": 0, "run_dir": tmp_path / "run", **fields})
        cluster = Cluster(
            config,
            on_event=events.append,
            on_folder=on_folder,
            role_command=[sys.executable, str(FAKE_ROLE)],
        )
        cluster.events = events  # type: ignore[attr-defined]
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.stop()
