# SPDX-License-Identifier: Apache-2.0
"""From a cluster's configuration to its processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deltaserve.cli.main import build_parser
from deltaserve.cli.options import load
from deltaserve.config import ClusterConfig, RouterConfig, WorkerConfig
from deltaserve.up import plan
from deltaserve.up.errors import ClusterError

PORTS = plan.Ports(etcd_client=1, etcd_peer=2, master=3, master_metrics=4, router=5)


def build(config: ClusterConfig) -> list[plan.ProcessSpec]:
    return plan.build(config, PORTS, Path("/data"), Path("/bin/etcd"), Path("/bin/master"), ["role"])


def worker(spec: plan.ProcessSpec) -> WorkerConfig:
    """What the process itself would read out of its arguments."""
    role = spec.argv[1]
    namespace = build_parser().parse_args(spec.argv[1:])
    return load(WorkerConfig, role, namespace, {}, {"role": role})


def test_names_and_waves() -> None:
    specs = build(ClusterConfig(prefill=2, decode=1))
    assert [(spec.name, spec.wave) for spec in specs] == [
        ("etcd", 0),
        ("master", 0),
        ("prefill-0", 1),
        ("prefill-1", 1),
        ("decode-0", 1),
        ("router", 1),
    ]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({}, (5, 5)), ({"prefill_tp": 512}, (60, 60)), ({"lease_ttl": 9, "prefill_tp": 512}, (9, 9))],
)
def test_who_is_silent_for_how_long_is_gone(fields: dict[str, Any], seconds: tuple[int, int]) -> None:
    specs = build(ClusterConfig(**fields))
    router = load(RouterConfig, "router", build_parser().parse_args(specs[-1].argv[1:]), {}, {})
    master = next(a.partition("=")[2] for a in specs[1].argv if a.startswith("--client_ttl="))
    assert (worker(specs[2]).etcd.lease_ttl, int(master)) == seconds
    assert router.etcd.lease_ttl == seconds[0]


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 5 * 30 + 3 * 10),
        ({"decode_options": {"load_timeout": 50}}, 5 * 50 + 3 * 10),
        ({"prefill_options": {"load_timeout": 0.5, "store": {"timeout": 20.5}}}, 5 * 30 + 3 * 10),
        ({"prefill_options": {"load_timeout": 40.1}}, 231),
        ({"prefill": 0, "decode": 1, "decode_options": {"load_timeout": 2}}, plan.LEAST_PUT_RELEASE),
    ],
)
def test_the_master_keeps_what_a_writer_began_as_long_as_it_may_write(
    fields: dict[str, Any], seconds: int
) -> None:
    specs = build(ClusterConfig(**fields))
    assert [spec.name for spec in specs[:2]] == ["etcd", "master"]
    told = next(
        a.partition("=")[2] for a in specs[1].argv if a.startswith("--put_start_release_timeout_sec=")
    )
    assert int(told) == seconds
    assert all(worker(spec).longest_put <= seconds for spec in specs[2:-1])
    assert {"--eviction_ratio=0", "--eviction_high_watermark_ratio=1"} < set(specs[1].argv)


def test_everything_but_the_endpoint_stays_on_loopback() -> None:
    specs = build(ClusterConfig(host="0.0.0.0"))
    for spec in specs:
        assert ("0.0.0.0" in " ".join(spec.argv)) == (spec.name == "router"), spec


def test_workers_get_the_cluster_s_fields() -> None:
    config = ClusterConfig(
        decode_tp=4, decode_dcp=2, max_num_seqs=3, damage="flip", verify=False, segment_bytes=7
    )
    prefill, decode = (worker(spec) for spec in build(config)[2:4])
    assert (prefill.tp, prefill.dcp, prefill.damage) == (1, 1, "none")
    assert (decode.tp, decode.dcp, decode.damage) == (4, 2, "flip")
    assert prefill.etcd.endpoints == decode.etcd.endpoints == ["127.0.0.1:1"]
    for each in (prefill, decode):
        assert (each.max_num_seqs, each.verify, each.store.segment_bytes) == (3, False, 7)
        assert each.store.master == "127.0.0.1:3"
        assert each.model.is_absolute()


def test_options_of_a_role_win() -> None:
    config = ClusterConfig(
        max_num_seqs=3, decode_options={"max_num_seqs": 9}, router_options={"worker_wait": 0.5}
    )
    specs = build(config)
    assert worker(specs[2]).max_num_seqs == 3
    assert worker(specs[3]).max_num_seqs == 9
    router = load(RouterConfig, "router", build_parser().parse_args(specs[4].argv[1:]), {})
    assert (router.worker_wait, router.port, router.served_model_name) == (0.5, 5, "demo")


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_an_option_that_does_not_fit_is_named(role: str) -> None:
    with pytest.raises(ClusterError, match=f"--{role}-options: no_such"):
        build(ClusterConfig.model_validate({f"{role}_options": {"no_such": 1}}))


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1], 1, "0,1"),
        ([0, 1], 2, "0|1"),
        ([0, 1], 4, "0|1|0|1"),
        ([2, 3, 5], 2, "2,3|5"),
        ([7], 2, "7|7"),
    ],
)
def test_cores_of_the_ranks(cores: list[int], ranks: int, expected: str) -> None:
    assert plan.split_cores(cores, ranks) == expected


def test_cuda_devices_are_handed_out_in_order_and_shared_when_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    specs = build(ClusterConfig(device="cuda", prefill=1, decode=2, decode_tp=2))
    given = [spec.env.get("CUDA_VISIBLE_DEVICES") for spec in specs[2:5]]
    assert given == ["4", "5,6", "4,5"]
    with pytest.raises(ClusterError, match="3 devices are visible, one worker needs 4"):
        build(ClusterConfig(device="cuda", decode_tp=4))


def test_workers_that_share_cores_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    specs = {spec.name: spec for spec in build(ClusterConfig())}
    assert specs["prefill-0"].env["OMP_WAIT_POLICY"] == specs["decode-0"].env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert "OMP_WAIT_POLICY" not in specs["router"].env
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # an operator's own choice stays
    assert "OMP_WAIT_POLICY" not in build(ClusterConfig())[2].env
