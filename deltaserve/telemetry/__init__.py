# SPDX-License-Identifier: Apache-2.0
"""What the roles tell about themselves: metrics, traces, logs, and the handoffs under way.

docs/metrics.md has the table of metrics, docs/observe.md the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltaserve.telemetry.logs import about, configure_logging

if TYPE_CHECKING:
    from deltaserve.telemetry.metrics import HANDOFF, WORKER, HandoffMetrics, WorkerMetrics

__all__ = ["HANDOFF", "WORKER", "HandoffMetrics", "WorkerMetrics", "about", "configure_logging"]


def __getattr__(name: str) -> Any:
    """The workers' metrics, registered by the first who wants them: a router has none of them."""
    if name in __all__:
        from deltaserve.telemetry import metrics

        return getattr(metrics, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
