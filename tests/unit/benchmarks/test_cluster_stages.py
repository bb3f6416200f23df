# SPDX-License-Identifier: Apache-2.0
"""The stages that verify a machine's GPUs: what each runs, what is not run twice, what the table says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import __main__ as command_line
from benchmarks.cluster.stages import STAGES, Stage, choose, command, model_of, row
from deltaserve.cli.options import add_options, load
from deltaserve.config import VerifyConfig

PASSED = {
    "requests": 13,
    "different": 0,
    "excused": 2,
    "damaged": 0,
    "found": 0,
    "from_store": 99,
    "passed": True,
}


def test_one_gpu_runs_what_needs_one() -> None:
    names = [stage.name for stage in choose("", 1)]
    assert "short-1-1-1" in names
    assert not [name for name in names if "2" in name]
    assert len(choose("", 2)) == len(STAGES)
    assert choose("", 0) == []


@pytest.mark.parametrize(
    ("names", "gpus", "message"),
    [("short-1-1-1,nothing", 2, "nothing is no stage"), ("short-2-2-1", 1, "takes 2 GPUs, 1 is visible")],
)
def test_what_cannot_be_chosen_is_named(names: str, gpus: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(names, gpus)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_verify_takes_every_stages_options(stage: Stage, device: str, tmp_path: Path) -> None:
    arguments = command(stage, Path("models/demo"), device, tmp_path / "r.json", tmp_path / "run", [])
    parser = argparse.ArgumentParser()
    add_options(parser, VerifyConfig, "verify")
    config = load(VerifyConfig, "verify", parser.parse_args(arguments[1:]), {})
    assert config.device == device
    assert config.json_file == tmp_path / "r.json"
    assert config.cluster().decode_tp % config.decode_dcp == 0


def test_a_stage_with_a_result_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(stage: Stage, arguments: list[str], log: Path, seconds: float, answers: Path) -> str:
        ran.append(stage.name)
        if stage.name != "damage":
            Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(PASSED))
        return "exit code 0 after 1 s"

    monkeypatch.setattr(command_line, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    wanted = ["x", "--out", str(tmp_path), "--stages", "short-1-1-1,damage"]
    monkeypatch.setattr(sys, "argv", wanted)
    assert command_line.main() == 1, "one stage has no result"
    assert (
        "damage         every kind of damage before a load         not run to its end"
        in capsys.readouterr().out
    )
    assert command_line.main() == 1
    assert ran == ["short-1-1-1", "damage", "damage"]
    (tmp_path / "damage.json").write_text(json.dumps({**PASSED, "damaged": 12, "found": 12}))
    assert command_line.main() == 0
    out = capsys.readouterr().out
    assert "0 different, 2 excused" in out
    assert "12 of 12 found" in out
    monkeypatch.setattr(sys, "argv", [*wanted, "--device", "cpu"])
    command_line.main()
    assert ran[3:] == ["short-1-1-1", "damage"], "other arguments are another run"


def test_a_failed_stage_is_run_again(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    command_line.asked_file(result).write_text('["verify"]')
    result.write_text(json.dumps({**PASSED, "passed": False}))
    assert not command_line.is_known(result, ["verify"])
    result.write_text(json.dumps(PASSED))
    assert command_line.is_known(result, ["verify"])
    assert not command_line.is_known(result, ["verify", "--quick"])


def test_a_stage_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    ended = command_line.run(STAGES[0], [], tmp_path / "log", 0.2, tmp_path)
    assert "stopped after 0 s" in ended


def test_a_failed_stage_fails_the_command(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    result.write_text(json.dumps({**PASSED, "passed": False, "different": 1}))
    assert row(STAGES[0], result).endswith("FAILED")


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_folds_drafts_in_every_process_or_in_none(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DELTASERVE_REPLAY_SSM", raising=False)
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "replay=$DELTASERVE_REPLAY_SSM"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert command_line.run(stage, [], tmp_path / "log", 20, tmp_path).startswith("exit code 0")
    wanted = {"replay": "1", "ring": "ring"}.get(stage.name.partition("-")[2], "")
    assert (tmp_path / "log").read_text() == f"replay={wanted}\n"
    assert not stage.replay or stage.drafts, "without drafts there is nothing to fold"


def test_models_with_random_weights_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from models import random_model

    made: list[Path] = []
    write = random_model.write_random_model

    def counted(path: Path, **options: object) -> int:
        made.append(path)
        return write(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(random_model, "write_random_model", counted)
    demo = Path("models/demo")
    for stage in STAGES:
        model = model_of(stage, demo, "cpu", tmp_path)
        assert (model == demo) == (not stage.preset)
        assert model == demo or (model / "config.json").is_file()
        assert not stage.preset or stage.preset in random_model.PRESETS, "what a GPU would be given"
    assert sorted(path.name for path in made) == sorted(
        {f"{stage.preset}-small" for stage in STAGES if stage.preset}
    )
