# SPDX-License-Identifier: Apache-2.0
"""Finding and ending every process of a cluster, whatever became of its parents; and the guard. Standard library only.

A process belongs to a cluster when its session was opened by one of the cluster's children, or when its environment
carries the cluster's token. Either alone is not enough: a grandchild may open a session of its own, and a program that
writes its title over its environment hides the token.

The guard is this file run as `reaper.py TOKEN FOLDER GRACE`, in a session of its own, with a pipe from the supervisor
as standard input. Each line that arrives is the session of a new child; "done" means that the supervisor has cleaned
up by itself. When the pipe ends without it, the supervisor was killed: the guard ends every process of the cluster and
removes the temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

TOKEN_VARIABLE = "DELTASERVE_CLUSTER_TOKEN"
_POLL = 0.05


def members(token: str, sessions: Collection[int], spare: Collection[int] = ()) -> list[int]:
    """Pids of the living processes of a cluster, zombies left out, without those in `spare`."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spare:
            continue
        try:
            state, session = _state_and_session(entry)
            if state in "ZX":
                continue
            if session in sessions or mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:  # gone, or not ours to look at
            continue
    return found


def _state_and_session(pid: str) -> tuple[str, int]:
    # The name is in brackets and may hold anything; what follows the last bracket is: state, parent, group, session.
    fields = (
        Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    )
    return fields[0], int(fields[3])


def shared_memory(pids: Collection[int]) -> set[str]:
    """Files under /dev/shm that the processes have mapped or open; a killed process cannot unlink its own."""
    paths: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.partition("/dev/shm/")
                if path[1] and not path[2].endswith(" (deleted)"):
                    paths.add("/dev/shm/" + path[2])
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith("/dev/shm/") and not target.endswith(" (deleted)"):
                        paths.add(target)
    return paths


def signal_all(pids: Collection[int], number: int) -> None:
    """Send a signal to each; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(token: str, sessions: Collection[int], spare: Collection[int], grace: float) -> bool:
    """SIGTERM, up to `grace` seconds of patience, then SIGKILL until nothing is left (2 s at most).

    Returns whether all are gone. Shared-memory files that they leave behind are removed.
    """
    left = members(token, sessions, spare)
    files = shared_memory(left)
    signal_all(left, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while (left := members(token, sessions, spare)) and time.monotonic() < deadline:
        time.sleep(_POLL)
    deadline = time.monotonic() + 2.0
    while left and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        time.sleep(_POLL)
        left = members(token, sessions, spare)
    unlink_all(files)
    return not left


def unlink_all(paths: Collection[str]) -> None:
    """Remove files; those that are gone are passed over."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_folder(path: str) -> None:
    """Remove a temporary folder with all that is in it; one that is not there is fine."""
    shutil.rmtree(path, ignore_errors=True)


def guard(argv: list[str]) -> None:
    """Returns when the supervisor has cleaned up, or when it is gone and nothing of the cluster is left."""
    token, folder, grace = argv[0], argv[1], float(argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return
        sessions.add(int(word))
    end_all(token, sessions, {os.getpid()}, grace)
    remove_folder(folder)


if __name__ == "__main__":
    guard(sys.argv[1:])
