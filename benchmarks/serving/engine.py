# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.serving.engine CONFIG FLAGS`: vLLM's own server, with the sizes of a worker's engine.

CONFIG is the JSON of a WorkerConfig, FLAGS a JSON list of further flags of vLLM's server, which win. It is stock vLLM
but for what the device needs to run such models at all (on a CPU this project's platform): no connector of ours, and
what workers choose for themselves (steps scheduled ahead, logits looked at for numbers) is left as vLLM has it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
from typing import Any

from deltaserve.config import WorkerConfig
from deltaserve.engine.arguments import engine_args, set_environment

OURS = ("async_scheduling", "disable_log_stats")
"""Engine arguments that are left to vLLM."""
_PR_SET_PDEATHSIG = 1


def server_flags(config: WorkerConfig) -> list[str]:
    """A worker's engine arguments as flags of vLLM's server."""
    flags = []
    for name, value in engine_args(config, None).items():
        if name in OURS:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict | list):
            flags.append(f"--{flag}={json.dumps(value)}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def main(arguments: list[str]) -> None:
    """Never returns while the server runs."""
    config = WorkerConfig.model_validate_json(arguments[0])
    further: list[Any] = json.loads(arguments[1])
    # When the benchmark is killed, so is this.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "0")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    set_environment(config)
    sys.argv = ["api_server", *server_flags(config), *map(str, further)]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
