# SPDX-License-Identifier: Apache-2.0
"""From a cluster's configuration to the processes of one actor, on the node where the actor runs.

The processes are those of `deltaserve up` (deltaserve/up/plan.py), with two differences: addresses are those of nodes,
and each actor starts a part of them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from deltaserve.addresses import bracketed, join
from deltaserve.config import ClusterConfig, EtcdConfig, Role, StoreConfig
from deltaserve.up import binaries
from deltaserve.up import plan as up_plan
from deltaserve.up.cluster import ROLE_COMMAND
from deltaserve.up.plan import LOOPBACK, Ports, ProcessSpec
from deploy.ray.config import RayConfig

INFRASTRUCTURE = ("etcd", "master")


@dataclasses.dataclass(frozen=True)
class ControlPlane:
    """Where the control actor's processes are; chosen once, so that they come back where everybody knows them."""

    host: str
    ports: Ports
    node: str = ""
    """Ray's id of the node."""

    @property
    def etcd(self) -> EtcdConfig:
        """etcd, as a client of this cluster sees it."""
        return EtcdConfig(endpoints=[join(self.host, self.ports.etcd_client)])

    @property
    def endpoint(self) -> str:
        """URL of the OpenAI endpoint."""
        return f"http://{join(self.host, self.ports.router)}"

    @property
    def all_ports(self) -> tuple[int, ...]:
        """Every port that must be free before the control actor's processes start."""
        return dataclasses.astuple(self.ports)[:5]


def control_specs(config: RayConfig, control: ControlPlane, data: Path) -> list[ProcessSpec]:
    """etcd, master and router. Raises ClusterError when a binary is missing."""
    host = config.host or control.host
    specs = _build(config, control, data, router_options={"host": host, "etcd": _etcd(config, control)})
    chosen = []
    for spec in specs:
        if spec.name in INFRASTRUCTURE:
            argv = tuple(_moved(part, control.host) for part in spec.argv)
            probe = _moved(spec.probe, control.host)
            chosen.append(dataclasses.replace(spec, argv=argv, probe=probe))
        elif spec.name == "router":
            chosen.append(spec)
    return chosen


def worker_spec(
    config: RayConfig, control: ControlPlane, role: Role, name: str, host: str, data: Path
) -> ProcessSpec:
    """One worker, bound to its node's address. Raises ClusterError when a field does not fit the role."""
    store = StoreConfig(
        master=join(control.host, control.ports.master), hostname=host, segment_bytes=config.segment_bytes
    )
    own: dict[str, Any] = {
        "host": host,
        "etcd": _etcd(config, control),
        "store": store.model_dump(),
        "drain_seconds": config.drain_seconds,
    }
    options = {"prefill_options": _over(own, config.prefill_options)} if role == "prefill" else {}
    if role == "decode":
        options = {"decode_options": _over(own, config.decode_options)}
    spec = next(s for s in _build(config, control, data, **options) if s.name == f"{role}-0")
    return dataclasses.replace(spec, name=name, wave=0)


def _build(config: RayConfig, control: ControlPlane, data: Path, **options: Any) -> list[ProcessSpec]:
    fields = {name: getattr(config, name) for name in ClusterConfig.model_fields}
    router = _over(options.pop("router_options", {}), config.router_options)
    # One worker of each role in the plan: an actor runs one process, so devices are counted from its own first one.
    one = ClusterConfig.model_validate(
        {**fields, "prefill": 1, "decode": 1, "host": config.host or control.host, **options}
        | {"router_options": router}
    )
    etcd, master = binaries.find_etcd(config.etcd_binary), binaries.find_master(config.master_binary)
    return up_plan.build(one, control.ports, data, etcd.path, master.path, ROLE_COMMAND)


def _moved(text: str, host: str) -> str:
    """An argument or a probe with another host: in brackets where a port follows it."""
    return text.replace(f"{LOOPBACK}:", f"{bracketed(host)}:").replace(LOOPBACK, host)


def _etcd(config: RayConfig, control: ControlPlane) -> dict[str, Any]:
    asked = {} if config.lease_ttl is None else {"lease_ttl": config.lease_ttl}
    return {**control.etcd.model_dump(), **asked}


def _over(own: dict[str, Any], given: dict[str, object]) -> dict[str, Any]:
    """`given` over `own`; nested models field by field, so that naming one field of `store` keeps the others."""
    merged = dict(own)
    for name, value in given.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = {**merged[name], **value} if both and isinstance(value, dict) else value
    return merged
