# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.drafts [--tokens 2000] [--prompts 3]``: long greedy answers with folded drafts.

Every mode is an engine of its own, one after the other, in fp32; all prompts are answered side by side in one batch.
Tokens must be those without drafts to the end, and log-probs within 1e-3. The control, in which one token too few is
folded, must be told apart. Exit code 1 when either is not so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.drafts.answers import LENGTHS, MODES, compare

CONTROL_TOKENS = 256


def run(mode: str, options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """What a mode's process wrote; None, with its last lines printed, when it failed."""
    result, log = folder / f"{mode}.json", folder / f"{mode}.log"
    tokens = min(options.tokens, CONTROL_TOKENS) if mode == "control" else options.tokens
    command = [sys.executable, "-m", "benchmarks.drafts.answers", mode, str(options.model), str(tokens)]
    with log.open("wb") as output:
        code = subprocess.run(
            [*command, str(options.prompts), str(result)], stdout=output, stderr=output, check=False
        ).returncode
    if code or not result.is_file():
        print(f"{mode}: exit code {code}", *log.read_text(errors="replace").splitlines()[-20:], sep="\n  | ")
        return None
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def line(mode: str, found: dict[str, Any], wanted: dict[str, Any]) -> tuple[str, bool]:
    """A mode's line of the table, and whether it is as it must be."""
    verdicts = compare(wanted, found)
    exact = all(v.exact for v in verdicts)
    alike = sum(v.tokens if v.first_difference is None else v.first_difference for v in verdicts)
    text = (
        f"{mode:14} {found['seconds']:7.1f} s  {alike:6} of {sum(v.tokens for v in verdicts)} tokens alike, "
    )
    text += f"log-probs within {max(v.logprob for v in verdicts):.1e}"
    if found["drafted"]:
        text += f", {found['accepted']:.0f} of {found['drafted']:.0f} drafts accepted"
        text += ", folded" if found["folded"] else ", a state a position"
    if mode == "control":
        return text + (": told apart" if not exact else ": NOT told apart"), not exact
    return text + ("" if exact else ": DIFFERENT"), exact


def main() -> int:
    """See the module's description."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drafts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of every answer")
    parser.add_argument("--prompts", type=int, default=3, help=f"how many prompts, at most {len(LENGTHS)}")
    parser.add_argument("--modes", default="ngram,mtp,control", help=f"some of {', '.join(MODES[1:])}")
    parser.add_argument("--model", type=Path, default=Path("models/demo"), help="folder of the model")
    parser.add_argument("--json", type=Path, help="write every mode's answers here")
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES[1:]]:
        parser.error(f"--modes: {', '.join(unknown)}: choose among {', '.join(MODES[1:])}")
    if not 0 < options.prompts <= len(LENGTHS):
        parser.error(f"--prompts: {options.prompts}: from 1 to {len(LENGTHS)}")
    good, records = True, {}
    with tempfile.TemporaryDirectory(prefix="deltaserve-drafts-") as folder:
        for mode in ("none", *modes):
            found = run(mode, options, Path(folder))
            if found is None:
                good = False
                if mode == "none":
                    break
                continue
            records[mode] = found
            if mode == "none":
                print(f"{mode:14} {found['seconds']:7.1f} s", flush=True)
                continue
            text, fine = line(mode, found, records["none"])
            print(text, flush=True)
            good = good and fine
    if options.json:
        options.json.write_text(json.dumps(records))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
