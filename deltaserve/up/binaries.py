# SPDX-License-Identifier: Apache-2.0
"""etcd and mooncake_master: where they are, and which versions of etcd are refused.

etcd 3.5.0 to 3.5.2 can lose committed data after a crash, and what the ledger has committed must last. 3.4.23 is the
oldest 3.4 that this project is tested with.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from deltaserve.up.errors import ClusterError

OLDEST_34 = (3, 4, 23)
OLDEST_35 = (3, 5, 3)
ETCD_REMEDY = "install etcd 3.4.23 or at least 3.5.3 (make install does, or --etcd-binary names one)"


@dataclass(frozen=True)
class Binary:
    """A program that was found, and its version as it prints it."""

    path: Path
    version: str


def prefixes() -> list[Path]:
    """Folders that `make install` puts programs into, beside those on PATH."""
    return [Path(sys.executable).parent, Path(sys.prefix) / "opt" / "usr" / "bin"]


def etcd_supported(version: tuple[int, ...]) -> bool:
    """3.4 from 3.4.23 on, and everything from 3.5.3 on."""
    if version[:2] == (3, 4):
        return version >= OLDEST_34
    return version >= OLDEST_35


def find_etcd(named: str = "") -> Binary:
    """The etcd to run: the named one, else the first supported one on PATH or in the install prefix.

    Raises ClusterError when there is none, or none that is supported.
    """
    refused: list[str] = []
    for path in _candidates("etcd", named):
        version = _etcd_version(path)
        if version is not None and etcd_supported(version):
            return Binary(path, ".".join(map(str, version)))
        shown = ".".join(map(str, version)) if version else "an unknown version"
        refused.append(f"{path} is {shown}{_why_refused(version)}")
    if refused:
        raise ClusterError(f"etcd: {'; '.join(refused)}; {ETCD_REMEDY}")
    raise ClusterError(f"etcd: {named or 'no binary'} not found; {ETCD_REMEDY}")


def find_master(named: str = "") -> Binary:
    """The Mooncake master to run. Raises ClusterError when there is none."""
    for path in _candidates("mooncake_master", named):
        return Binary(path, _mooncake_version())
    raise ClusterError(
        f"mooncake_master: {named or 'no binary'} not found; install the cpu or cuda extra (make install), "
        "or name one with --master-binary"
    )


def _why_refused(version: tuple[int, ...] | None) -> str:
    if version is not None and (3, 5, 0) <= version < OLDEST_35:
        return ", which can lose committed data"
    return ", which is too old" if version is not None else ""


def _candidates(name: str, named: str) -> list[Path]:
    if named:
        found = shutil.which(named)
        return [Path(found)] if found else []
    seen: list[Path] = []
    for folder in (None, *prefixes()):
        found = shutil.which(name, path=None if folder is None else str(folder))
        if found and Path(found) not in seen:
            seen.append(Path(found))
    return seen


def _etcd_version(path: Path) -> tuple[int, ...] | None:
    try:
        done = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", done.stdout)
    return tuple(int(part) for part in match.groups()) if match else None


def _mooncake_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    for package in (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine-cuda13",
        "mooncake-transfer-engine",
    ):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "unknown"
