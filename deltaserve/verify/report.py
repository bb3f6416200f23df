# SPDX-License-Identifier: Apache-2.0
"""What a run says: one line a request, then a summary; the same as a JSON document."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltaserve.verify.compare import Outcome
from deltaserve.verify.judge import Judgement, is_excused

_COLUMNS = f"{'request':>18}  {'placement':9}  {'store':>6}  {'local':>6}  {'computed':>8}  {'|dlogprob|':>10}  result"


def header() -> str:
    """The table's first line."""
    return _COLUMNS


def line(outcome: Outcome, problem: str, tolerance: float, gap: float | None = None) -> str:
    """One request: what came from where, the largest difference of log-probs, and what is wrong with it."""
    difference = outcome.difference
    if is_excused(outcome, tolerance, gap):
        result = f"token {difference.first_token} is rounding's (gap {difference.gap:.1e})"
    elif not difference.tokens_equal:
        result = f"DIFFERENT from token {difference.first_token}"
    elif not difference.within(tolerance):
        result = "DIFFERENT log-probs"
    else:
        result = "equal"
    parts = [
        f"{outcome.case.name:>18}",
        f"{outcome.placement:9}",
        f"{outcome.from_store:6}",
        f"{outcome.local:6}",
        f"{outcome.recomputed:8}",
        f"{difference.logprob:10.1e}",
        result,
    ]
    text = "  ".join(parts)
    route = outcome.route.split(" ")
    text += f", {' '.join(route[:2]) if route[0] == 'local' else route[0]}"
    if outcome.failure:
        text += f", {outcome.failure}"
    return f"{text}  <- {problem}" if problem else text


def summary(judgement: Judgement) -> list[str]:
    """Lines that end a run."""
    outcomes = judgement.outcomes
    lines = []
    for placement in dict.fromkeys(outcome.placement for outcome in outcomes):
        of_it = [outcome for outcome in outcomes if outcome.placement == placement]
        different = sum(map(judgement.different, of_it))
        lines.append(
            f"{placement}: {len(of_it)} requests, {different} different; prompt tokens: "
            f"{sum(o.from_store for o in of_it)} from the store, {sum(o.local for o in of_it)} cached, "
            f"{sum(o.recomputed for o in of_it)} computed; largest |dlogprob| {largest(of_it):.1e}"
        )
    asked = {o.case.name: o.recalled for o in outcomes if o.recalled is not None}
    if asked:
        lines.append(
            f"recall: the engine gives {sum(asked.values())} of {len(asked)} prompts the right answer"
        )
    kinds = Counter(o.failure for o in outcomes if o.failure)
    if kinds:
        lines.append("failures: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    lines.extend(judgement.findings)
    lines.append(("passed: " if judgement.passed else "FAILED: ") + judgement.sentence)
    return lines


def largest(outcomes: Sequence[Outcome]) -> float:
    """Largest difference of log-probs."""
    return max((outcome.difference.logprob for outcome in outcomes), default=0.0)


def document(judgement: Judgement, facts: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: `facts` about the run, then counts, then every request."""
    outcomes = judgement.outcomes
    return {
        **facts,
        "passed": judgement.passed,
        "result": judgement.sentence,
        "tolerance": judgement.tolerance,
        "requests": len(outcomes),
        "different": sum(map(judgement.different, outcomes)),
        "from_store": sum(outcome.from_store for outcome in outcomes),
        "excused": judgement.excused,
        "damaged": judgement.damaged,
        "found": judgement.found,
        "max_logprob_difference": _number(largest(outcomes)),
        "results": [
            {
                "name": outcome.case.name,
                "placement": outcome.placement,
                "mode": outcome.case.mode,
                "prompt_tokens": outcome.case.length,
                "from_store": outcome.from_store,
                "local": outcome.local,
                "recomputed": outcome.recomputed,
                "route": outcome.route,
                "failure": outcome.failure,
                "boundary_bytes": int(outcome.trace.get("boundary_bytes") or 0),
                "tokens_equal": outcome.difference.tokens_equal,
                "first_different_token": outcome.difference.first_token,
                "max_logprob_difference": _number(outcome.difference.logprob),
                "reference_gap": outcome.difference.gap,
                "equal": outcome.difference.within(judgement.tolerance),
                "recalled": outcome.recalled,
                "problem": problem,
            }
            for outcome, problem in zip(outcomes, judgement.problems, strict=True)
        ],
    }


def require_writable(path: Path) -> None:
    """Raises OSError now rather than after minutes of work when `write` could not write there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the document. Raises OSError as the file system does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _number(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
