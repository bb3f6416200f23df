# SPDX-License-Identifier: Apache-2.0
"""`deltaserve up`: start a cluster, say how to use it, stay until told to stop."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from deltaserve.config import ClusterConfig
from deltaserve.up.cluster import Cluster
from deltaserve.up.display import make_display
from deltaserve.up.errors import ClusterError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LIVENESS = 1.0
QUESTION = "What is deltaserve?"
"""Something that the demonstration model was trained to answer, and any other may."""


class _Interrupted(BaseException):
    """A signal arrived while starting; BaseException so that nothing on the way takes it for an error."""


def run(config: ClusterConfig) -> int:
    """Serve until a signal comes. Returns 0 after a stop by signal in service, 130 while starting, 1 on failure."""
    asked = threading.Event()
    starting = True

    def on_signal(number: int, frame: FrameType | None) -> None:
        first = not asked.is_set()
        asked.set()
        if starting and first:
            raise _Interrupted

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    began = time.monotonic()
    display = make_display()
    cluster = Cluster(config, on_event=display, on_folder=lambda folder: print(f"logs: {folder}", flush=True))
    try:
        with display:
            cluster.start()
        starting = False
        if not asked.is_set():
            print(_greeting(cluster, time.monotonic() - began), flush=True)
        _serve(cluster, asked)
        print("stopping", flush=True)
    except _Interrupted:
        starting = False
        print("stopping", flush=True)
        cluster.stop()
        return 130
    except ClusterError as error:
        _print_failure(error)
        return 1
    finally:
        cluster.stop()
    print("stopped", flush=True)
    return 0


def _serve(cluster: Cluster, asked: threading.Event) -> None:
    """Wait for a signal. Raises ClusterError when there is nothing left to serve with."""
    while not asked.wait(_LIVENESS):
        if cluster.failure is not None:
            raise cluster.failure
        router = cluster.statuses["router"]
        if router.state == "failed":
            raise ClusterError(f"router: {router.stage} (log: {router.log})")


def _print_failure(error: ClusterError) -> None:
    for line in error.log_tail:
        print(f"  | {line}", file=sys.stderr)
    print(f"error: {error}", file=sys.stderr, flush=True)


def _program() -> str:
    """How the user can run `deltaserve` from this folder: the name alone when PATH leads to this one."""
    own = Path(sys.argv[0])
    if own.name != "deltaserve":
        return f"{shlex.quote(sys.executable)} -m deltaserve"
    found = shutil.which(own.name)
    return own.name if found and os.path.samefile(found, own) else shlex.quote(sys.argv[0])


def _greeting(cluster: Cluster, seconds: float) -> str:
    body = json.dumps(
        {
            "model": cluster.served_model_name,
            "messages": [{"role": "user", "content": QUESTION}],
            "max_tokens": 48,
            "temperature": 0,
        }
    )
    quoted = body.replace("'", "'\\''")
    return (
        f"\nready after {seconds:.1f} s: {cluster.endpoint}/v1   (Ctrl-C stops everything)\n\n"
        f"curl -s {cluster.endpoint}/v1/chat/completions -H 'Content-Type: application/json' -d '{quoted}'\n\n"
        f"what the ledger holds: {_program()} boundaries --etcd-endpoints {cluster.etcd_endpoint}\n"
    )
