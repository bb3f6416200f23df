# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the state store's tests."""

from tests.support.ledger_world import world  # noqa: F401
