# SPDX-License-Identifier: Apache-2.0
"""Write cuda.lock: exact pins of all that a CUDA worker needs, as pip resolves pyproject.toml for Python 3.11.

    python -m deploy.images.lock_cuda

Nothing is installed and no wheel is kept, so it runs on a machine without a GPU; pip reads what it needs from the
index. `requirements/` locks what is installed here, which is the CPU set.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(__file__).parent / "cuda.lock"


def requirements() -> list[str]:
    """What pyproject.toml asks for: the common dependencies, and those of the extra `cuda`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["cuda"]]


def resolve(wanted: list[str]) -> dict[str, str]:
    """Name → version of everything that pip would install. Raises CalledProcessError when it finds no solution."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        target = [
            "--target",
            str(Path(folder) / "none"),
            "--python-version",
            "3.11",
            "--only-binary",
            ":all:",
        ]
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", *target]
        subprocess.run([*command, "--report", str(report), *wanted], check=True)
        document = json.loads(report.read_text(encoding="utf-8"))
    return {
        canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"]
        for each in document["install"]
    }


def write(pins: dict[str, str]) -> None:
    """The lock, sorted by name."""
    head = ["# A CUDA worker, Python 3.11.", "# Written by python -m deploy.images.lock_cuda; do not edit."]
    LOCK.write_text(
        "\n".join([*head, *(f"{n}=={v}" for n, v in sorted(pins.items()))]) + "\n", encoding="utf-8"
    )
    print(f"{LOCK.relative_to(ROOT)}: {len(pins)} packages")


if __name__ == "__main__":
    write(resolve(requirements()))
