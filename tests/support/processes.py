# SPDX-License-Identifier: Apache-2.0
"""Seeing what processes and files a test has started, independent of the code under test."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

MARK = "DELTASERVE_TEST_MARK"


def new_mark() -> str:
    """A value for the variable `MARK`; every descendant of a process that gets it carries it."""
    return uuid.uuid4().hex


def marked(mark: str) -> list[int]:
    """Pids of living processes that carry the mark, without this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                alive = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if alive and wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> float:
    """Seconds until `condition()` held. Raises AssertionError naming `what` after `timeout` seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, f"{what}: not within {timeout} s"
        time.sleep(0.05)
    return time.monotonic() - began
