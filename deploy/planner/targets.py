# SPDX-License-Identifier: Apache-2.0
"""Where a plan goes: Prometheus gauges that a HorizontalPodAutoscaler follows, and a cluster of Ray actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge

from deltaserve.config import Role

if TYPE_CHECKING:
    from deploy.ray.cluster import RayCluster


class Target(ABC):
    """Something that can change a role's replicas."""

    @abstractmethod
    def set(self, role: Role, replicas: int) -> None:
        """From now on so many. Raises OSError or RuntimeError when it cannot be done now; it is tried again."""


class Gauges(Target):
    """`deltaserve_planner_*`, for Prometheus; also the planner's own account of itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.desired = Gauge(
            "deltaserve_planner_desired_replicas", "Workers that a role needs", ["role"], registry=registry
        )
        self.ready = Gauge(
            "deltaserve_planner_ready_replicas", "Workers of a role that serve", ["role"], registry=registry
        )
        self.correction = Gauge(
            "deltaserve_planner_tpot_correction",
            "Observed over predicted seconds a token; far from 1: the profile is not this cluster's",
            registry=registry,
        )
        self.changes = Counter(
            "deltaserve_planner_changes",
            "Changes of a role's replicas, by direction: up or down",
            ["role", "direction"],
            registry=registry,
        )
        self.failures = Counter(
            "deltaserve_planner_failures",
            "Looks and changes that failed: read (the last plan stays in force) or set (tried again)",
            ["stage"],
            registry=registry,
        )
        for stage in ("read", "set"):
            self.failures.labels(stage)

    def set(self, role: Role, replicas: int) -> None:
        """Publish it."""
        self.desired.labels(role).set(replicas)


class RayTarget(Target):
    """A cluster of Ray actors: asked to scale; it drains what it takes away."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster

    def set(self, role: Role, replicas: int) -> None:
        """Ask the cluster's controller. Raises RuntimeError when it does not answer."""
        try:
            self._cluster.scale(role, replicas)
        except ValueError:
            raise
        except Exception as error:  # Ray's errors have no common base
            raise RuntimeError(f"ray: {type(error).__name__}: {error}") from error
