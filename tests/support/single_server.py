# SPDX-License-Identifier: Apache-2.0
"""One vLLM OpenAI server with a cluster's model, settings and kernels: what a cluster's answers are compared with.

`python -m tests.support.single_server ENGINE FLAGS`, the JSON of a WorkerConfig and a JSON list of further flags of
vLLM's server, is vLLM's own server after the environment of a worker; `single_server` runs that.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deltaserve.config import ClusterConfig, WorkerConfig

ROOT = Path(__file__).parents[2]
START_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def single_server(cluster: ClusterConfig, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a server that answers until the end of the block. Raises RuntimeError when it does not start."""
    from deltaserve.verify.reference import engine_config

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = engine_config(cluster.model_copy(update={"model": cluster.model.resolve()}))
    arguments = [config.model_dump_json(), json.dumps([*flags, "--host=127.0.0.1", f"--port={port}"])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.single_server", *arguments],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            end = time.monotonic() + START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(
                        f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}"
                    )
                time.sleep(0.2)
            yield url
        finally:
            # Its engine is a process of its own, in the same session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def _main(engine: str, further: str) -> None:
    from deltaserve.engine.arguments import engine_args, set_environment

    # When the test is killed, so is this, and with it the engine.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    config = WorkerConfig.model_validate_json(engine)
    # The server talks to an engine in a process of its own; nothing else differs from a worker's environment.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    set_environment(config)
    sys.argv = ["api_server", *_flags(engine_args(config, None)), *json.loads(further)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
