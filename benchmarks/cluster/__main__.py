# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cluster --out FOLDER [--stages A,B] [--seconds N]``: verify a machine's GPUs, stage by stage.

A stage that has passed with the same arguments is not run again: the same command goes on where an earlier one stopped.
Ends with a table; the exit code is 1 when a stage failed or was not run to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cluster.stages import STAGES, Stage, choose, command, model_of, row
from deltaserve.up.devices import visible_devices

STAGE_SECONDS = 540.0
"""What one stage may take."""


def asked_file(result: Path) -> Path:
    """Where the arguments of a result's run are kept."""
    return result.with_suffix(".arguments")


def is_known(result: Path, arguments: list[str]) -> bool:
    """Whether a run with these arguments has passed already."""
    try:
        asked = json.loads(asked_file(result).read_text())
        return bool(asked == arguments and json.loads(result.read_text())["passed"])
    except (OSError, ValueError, KeyError):
        return False


def run(stage: Stage, arguments: list[str], log: Path, seconds: float, answers: Path) -> str:
    """Run a stage; what became of it. Its lines go to `log`, and to the terminal those that are no start-up."""
    environment = {
        **os.environ,
        **stage.environment,
        "DELTASERVE_REFERENCE_CACHE": str(answers),
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltaserve", *arguments], stdout=output, stderr=output, env=environment
        )
        try:
            code = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.terminate()  # verify stops its cluster then
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if isinstance(error, KeyboardInterrupt):
                raise
            return f"stopped after {seconds:.0f} s; its lines are in {log}"
    return f"exit code {code} after {time.monotonic() - began:.0f} s"


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of results, logs and the reference's answers")
    parser.add_argument(
        "--stages", default="", help="names, comma-separated; all that the GPUs allow by default"
    )
    parser.add_argument("--list", action="store_true", help="name the stages and end")
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="folder of the model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what the engines run on")
    parser.add_argument("--seconds", type=float, default=STAGE_SECONDS, help="limit of one stage")
    parser.add_argument(
        "--budget", type=float, default=0.0, help="start no stage after so many seconds; 0: no limit"
    )
    parser.add_argument("verify", nargs="*", help="further options of `deltaserve verify`, after --")
    args = parser.parse_args()
    if args.list:
        for stage in STAGES:
            print(f"{stage.name:14} {stage.gpus} GPU  {stage.what}")
        return 0
    if args.out is None:
        parser.error("--out: name a folder for the results")
    try:
        stages = choose(args.stages, len(visible_devices()) if args.device == "cuda" else 2)
    except ValueError as error:
        parser.error(str(error))
    if not stages:
        parser.error("no GPU is visible; set CUDA_VISIBLE_DEVICES, or use --device cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for stage in stages:
        result = args.out / f"{stage.name}.json"
        model = model_of(stage, args.model, args.device, args.out / "models")
        arguments = command(stage, model, args.device, result, args.out / "run" / stage.name, args.verify)
        if is_known(result, arguments):
            print(f"{stage.name}: known", flush=True)
            continue
        result.unlink(missing_ok=True)
        if args.budget and time.monotonic() - began > args.budget:
            print(f"{stage.name}: no time left", flush=True)
            continue
        asked_file(result).write_text(json.dumps(arguments))
        ended = run(stage, arguments, args.out / f"{stage.name}.log", args.seconds, args.out / "answers")
        print(f"{stage.name}: {ended}", flush=True)
    print(f"\n{'stage':14} {'':42} {'ask':>4} {'store':>8}")
    lines = [row(stage, args.out / f"{stage.name}.json") for stage in stages]
    print("\n".join(lines))
    return 0 if all(line.endswith("passed") for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
