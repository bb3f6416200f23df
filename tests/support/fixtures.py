# SPDX-License-Identifier: Apache-2.0
"""pytest fixtures over tests/support/services.py: one etcd and one Mooncake master serve a whole session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from deltaserve.config import EtcdConfig
from tests.support import services


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[services.EtcdService]:
    """An etcd that every test shares: take a prefix of your own, and do not kill it."""
    with services.etcd() as server:
        yield server


@pytest.fixture
def etcd_config(etcd_server: services.EtcdService) -> EtcdConfig:
    """A configuration with a prefix that nobody else uses."""
    return etcd_server.config(f"/test/{uuid.uuid4().hex}")


@pytest.fixture
def own_etcd() -> Iterator[services.EtcdService]:
    """An etcd of this test's own, to be killed and stopped."""
    with services.etcd() as server:
        yield server


@pytest.fixture(scope="session")
def master() -> Iterator[services.MasterService]:
    """A Mooncake master that every test shares: take keys of your own, and do not kill it."""
    with services.mooncake_master() as server:
        yield server


@pytest.fixture
def own_master() -> Iterator[services.MasterService]:
    """A Mooncake master of this test's own, to be killed and stopped."""
    with services.mooncake_master() as server:
        yield server
