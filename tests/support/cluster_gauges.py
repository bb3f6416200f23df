# SPDX-License-Identifier: Apache-2.0
"""What requests own in a real cluster, so that a test can say that all of it came back."""

from __future__ import annotations

from deltaserve.up import Cluster
from tests.cluster.calls import call, metric, records, stored_objects
from tests.support.processes import wait_until


def gauges(cluster: Cluster) -> dict[str, float]:
    """What requests hold on the router, on the workers, in the ledger and in the store; checkpoints are not counted."""
    health = call(cluster.endpoint + "/health")[1]
    found: dict[str, float] = {
        "in flight": health["in_flight"],
        "flights": metric(cluster, "deltaserve_router_in_flight"),
        "queued": health["queued"],
        "records": len(records(cluster)),
        "objects": stored_objects(cluster),
    }
    for role, report in health["roles"].items():
        for name in ("requests", "outstanding_tokens", "running", "waiting", "kv_usage"):
            found[f"{role} {name}"] = sum(worker[name] for worker in report["workers"])
    return found


def all_came_back(cluster: Cluster, seconds: float) -> None:
    """Wait until no gauge says that a request holds something. Raises AssertionError naming what is held."""
    held: dict[str, float] = {}

    def nothing() -> bool:
        nonlocal held
        held = {name: value for name, value in gauges(cluster).items() if value}
        return not held

    try:
        wait_until(nothing, seconds, "nothing is held")
    except AssertionError as error:
        raise AssertionError(f"{error}; held: {held}") from None
