# SPDX-License-Identifier: Apache-2.0
"""The table of commands: exit codes, lazy loading, and what is offered."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from deltaserve.cli.main import COMMANDS, Command, main
from deltaserve.config import RouterConfig, WorkerConfig


def _fake_module(monkeypatch: pytest.MonkeyPatch, run: object) -> Command:
    module = types.ModuleType("deltaserve_fake_role")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Command("decode", "a role", WorkerConfig, "deltaserve_fake_role:run", {"role": "decode"})


def test_a_command_gets_its_configuration_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[WorkerConfig] = []
    command = _fake_module(monkeypatch, lambda config: seen.append(config) or 7)
    assert main(["decode", "--port", "5"], [command]) == 7
    assert (seen[0].role, seen[0].port) == ("decode", 5)


def test_what_the_command_fixes_is_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    command = _fake_module(monkeypatch, lambda config: 0)
    with pytest.raises(SystemExit) as caught:
        main(["decode", "--role", "prefill"], [command])
    assert caught.value.code == 2


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("no memory"), 1)])
def test_an_exception_becomes_an_exit_code_and_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], raised: BaseException, code: int
) -> None:
    def run(config: object) -> int:
        raise raised

    assert main(["decode"], [_fake_module(monkeypatch, run)]) == code
    if code == 1:
        assert capsys.readouterr().err.splitlines()[-1] == "error: RuntimeError: no memory"


def test_wrong_options_exit_with_2_and_name_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--port", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: --port: ")


def test_the_command_line_loads_no_role_and_no_engine() -> None:
    code = (
        "import sys, deltaserve.cli.main as m; m.build_parser().format_help();"
        "bad = {'router', 'prefill_worker', 'decode_worker', 'statestore', 'vllm', 'torch', 'grpc'} & set(sys.modules);"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    # Negative control: the same check notices an import.
    done = subprocess.run(
        [sys.executable, "-c", "import router;" + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0


def test_offered_commands() -> None:
    assert [command.name for command in COMMANDS] == [
        "up",
        "router",
        "prefill",
        "decode",
        "verify",
        "doctor",
        "drain",
        "top",
        "plan",
        "boundaries",
    ]
    assert issubclass(COMMANDS[1].model, RouterConfig)
