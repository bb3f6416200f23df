# SPDX-License-Identifier: Apache-2.0
"""What the roles tell about themselves: metrics, traces, logs, and the handoffs under way.

docs/metrics.md has the table of metrics, docs/observe.md the rest.
"""

from deltaserve.telemetry.logs import about, configure_logging
from deltaserve.telemetry.metrics import HANDOFF, WORKER, HandoffMetrics, WorkerMetrics

__all__ = ["HANDOFF", "WORKER", "HandoffMetrics", "WorkerMetrics", "about", "configure_logging"]
