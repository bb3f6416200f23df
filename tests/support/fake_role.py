# SPDX-License-Identifier: Apache-2.0
"""A role without an engine: speaks the same lines on standard output, and misbehaves when told to.

Run as `fake_role.py ROLE FLAG…`. The variable FAKE_<ROLE> (or FAKE_<ROLE>_ONCE=<file>, which is removed when it has
acted) names the behaviour: die | hang_start | stubborn | shm.
"""

from __future__ import annotations

import contextlib
import http.server
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def _flag(name: str, default: str) -> str:
    for argument in sys.argv:
        if argument.startswith(f"--{name}="):
            return argument.partition("=")[2]
    return default


def _behaviour(role: str) -> str:
    once = os.environ.get(f"FAKE_{role.upper()}_ONCE", "")
    if once:
        with contextlib.suppress(FileNotFoundError):
            text = Path(once).read_text(encoding="utf-8").strip()
            os.unlink(once)
            return text
    return os.environ.get(f"FAKE_{role.upper()}", "")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        return


def main() -> None:
    role = sys.argv[1]
    behaviour = _behaviour(role)
    print("STAGE loading the model", flush=True)
    time.sleep(float(os.environ.get("FAKE_START_SECONDS", "0.1")))
    if behaviour == "die":
        print("a line of context", flush=True)
        print("error: no memory for the KV cache; lower --kv-cache-bytes", file=sys.stderr, flush=True)
        sys.exit(1)
    if behaviour == "hang_start":
        time.sleep(3600)
    if behaviour == "shm":
        with open(f"/dev/shm/deltaserve-fake-{os.getpid()}", "w+b") as file:
            file.truncate(4096)
            kept = mmap.mmap(file.fileno(), 4096)
        print(f"STAGE holding {len(kept)} bytes", flush=True)
    # A rank: a grandchild in the same session, and one that opened its own.
    for own_session in (False, True):
        subprocess.Popen(
            [
                sys.executable,
                "-S",
                "-c",
                "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)",
            ],
            start_new_session=own_session,
        )
    stop = threading.Event()
    if behaviour != "stubborn":
        signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(_flag("port", "0"))), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Path(os.environ["TMPDIR"], f"{role}-{os.getpid()}").touch()
    print(f"READY 127.0.0.1:{server.server_address[1]}", flush=True)
    stop.wait()


main()
