# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the state store's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.ledger_world import world  # noqa: F401

if TYPE_CHECKING:
    from tests.unit.statestore.scheduler_probe import Half


@pytest.fixture
def half() -> Iterator[Half]:
    """A scheduler half; see `scheduler_probe`."""
    # Imported late: it imports vLLM, which most of these tests do without.
    from statestore.connector.events import listen
    from tests.unit.statestore.scheduler_probe import Half

    made = Half()
    yield made
    listen(made.worker, None)
