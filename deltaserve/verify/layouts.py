# SPDX-License-Identifier: Apache-2.0
"""Layouts: how many ranks either role spreads over. `--layouts` verifies several, each with a cluster of its own.

A layout is written `prefill TP-decode TP-decode DCP`, e.g. 1-2-2. The reference stays one engine on one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaserve.config import VerifyConfig
from deltaserve.up.errors import ClusterError
from deltaserve.verify.client import EndpointError
from deltaserve.verify.judge import Judgement
from deltaserve.verify.report import largest

EVERY = "all"


@dataclass(frozen=True)
class Layout:
    """Ranks of either role."""

    prefill_tp: int
    decode_tp: int
    decode_dcp: int

    def __str__(self) -> str:
        return f"{self.prefill_tp}-{self.decode_tp}-{self.decode_dcp}"

    def applied(self, config: VerifyConfig) -> VerifyConfig:
        """`config` for this layout alone. The JSON file gets the layout's name before its suffix."""
        changes: dict[str, object] = {
            "prefill_tp": self.prefill_tp,
            "decode_tp": self.decode_tp,
            "decode_dcp": self.decode_dcp,
            "layouts": [],
        }
        if config.json_file is not None:
            file = config.json_file
            changes["json_file"] = file.with_name(f"{file.stem}-{self}{file.suffix}")
        if config.run_dir is not None:
            changes["run_dir"] = config.run_dir / str(self)
        return config.model_copy(update=changes)


ALL = tuple(
    Layout(prefill_tp, decode_tp, decode_dcp)
    for prefill_tp in (1, 2)
    for decode_tp, decode_dcp in ((1, 1), (2, 1), (2, 2))
)
"""Every way to spread each role over at most two ranks."""


def parse(names: Sequence[str]) -> list[Layout]:
    """Layouts by name; `all` stands for ALL. Raises ValueError that names the one that cannot be read."""
    layouts: list[Layout] = []
    for name in names:
        if name == EVERY:
            layouts += ALL
            continue
        parts = name.split("-")
        if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(
                f"layouts: {name!r} is no layout; write prefill TP, decode TP and decode DCP as in 2-2-1, or all"
            )
        layout = Layout(*map(int, parts))
        if layout.decode_tp % layout.decode_dcp:
            raise ValueError(f"layouts: {name}: decode DCP does not divide decode TP; choose a divisor of it")
        layouts.append(layout)
    return list(dict.fromkeys(layouts))


def verify_each(
    config: VerifyConfig,
    layouts: Sequence[Layout],
    verify: Callable[[VerifyConfig, Callable[[str], None]], Judgement],
    say: Callable[[str], None],
) -> bool:
    """Verify one layout after the other; whether all passed. A table of them ends it.

    A layout whose cluster does not start or breaks has failed like one whose answers differ: the others still run.
    Raises what else `verify` raises.
    """
    rows = [_COLUMNS]
    passed = True
    for layout in layouts:
        say(f"layout {layout}: prefill TP, decode TP, decode DCP")
        began = time.monotonic()
        try:
            judgement = verify(layout.applied(config), say)
        except (ClusterError, EndpointError) as error:
            for text in getattr(error, "log_tail", []):
                say(f"  | {text}")
            say(f"error: {error}")
            passed = False
            result = (0, 0, 0, 0, 0.0, f"FAILED: {error}")
        else:
            passed = passed and judgement.passed
            result = (*_counts(judgement), "passed" if judgement.passed else f"FAILED: {judgement.sentence}")
        rows.append(_row(layout, result, time.monotonic() - began))
    for row in rows:
        say(row)
    return passed


_COLUMNS = (
    f"{'layout':>8}  {'requests':>8}  {'different':>9}  {'prompt tokens':>13}  {'from store':>10}  {'|dlogprob|':>10}  "
    f"{'seconds':>7}  result"
)


def _counts(judgement: Judgement) -> tuple[int, int, int, int, float]:
    """Requests, those that differ, their prompt tokens, those from the store, largest difference of log-probs."""
    outcomes = judgement.outcomes
    return (
        len(outcomes),
        sum(map(judgement.different, outcomes)),
        sum(outcome.case.length for outcome in outcomes),
        sum(outcome.from_store for outcome in outcomes),
        largest(outcomes),
    )


def _row(layout: Layout, result: tuple[int, int, int, int, float, str], seconds: float) -> str:
    requests, different, tokens, from_store, logprob, text = result
    return (
        f"{layout!s:>8}  {requests:8}  {different:9}  {tokens:13}  {from_store:10}  {logprob:10.1e}  "
        f"{seconds:7.0f}  {text}"
    )
