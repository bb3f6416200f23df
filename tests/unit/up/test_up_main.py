# SPDX-License-Identifier: Apache-2.0
"""`deltaserve up` as a process: what it prints, how it ends, and what is left when it is killed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.processes import marked, wait_until

pytestmark = pytest.mark.cluster
FAKE_UP = Path(__file__).parents[2] / "support" / "fake_up.py"
Up = Callable[..., "Running"]


class Running:
    """The command with its output in a file."""

    def __init__(self, argv: list[str], output: Path, env: dict[str, str]) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(FAKE_UP), "up", *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for(self, words: str, timeout: float = 120) -> None:
        wait_until(lambda: words in self.text or self.process.poll() is not None, timeout, words)
        assert words in self.text, self.text


@pytest.fixture
def up(mark: str, model: Path, tmp_path: Path) -> Iterator[Up]:
    started: list[Running] = []
    (tmp_path / "temporary").mkdir()

    def start(*argv: str, **env: str) -> Running:
        flags = [
            "--model",
            str(model),
            "--run-dir",
            str(tmp_path / "run"),
            "--port=0",
            "--stop-timeout=2",
            *argv,
        ]
        env = {"TMPDIR": str(tmp_path / "temporary"), **env}
        started.append(Running(flags, tmp_path / "output", env))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(timeout=15)


def test_the_curl_line_works_as_pasted(up: Up) -> None:
    running = up()
    running.wait_for("curl -s")
    assert re.search(r"^\[ +\d+\.\d s\] decode-0: loading the model$", running.text, re.MULTILINE), (
        running.text
    )
    line = next(line for line in running.text.splitlines() if line.startswith("curl"))
    url, body = shlex.split(line)[2], shlex.split(line)[-1]
    assert url.startswith("http://127.0.0.1:")
    assert '"model": "tiny"' in body


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_service_ends_everything(up: Up, mark: str, tmp_path: Path, number: int) -> None:
    running = up()
    running.wait_for("curl -s")
    assert len(marked(mark)) > 8
    running.process.send_signal(number)
    assert running.process.wait(timeout=10) == 0, running.text
    assert not marked(mark)
    assert not list((tmp_path / "temporary").iterdir())
    assert running.text.rstrip().endswith("stopped")


def test_a_signal_while_starting_ends_everything(up: Up, mark: str, tmp_path: Path) -> None:
    running = up(FAKE_START_SECONDS="30")
    running.wait_for("decode-0: loading the model")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(timeout=10) == 130
    assert not marked(mark)
    assert not list((tmp_path / "temporary").iterdir())


def test_nothing_outlives_a_killed_supervisor(up: Up, mark: str, tmp_path: Path) -> None:
    running = up(FAKE_DECODE="stubborn")
    running.wait_for("curl -s")
    assert len(marked(mark)) > 8
    running.process.kill()
    running.process.wait(timeout=5)
    wait_until(lambda: not marked(mark), 30, "no process left")
    assert not list((tmp_path / "temporary").iterdir())


def test_a_worker_that_dies_gives_its_log_and_exit_code_1(up: Up, mark: str) -> None:
    running = up(FAKE_DECODE="die")
    assert running.process.wait(timeout=20) == 1
    assert "  | a line of context" in running.text
    assert re.search(r"^error: decode-0: no memory for the KV cache", running.text, re.MULTILINE)
    assert not marked(mark)


def test_a_router_that_cannot_be_kept_up_ends_the_command(up: Up, mark: str) -> None:
    running = up("--max-restarts=0")
    running.wait_for("curl -s")
    router = next(pid for pid in marked(mark) if b"\0router\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(router, signal.SIGKILL)
    assert running.process.wait(timeout=15) == 1
    assert "error: router: given up after 0 restarts: killed by SIGKILL" in running.text
    assert not marked(mark)


def test_a_terminal_gets_a_live_table_and_its_ctrl_c_ends_everything(
    mark: str, model: Path, tmp_path: Path
) -> None:
    argv = ["up", "--model", str(model), "--run-dir", str(tmp_path / "run"), "--port=0", "--stop-timeout=2"]
    pid, terminal = pty.fork()
    if pid == 0:  # the child, whose controlling terminal this is
        os.execv(sys.executable, [sys.executable, str(FAKE_UP), *argv])
    try:
        os.set_blocking(terminal, False)
        output = bytearray()

        def shows(words: bytes) -> bool:
            with contextlib.suppress(BlockingIOError, OSError):
                output.extend(os.read(terminal, 1 << 16))
            return words in output

        wait_until(lambda: shows(b"curl -s"), 120, "the curl line")
        assert b"deltaserve: starting" in output
        assert b"decode-0" in output
        assert b"[  0." not in output  # no plain lines
        os.write(terminal, b"\x03")
        wait_until(lambda: shows(b"stopped"), 30, "stopped")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal)
    assert not marked(mark)
