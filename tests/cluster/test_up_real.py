# SPDX-License-Identifier: Apache-2.0
"""`deltaserve up` with real workers: the curl line as pasted, memory under load, and the end."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.calls import call
from tests.support.cluster import DEMO
from tests.support.patience import HUNG
from tests.support.processes import MARK, marked, new_mark, wait_until

pytestmark = pytest.mark.cluster
GIB = 1 << 30
LONG = 8192
AT_ONCE = 8


def _roles(mark: str) -> dict[str, list[psutil.Process]]:
    """Processes of the run by what their command line says they are; ranks count with their worker."""
    found: dict[str, list[psutil.Process]] = {}
    for pid in marked(mark):
        process = psutil.Process(pid)
        words = process.cmdline()
        role = next((word for word in ("prefill", "decode", "router") if word in words), "other")
        found.setdefault(role, []).append(process)
    return found


def _peak(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


@pytest.mark.timeout(420)
def test_one_command_serves_within_its_memory_and_leaves_nothing(tmp_path: Path) -> None:
    mark = new_mark()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    output = tmp_path / "output"
    argv = [
        "up",
        "--model",
        str(DEMO),
        "--port=0",
        "--run-dir",
        str(tmp_path / "run"),
        "--placement=handover",
    ]
    with output.open("wb") as file:
        up = subprocess.Popen(
            [sys.executable, "-m", "deltaserve", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        )
    try:
        wait_until(lambda: "curl -s" in output.read_text() or up.poll() is not None, 300, "ready")
        text = output.read_text()
        assert "curl -s" in text, text
        line = next(line for line in text.splitlines() if line.startswith("curl"))
        pasted = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(pasted.stdout)["choices"][0]["message"]["content"]

        endpoint = re.search(r"curl -s (http://[^/]+)/", line)[1]  # type: ignore[index]
        totals: list[int] = []
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [pool.submit(_long_prompt, endpoint, number) for number in range(AT_ONCE)]
            while not all(answer.done() for answer in answers):
                totals.append(sum(_share(process) for group in _roles(mark).values() for process in group))
                time.sleep(1.0)
        assert [answer.result() for answer in answers] == [LONG] * AT_ONCE
        roles = _roles(mark)
        for role in ("prefill", "decode"):
            peak = sum(_peak(process) for process in roles[role])
            print(f"{role}: peak {peak / GIB:.2f} GiB")
            assert peak < 3 * GIB, f"{role} took {peak / GIB:.2f} GiB"
        print(f"cluster: peak {max(totals) / GIB:.2f} GiB")
        assert max(totals) < 8 * GIB
    finally:
        up.send_signal(signal.SIGINT)
        began = time.monotonic()
        code = up.wait(timeout=30)
        took = time.monotonic() - began
    assert code == 0, output.read_text()
    print(f"Ctrl-C to the last process's end: {took:.1f} s")
    assert took < HUNG
    assert not marked(mark)
    assert not list(temporary.iterdir())


def _share(process: psutil.Process) -> int:
    """Bytes of a process, shared pages divided among those who share them; 0 when it has just ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _long_prompt(endpoint: str, number: int) -> int:
    # Different from the first token on, so that no prefix cache shortens any of them.
    prompt = [1, 100 + number, *(100 + (number * 7 + i * 13) % 800 for i in range(LONG - 2))]
    body = {"model": DEMO.name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    status, document = call(endpoint + "/v1/completions", body, timeout=240)
    assert status == 200, document
    return int(document["usage"]["prompt_tokens"])
