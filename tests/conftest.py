# SPDX-License-Identifier: Apache-2.0
"""Order and availability: quick tests first, tests with real processes last, GPU tests only where there is one.

The fixtures of tests/support/fixtures.py are known everywhere.
"""

from __future__ import annotations

from pathlib import Path

# Imported here because pytest cannot rewrite a module that hypothesis imports at the very end, on CPython 3.11 once
# vLLM is loaded ("AST constructor recursion depth mismatch"), and takes the summary line with it.
import hypothesis.internal.observability  # noqa: F401
import pytest
from hypothesis import settings

from deltaserve.up.devices import visible_devices
from tests.support.fixtures import etcd_config, etcd_server, master, own_etcd, own_master  # noqa: F401

# A deadline an example measures how busy the machine is, not whether the code is right.
settings.register_profile("deltaserve", deadline=None)
settings.load_profile("deltaserve")

_SCENARIOS = Path(__file__).parent / "scenario"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/scenario, put tests marked `cluster` last, and skip `gpu` where there is no device."""
    for item in items:
        if _SCENARIOS in item.path.parents:
            item.add_marker(pytest.mark.scenario)
    items.sort(key=lambda item: item.get_closest_marker("cluster") is not None)
    if visible_devices():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
