# SPDX-License-Identifier: Apache-2.0
"""`deltaserve boundaries` over a ledger double, and without an etcd."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import pytest

from deltaserve.cli import boundaries
from deltaserve.cli.main import main
from statestore.boundary import BoundaryRecord, Epoch, ObjectEntry, RankEntry

OBJECT = ObjectEntry("k", "kda", 1000, ("ab",), 0, 31, True)
RECORDS = [
    BoundaryRecord(
        "m.p.1-0",
        "aa",
        "bb",
        31,
        Epoch(1, 0),
        "prefill-x",
        "{}",
        state="committed",
        ranks=(RankEntry(0, "written", (OBJECT,)),),
    ),
    BoundaryRecord(
        "m.p.1-1", "aa", "bb", 62, Epoch(1, 1), "prefill-x", "{}", ranks=(RankEntry(0), RankEntry(1))
    ),
]


class _Ledger:
    def __init__(self, config: Any) -> None: ...

    async def list(self) -> list[BoundaryRecord]:
        return RECORDS

    async def close(self) -> None: ...


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("deltaserve_fake_ledger")
    module.Ledger = _Ledger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(boundaries, "LEDGER", "deltaserve_fake_ledger:Ledger")
    return


@pytest.mark.usefixtures("ledger")
def test_the_table_shows_what_ranks_have_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["m.p.1-0", "committed", "31", "1000", "1/1", "prefill-x", "unknown"]
    assert lines[2] == ["m.p.1-1", "pending", "62", "0", "0/2", "prefill-x", "unknown"]
    assert lines[3] == ["2", "boundaries,", "1000", "bytes"]


@pytest.mark.usefixtures("ledger")
def test_json_gives_the_records_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [BoundaryRecord.from_json(json.dumps(item)) for item in document] == RECORDS


def test_no_etcd_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries", "--etcd-endpoints", "127.0.0.1:1", "--etcd-timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: etcd at 127.0.0.1:1: ")
    assert "--etcd-endpoints" in error
