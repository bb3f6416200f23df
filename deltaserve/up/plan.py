# SPDX-License-Identifier: Apache-2.0
"""From a cluster's configuration to its processes. Plain arithmetic: nothing is started here.

Starting order is by `wave`: etcd and the master first, because everybody needs them; then all others at once, because
each spends most of its start in its own imports and the model. Stopping goes the other way round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deltaserve.cli.options import to_argv
from deltaserve.config import ClusterConfig, EtcdConfig, RouterConfig, StoreConfig, WorkerConfig
from deltaserve.up.devices import visible_devices
from deltaserve.up.errors import ClusterError

LOOPBACK = "127.0.0.1"
MASTER_CLIENT_TTL = 5
"""Seconds after which the Mooncake master forgets a silent client."""

LEAST_PUT_RELEASE = 60
"""Seconds; Mooncake wants it longer than the 30 s after which another writer may take the same key."""

ARENAS = {"MALLOC_ARENA_MAX": "4"}
"""glibc gives every thread an arena, and Mooncake has 31: that alone costs hundreds of MB. Read when a process starts,
so a worker cannot set it for itself."""

PATIENT_TTL = 60
PATIENT_TIMEOUT = 30.0
"""Seconds, where ranks outnumber the cores: see `crowded`."""
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Workers share the cores. A thread that spins at the end of a parallel region then keeps the other worker's thread,
which that one waits for, from running: two processes of two threads on two cores do 20 to 30 times the steps without.
Read when OpenMP is loaded."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to run."""

    name: str
    argv: tuple[str, ...]
    wave: int
    """0: infrastructure, 1: roles."""
    env: dict[str, str] = field(default_factory=dict)
    """Laid over the supervisor's environment."""
    probe: str = ""
    """host:port that answers when it is ready; empty: it prints READY itself."""
    health_path: str = ""
    """HTTP path on the probe's address that must answer 200 as well."""


@dataclass(frozen=True)
class Ports:
    """Ports of the infrastructure, chosen before anything starts and kept through restarts."""

    etcd_client: int
    etcd_peer: int
    master: int
    master_metrics: int
    router: int


def build(
    config: ClusterConfig,
    ports: Ports,
    data: Path,
    etcd: Path,
    master: Path,
    role_command: Sequence[str],
) -> list[ProcessSpec]:
    """The processes in starting order. `data` is the temporary folder.

    Raises ClusterError when a field given through the *_options does not fit the role, or CUDA devices are too few.
    """
    specs = [_etcd(ports, data, etcd)]
    workers: list[WorkerConfig] = []
    devices = _devices(config)
    metrics = count_from(config.metrics_port)
    for role, number, tp in (
        ("prefill", config.prefill, config.prefill_tp),
        ("decode", config.decode, config.decode_tp),
    ):
        for index in range(number):
            worker = _worker(config, ports, role, tp, next(metrics))
            workers.append(worker)
            specs.append(
                ProcessSpec(
                    name=f"{role}-{index}",
                    argv=(*role_command, role, *to_argv(worker, role, frozenset({"role"}))),
                    wave=1,
                    env={
                        **_unset(ARENAS | (SHARED_CORES if config.device == "cpu" else {})),
                        **devices.take(tp),
                    },
                )
            )
    specs.insert(1, _master(ports, master, _silence(config, MASTER_CLIENT_TTL), put_release(workers)))
    router = _router(config, ports)
    specs.append(ProcessSpec("router", (*role_command, "router", *to_argv(router, "router")), wave=1))
    return specs


def _etcd(ports: Ports, data: Path, binary: Path) -> ProcessSpec:
    client, peer = f"http://{LOOPBACK}:{ports.etcd_client}", f"http://{LOOPBACK}:{ports.etcd_peer}"
    options = {
        "name": "deltaserve",
        "data-dir": str(data / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"deltaserve={peer}",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "10m",
    }
    argv = (str(binary), *(f"--{name}={value}" for name, value in options.items()))
    return ProcessSpec("etcd", argv, wave=0, probe=f"{LOOPBACK}:{ports.etcd_client}", health_path="/health")


def put_release(workers: Sequence[WorkerConfig]) -> int:
    """Seconds after which the master takes back the room of an object that nobody has finished.

    Until then a dead writer's room is lost, so the master's own 600 s are too long; but room that a living writer still
    writes into must not become another object's.
    """
    return max([LEAST_PUT_RELEASE, *(math.ceil(worker.longest_put) for worker in workers)])


def _master(ports: Ports, binary: Path, client_ttl: int, put_release: int) -> ProcessSpec:
    options = {
        "rpc_address": LOOPBACK,
        "rpc_port": ports.master,
        "metrics_host": LOOPBACK,
        "metrics_port": ports.master_metrics,
        "enable_http_metadata_server": "false",
        "default_kv_lease_ttl": 1000,
        "client_ttl": client_ttl,
        "put_start_release_timeout_sec": put_release,
        # Everything is hard-pinned, so there is nothing to evict. A master that tries to (it does when a put finds no
        # room, or nine tenths are in use) does not come to taking a dead writer's room back: seen with 0.3.13.
        "eviction_ratio": 0,
        "eviction_high_watermark_ratio": 1,
    }
    argv = (str(binary), *(f"--{name}={value}" for name, value in options.items()), "--logtostderr")
    return ProcessSpec("master", argv, wave=0, probe=f"{LOOPBACK}:{ports.master}")


def count_from(port: int) -> Iterator[int]:
    """Consecutive ports from this one; 0 for ever when it is 0, which means none."""
    return count(port) if port else repeat(0)


def _worker(config: ClusterConfig, ports: Ports, role: str, tp: int, metrics_port: int) -> WorkerConfig:
    fields: dict[str, Any] = {
        "role": role,
        "model": config.model.resolve(),
        "host": LOOPBACK,
        "port": 0,
        "device": config.device,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "tp": tp,
        "dcp": config.decode_dcp if role == "decode" else 1,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_bytes": config.kv_cache_bytes,
        "omp_threads": config.omp_threads or split_cores(sorted(os.sched_getaffinity(0)), tp),
        "verify": config.verify,
        "damage": config.damage if role == "decode" else "none",
        "reasoning_parser": config.reasoning_parser,
        "metrics_port": metrics_port,
        "log": config.log,
        "trace": config.trace,
        "etcd": _etcd_config(config, ports),
        "store": StoreConfig(
            master=f"{LOOPBACK}:{ports.master}",
            segment_bytes=config.segment_bytes,
            timeout=PATIENT_TIMEOUT if crowded(config) else StoreConfig().timeout,
        ),
    }
    try:
        return WorkerConfig.model_validate({**fields, **config.worker_options(role)})
    except ValidationError as error:
        raise ClusterError(f"--{role}-options: {_first(error)}") from error


def _router(config: ClusterConfig, ports: Ports) -> RouterConfig:
    fields: dict[str, Any] = {
        "model": config.model.resolve(),
        "served_model_name": config.model_name,
        "host": config.host,
        "port": ports.router,
        "processes": config.router_processes,
        "max_model_len": config.max_model_len,
        "placement": config.placement,
        "handover_min_tokens": config.handover_min_tokens,
        "tool_parser": config.tool_parser,
        "reasoning_parser": config.reasoning_parser,
        "log": config.log,
        "trace": config.trace,
        "etcd": _etcd_config(config, ports),
    }
    try:
        return RouterConfig.model_validate({**fields, **config.router_options})
    except ValidationError as error:
        raise ClusterError(f"--router-options: {_first(error)}") from error


def _etcd_config(config: ClusterConfig, ports: Ports) -> EtcdConfig:
    default = EtcdConfig()
    return EtcdConfig(
        endpoints=[f"{LOOPBACK}:{ports.etcd_client}"],
        lease_ttl=_silence(config, default.lease_ttl),
        timeout=PATIENT_TIMEOUT if crowded(config) else default.timeout,
    )


def _silence(config: ClusterConfig, default: int) -> int:
    """Seconds after which a silent process is gone: what the user says, or else what the machine can keep."""
    if config.lease_ttl is not None:
        return config.lease_ttl
    return PATIENT_TTL if crowded(config) else default


def crowded(config: ClusterConfig) -> bool:
    """Whether the CPU has fewer cores than the cluster has ranks that compute.

    vLLM's tensor-parallel ranks wait for each other spinning in every reduction of a step (between steps they sleep,
    see deltaserve/engine/cpu/waiting.py); with more of them than cores whatever else runs here, leases and heartbeats
    among it, is served late, which is no reason to take anybody for dead.
    """
    tensor_parallel = max(config.prefill_tp, config.decode_tp) > 1
    ranks = config.prefill * config.prefill_tp + config.decode * config.decode_tp
    return config.device == "cpu" and tensor_parallel and ranks > len(os.sched_getaffinity(0))


def _first(error: ValidationError) -> str:
    item = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, item['loc']))}: {item['msg']}"


def _unset(defaults: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in defaults.items() if name not in os.environ}


def split_cores(cores: Sequence[int], ranks: int) -> str:
    """Cores of each rank of one worker in vLLM's notation: ranks apart with |, cores with commas.

    Workers share the cores: prefill and decode are seldom busy at the same time on a small machine, and either is
    fastest with all of them. Ranks of one worker run in step, so they get cores of their own while there are enough.
    """
    if ranks >= len(cores):
        return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    share, extra = divmod(len(cores), ranks)
    parts, start = [], 0
    for rank in range(ranks):
        end = start + share + (1 if rank < extra else 0)
        parts.append(",".join(str(core) for core in cores[start:end]))
        start = end
    return "|".join(parts)


class _devices:
    """Hands out CUDA devices in order; workers share them when there are fewer than ranks."""

    def __init__(self, config: ClusterConfig) -> None:
        self._next = 0
        self._visible: list[str] = []
        if config.device == "cpu":
            return
        self._visible = visible_devices()
        largest = max(config.prefill_tp if config.prefill else 1, config.decode_tp)
        if len(self._visible) < largest:
            raise ClusterError(
                f"device cuda: {len(self._visible)} devices are visible, one worker needs {largest}; "
                "lower --prefill-tp or --decode-tp, or use --device cpu"
            )

    def take(self, ranks: int) -> dict[str, str]:
        """The environment of the next worker."""
        if not self._visible:
            return {}
        if self._next + ranks > len(self._visible):
            self._next = 0
        chosen = self._visible[self._next : self._next + ranks]
        self._next += ranks
        return {"CUDA_VISIBLE_DEVICES": ",".join(chosen)}
