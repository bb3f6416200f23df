# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.cluster --out FOLDER [--stages A,B] [--seconds N]``: verify a machine's GPUs, stage by stage.

A stage that has written its result is not run again: the same command goes on where an earlier one stopped. Ends with a
table; the exit code is 1 when a stage failed or was not run to its end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.cluster.stages import STAGES, Stage, choose, command, row

STAGE_SECONDS = 540.0
"""What one stage may take."""


def visible_gpus() -> int:
    """Devices that CUDA may use: CUDA_VISIBLE_DEVICES, or all of the machine's."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return len([part for part in named.split(",") if part.strip()])
    return len([card for card in Path("/dev").glob("nvidia[0-9]*") if card.name[6:].isdigit()])


def run(stage: Stage, arguments: list[str], log: Path, seconds: float, answers: Path) -> str:
    """Run a stage; what became of it. Its lines go to `log`, and to the terminal those that are no start-up."""
    environment = {**os.environ, "DELTASERVE_REFERENCE_CACHE": str(answers), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltaserve", *arguments], stdout=output, stderr=output, env=environment
        )
        try:
            code = process.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            process.terminate()  # verify stops its cluster then
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
        stages = choose(args.stages, visible_gpus() if args.device == "cuda" else 2)
    except ValueError as error:
        parser.error(str(error))
    if not stages:
        parser.error("no GPU is visible; set CUDA_VISIBLE_DEVICES, or use --device cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for stage in stages:
        result = args.out / f"{stage.name}.json"
        if result.is_file():
            print(f"{stage.name}: known", flush=True)
            continue
        if args.budget and time.monotonic() - began > args.budget:
            print(f"{stage.name}: no time left", flush=True)
            continue
        arguments = command(
            stage, args.model, args.device, result, args.out / "run" / stage.name, args.verify
        )
        ended = run(stage, arguments, args.out / f"{stage.name}.log", args.seconds, args.out / "answers")
        print(f"{stage.name}: {ended}", flush=True)
    print(f"\n{'stage':14} {'':42} {'ask':>4} {'store':>8}")
    lines = [row(stage, args.out / f"{stage.name}.json") for stage in stages]
    print("\n".join(lines))
    return 0 if all(line.endswith("passed") for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
