# SPDX-License-Identifier: Apache-2.0
"""How long a test waits before it calls something hung.

No test says how fast the code is: benchmarks do, beside a peer. What a test can say is that a wait has a deadline at
all. Without one it lasts for ever (or for the minutes that a library waits), so the bound below may be generous: a
machine that is busy for a few seconds must not fail a test.
"""

from __future__ import annotations

HUNG = 30.0
"""Seconds. Deadlines under test are a tenth of it or less; what they guard against is endless."""
