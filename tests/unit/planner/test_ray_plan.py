# SPDX-License-Identifier: Apache-2.0
"""What a cluster on Ray starts where, and which replicas go; no Ray is needed for that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from deltaserve.addresses import bracketed
from deltaserve.up.errors import ClusterError
from deltaserve.up.plan import LOOPBACK, Ports
from deploy.ray import plan
from deploy.ray.actors import Report
from deploy.ray.cluster import RayCluster, connect
from deploy.ray.config import ROLES, RayConfig
from deploy.ray.controller import Books, Replica

CONTROL = plan.ControlPlane("10.0.0.1", Ports(2379, 2380, 50051, 9003, 8000))
MODEL = Path(__file__).parents[3] / "models" / "demo"


@pytest.fixture(autouse=True)
def binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """etcd and the master need not be installed to plan."""
    for name in ("find_etcd", "find_master"):
        monkeypatch.setattr(plan.binaries, name, lambda named: SimpleNamespace(path=Path("/bin/true")))


def config(**fields: Any) -> RayConfig:
    return RayConfig(model=MODEL, **fields)


def flag(argv: tuple[str, ...], name: str) -> str:
    return next(part.partition("=")[2] for part in argv if part.startswith(f"--{name}="))


def test_the_control_plane_listens_where_other_nodes_reach_it() -> None:
    specs = {spec.name: spec for spec in plan.control_specs(config(), CONTROL, Path("/data"))}
    assert list(specs) == ["etcd", "master", "router"]
    assert flag(specs["etcd"].argv, "advertise-client-urls") == "http://10.0.0.1:2379"
    assert flag(specs["master"].argv, "rpc_address") == "10.0.0.1"
    assert specs["master"].probe == "10.0.0.1:50051"
    assert flag(specs["router"].argv, "host") == "10.0.0.1"
    assert flag(specs["router"].argv, "etcd-endpoints") == '["10.0.0.1:2379"]'
    assert not any(LOOPBACK in part for spec in specs.values() for part in spec.argv)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_is_bound_to_its_node_and_knows_the_control_plane(role: Any) -> None:
    made = config(
        prefill_options={"store": {"protocol": "rdma"}}, decode_options={"store": {"protocol": "rdma"}}
    )
    spec = plan.worker_spec(made, CONTROL, role, f"{role}-7", "10.0.0.9", Path("/data"))
    assert spec.name == f"{role}-7"
    assert role in spec.argv
    assert flag(spec.argv, "host") == "10.0.0.9"
    assert flag(spec.argv, "store-hostname") == "10.0.0.9"
    assert flag(spec.argv, "store-master") == "10.0.0.1:50051"
    assert flag(spec.argv, "etcd-endpoints") == '["10.0.0.1:2379"]'
    assert flag(spec.argv, "store-protocol") == "rdma", "naming one field of the store keeps the others"
    assert flag(spec.argv, "drain-seconds") == "25.0"


def test_all_are_told_after_how_long_a_silent_worker_is_gone() -> None:
    made = config(lease_ttl=9)
    specs = {spec.name: spec for spec in plan.control_specs(made, CONTROL, Path("/data"))}
    told = [plan.worker_spec(made, CONTROL, role, role, "10.0.0.9", Path("/data")) for role in ROLES]
    for spec in (*told, specs["router"]):
        assert flag(spec.argv, "etcd-lease-ttl") == "9"
    assert flag(specs["master"].argv, "client_ttl") == "9"


def test_the_master_keeps_what_a_writer_began_as_long_as_it_may_write() -> None:
    made = config(decode_options={"load_timeout": 50})
    specs = {spec.name: spec for spec in plan.control_specs(made, CONTROL, Path("/data"))}
    assert flag(specs["master"].argv, "put_start_release_timeout_sec") == str(5 * 50 + 3 * 10)


def test_bundles_name_the_roles_own_resource_and_the_gpus_of_all_ranks() -> None:
    cuda = config(device="cuda", prefill_tp=8, decode_tp=4, decode_cpus=2)
    assert cuda.bundle("prefill") == {"deltaserve_prefill": 1, "CPU": 1, "GPU": 8}
    assert cuda.bundle("decode") == {"deltaserve_decode": 1, "CPU": 2, "GPU": 4}
    assert cuda.bundle("control") == {"deltaserve_control": 1}
    assert "GPU" not in config().bundle("decode")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"decode": 20}, "raise --highest"), ({"prefill": 0}, "at least 1"), ({"name": "Two words"}, "name")],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**fields)


def replica(index: int, state: str) -> Replica:
    return Replica(f"decode-{index}", index, None, None, Report("", state, "", "", None, 1, ""))


def test_what_does_not_serve_goes_first_and_then_the_newest() -> None:
    books = Books(2, [replica(0, "ready"), replica(1, "starting"), replica(2, "ready"), replica(3, "ready")])
    assert [each.index for each in books.surplus()] == [1, 3]
    books.wanted = 4
    assert books.surplus() == []
    books.wanted, books.replicas[3].drain = 2, object()
    assert [each.index for each in books.surplus()] == [1], "one that drains is no longer counted"


def test_no_ray_is_said_at_once() -> None:
    with pytest.raises(ClusterError, match="no Ray answers"):
        connect("127.0.0.1:9")
    with pytest.raises(ClusterError, match="no Ray answers"):
        RayCluster.attach("default", "127.0.0.1:9")


def test_an_ipv6_address_is_in_brackets_wherever_a_port_follows_it() -> None:
    control = plan.ControlPlane("fd00::1", CONTROL.ports)
    assert control.endpoint == "http://[fd00::1]:8000"
    specs = {spec.name: spec for spec in plan.control_specs(config(), control, Path("/data"))}
    assert flag(specs["etcd"].argv, "advertise-client-urls") == "http://[fd00::1]:2379"
    assert flag(specs["etcd"].argv, "initial-cluster").endswith("=http://[fd00::1]:2380")
    assert flag(specs["master"].argv, "rpc_address") == "fd00::1", "an address alone has none"
    assert specs["master"].probe == "[fd00::1]:50051"
    assert flag(specs["router"].argv, "host") == "fd00::1"
    for role in ROLES:
        spec = plan.worker_spec(config(), control, role, f"{role}-0", "fd00::9", Path("/data"))
        assert flag(spec.argv, "store-master") == "[fd00::1]:50051"
        assert flag(spec.argv, "etcd-endpoints") == '["[fd00::1]:2379"]'
        assert (flag(spec.argv, "host"), flag(spec.argv, "store-hostname")) == ("fd00::9", "fd00::9")
    for text in (bracketed("10.0.0.1"), bracketed("router"), bracketed("[fd00::1]")):
        assert text in ("10.0.0.1", "router", "[fd00::1]"), "the control: nothing else gets brackets"
