# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes' NetworkPolicies let through: a small evaluator of the fields that the chart uses.

https://kubernetes.io/docs/concepts/services-networking/network-policies/: a pod that some policy selects for a
direction is closed in that direction, but for what one of its policies allows; a connection needs both ends' consent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.unit.deploy.rendering import NAMESPACE, Object, of_kind, selects


@dataclass(frozen=True)
class Pod:
    """One end of a connection."""

    labels: dict[str, str]
    ports: dict[str, int] = field(default_factory=dict)
    namespace: str = NAMESPACE

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


def reaches(objects: list[Object], source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection from `source` to `port` of `target` is let through at both ends."""
    return _passes(objects, "Egress", source, target, port, protocol, target) and _passes(
        objects, "Ingress", target, source, port, protocol, target
    )


def _passes(
    objects: list[Object], direction: str, own: Pod, other: Pod, port: int, protocol: str, server: Pod
) -> bool:
    policies = [
        policy["spec"]
        for policy in of_kind(objects, "NetworkPolicy")
        if own.namespace == NAMESPACE
        and direction in policy["spec"]["policyTypes"]
        and selects(policy["spec"]["podSelector"], own.labels)
    ]
    if not policies:
        return True
    side = "from" if direction == "Ingress" else "to"
    return any(
        _port(rule.get("ports"), port, protocol, server) and _peer(rule.get(side), other)
        for policy in policies
        for rule in policy.get(direction.lower()) or []
    )


def _port(ports: list[Object] | None, port: int, protocol: str, server: Pod) -> bool:
    if ports is None:
        return True
    for each in ports:
        number: Any = each.get("port")
        if isinstance(number, str):
            number = server.ports.get(number)
        if each.get("protocol", "TCP") == protocol and number in (None, port):
            return True
    return False


def _peer(peers: list[Object] | None, other: Pod) -> bool:
    if peers is None:
        return True
    for peer in peers:
        assert set(peer) <= {"podSelector", "namespaceSelector"}, "the evaluator knows no ipBlock"
        if "namespaceSelector" in peer:
            if not selects(peer["namespaceSelector"], other.namespace_labels):
                continue
        elif other.namespace != NAMESPACE:
            continue
        if selects(peer.get("podSelector", {}), other.labels):
            return True
    return False
