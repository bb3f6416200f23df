# SPDX-License-Identifier: Apache-2.0
"""Real clusters for tests: one that many tests share, and a maker for those that break or change theirs.

A conftest takes what it needs: `from tests.support.cluster import cluster, make_real_cluster  # noqa: F401`.
Starting one costs half a minute on two cores, so a test that leaves the shared cluster as it found it uses that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltaserve.config import ClusterConfig
from deltaserve.up import Cluster

DEMO = Path(__file__).parents[2] / "models" / "demo"
MakeCluster = Callable[..., Cluster]


def cluster_config(run_dir: Path, **fields: Any) -> ClusterConfig:
    """A small cluster of the demonstration model on a free port; `fields` are those of ClusterConfig."""
    return ClusterConfig(**{"model": DEMO, "port": 0, "run_dir": run_dir, **fields})


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill worker, one decode worker, a router; shared by all tests of a run. Leave it as you found it."""
    with Cluster(cluster_config(tmp_path_factory.mktemp("cluster"))) as running:
        yield running


@pytest.fixture
def make_real_cluster(tmp_path: Path) -> Iterator[MakeCluster]:
    """Starts a cluster with the given fields of ClusterConfig, and stops it after the test."""
    made: list[Cluster] = []

    def make(**fields: Any) -> Cluster:
        started = Cluster(cluster_config(tmp_path / f"run{len(made)}", **fields))
        made.append(started)
        return started.start()

    yield make
    for each in reversed(made):
        each.stop()
