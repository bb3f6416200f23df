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

OBJECT = ObjectEntry("k", "kda", 1000, ("ab",), 0, 31, True, "10.0.0.1:5")
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
        reusable=True,
    ),
    BoundaryRecord(
        "m.p.1-1",
        "aa",
        "bb",
        62,
        Epoch(1, 1),
        "prefill-x",
        "{}",
        created=1000.0,
        ranks=(RankEntry(0), RankEntry(1)),
        base=31,
        parents=("m.p.1-0",),
        link=1,
    ),
]


class _Ledger:
    def __init__(self, config: Any) -> None: ...

    async def list(self) -> list[BoundaryRecord]:
        return RECORDS

    async def pins(self) -> dict[str, list[str]]:
        return {"m.p.1-0": ["m.p.1-1"]}

    async def close(self) -> None: ...


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("deltaserve_fake_ledger")
    module.Ledger = _Ledger  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(boundaries, "LEDGER", "deltaserve_fake_ledger:Ledger")
    monkeypatch.setattr(boundaries, "time", types.SimpleNamespace(time=lambda: 1007.0))
    return


@pytest.mark.usefixtures("ledger")
def test_the_table_shows_what_ranks_have_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "boundary state kind tokens parents link bytes ranks pins owner lies in age",
        "m.p.1-0 committed checkpoint 0..31 0 0 1000 1/1 1 prefill-x 10.0.0.1:5 unknown",
        "m.p.1-1 pending request 31..62 1 1 0 0/2 0 prefill-x - 7 s",
        "2 boundaries, 1000 bytes; 1 of them checkpoints, 1000 bytes",
    ]


@pytest.mark.usefixtures("ledger")
def test_json_gives_the_records_and_what_is_known_about_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    more = [{name: item.pop(name) for name in ("bytes", "pins", "segments", "age")} for item in document]
    assert [BoundaryRecord.from_json(json.dumps(item)) for item in document] == RECORDS
    assert more[0] == {"bytes": 1000, "pins": ["m.p.1-1"], "segments": {"10.0.0.1:5": 1000}, "age": None}
    assert (more[1]["pins"], more[1]["segments"], more[1]["age"]) == ([], {}, 7.0)


def test_no_etcd_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["boundaries", "--etcd-endpoints", "127.0.0.1:1", "--etcd-timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: etcd at 127.0.0.1:1: ")
    assert "--etcd-endpoints" in error
