# SPDX-License-Identifier: Apache-2.0
"""Several layouts in one command: which, in what order, and that one that fails is not lost among others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deltaserve.cli import main as cli
from deltaserve.config import VerifyConfig
from deltaserve.model_check import ModelError
from deltaserve.up import ClusterError
from deltaserve.verify import layouts, main
from deltaserve.verify.client import EndpointError
from deltaserve.verify.judge import Judgement
from deltaserve.verify.layouts import ALL, Layout

Say = Callable[[str], None]


def test_all_are_the_six_with_at_most_two_ranks_a_role() -> None:
    assert [str(layout) for layout in layouts.parse(["all"])] == [
        "1-1-1",
        "1-2-1",
        "1-2-2",
        "2-1-1",
        "2-2-1",
        "2-2-2",
    ]
    assert layouts.parse(["2-4-2", "all", "2-4-2"]) == [Layout(2, 4, 2), *ALL]


@pytest.mark.parametrize("name", ["2-1", "2-1-0", "2-x-1", "", "2-1-1-1", "every"])
def test_what_is_no_layout_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"layouts: '{name}' is no layout; write"):
        layouts.parse(["1-1-1", name])


def test_each_gets_files_of_its_own(tmp_path: Path) -> None:
    config = VerifyConfig(layouts=["all"], json_file=tmp_path / "out.json", run_dir=tmp_path / "run")
    applied = [layout.applied(config) for layout in ALL]
    assert [(c.prefill_tp, c.decode_tp, c.decode_dcp) for c in applied] == [
        (layout.prefill_tp, layout.decode_tp, layout.decode_dcp) for layout in ALL
    ]
    assert all(not c.layouts for c in applied)
    assert [c.json_file for c in applied] == [tmp_path / f"out-{layout}.json" for layout in ALL]
    assert len({c.run_dir for c in applied}) == len(ALL)
    plain = ALL[0].applied(VerifyConfig())
    assert (plain.json_file, plain.run_dir) == (None, None)


BROKEN = Layout(1, 2, 2)


@pytest.mark.parametrize(
    ("broken", "how"),
    [
        (None, "passed"),
        (BROKEN, "FAILED: 0 requests, 0 different"),
        (BROKEN, ClusterError("decode-0 ended", ["the last line of its log"])),
        (BROKEN, EndpointError("request 3: no answer")),
    ],
    ids=["all-pass", "differs", "does-not-start", "breaks"],
)
def test_the_command_runs_each_and_fails_with_any(
    broken: Layout | None,
    how: str | Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Layout] = []

    def verify(config: VerifyConfig, say: Say) -> Judgement:
        layout = Layout(config.prefill_tp, config.decode_tp, config.decode_dcp)
        seen.append(layout)
        say("one request")
        if layout == broken and isinstance(how, Exception):
            raise how
        return Judgement((), (), 1e-3, layout != broken, "0 requests, 0 different")

    monkeypatch.setattr(main, "verify", verify)
    assert cli.main(["verify", "--layouts", "all"]) == (0 if broken is None else 1)
    assert seen == list(ALL), "a layout that fails does not keep the others from running"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-len(ALL) - 1].split() == layouts._COLUMNS.split()
    table = {row.split()[0]: row.split(maxsplit=7)[7] for row in lines[-len(ALL) :]}
    failed = how if isinstance(how, str) else f"FAILED: {how}"
    assert table == {str(layout): failed if layout == broken else "passed" for layout in ALL}
    assert ("  | the last line of its log" in lines) is isinstance(how, ClusterError)


def test_a_mistake_that_every_layout_would_make_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[VerifyConfig] = []

    def verify(config: VerifyConfig, say: Say) -> Judgement:
        seen.append(config)
        raise ModelError("models/none: not there")

    monkeypatch.setattr(main, "verify", verify)
    assert cli.main(["verify", "--layouts", "all"]) == 1
    assert len(seen) == 1
    assert "error: models/none: not there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--layouts", "2-1", "--endpoint", ""], "layouts: '2-1' is no layout"),
        (["--layouts", "1-1-1,1-2-3"], "layouts: 1-2-3: decode DCP does not divide decode TP"),
        (["--layouts", "all", "--endpoint", "http://127.0.0.1:9"], "cannot be used with --endpoint"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *flags]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
