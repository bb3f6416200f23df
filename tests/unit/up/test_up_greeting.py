# SPDX-License-Identifier: Apache-2.0
"""The commands that `deltaserve up` prints work as pasted, from the folder where it was started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deltaserve.up import main


def program(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "deltaserve"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_name_alone_only_where_path_leads_to_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = program(tmp_path / "with blanks"), program(tmp_path / "other")
    monkeypatch.setattr(sys, "argv", [str(own), "up"])
    monkeypatch.setenv("PATH", str(own.parent))
    assert main._program() == "deltaserve"
    for path in ("", str(other.parent)):
        monkeypatch.setenv("PATH", path)
        assert main._program() == f"'{own}'"


def test_a_module_is_named_with_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/deltaserve/__main__.py", "up"])
    assert main._program() == f"{sys.executable} -m deltaserve"
