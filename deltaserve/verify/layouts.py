# SPDX-License-Identifier: Apache-2.0
"""Layouts: how many ranks either role spreads over. `--layouts` verifies several, each with a cluster of its own.

A layout is written `prefill TP-decode TP-decode DCP`, e.g. 1-2-2. The reference stays one engine on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deltaserve.config import VerifyConfig
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
    """Verify one layout after the other; whether all passed. A table of them ends it. Raises what `verify` raises."""
    lines, passed = [], True
    for layout in layouts:
        say(f"layout {layout}: prefill TP, decode TP, decode DCP")
        judgement = verify(layout.applied(config), say)
        passed = passed and judgement.passed
        lines.append(
            f"{layout!s:>8}  {'passed' if judgement.passed else 'FAILED'}: {judgement.sentence}; "
            f"{sum(outcome.from_store for outcome in judgement.outcomes)} tokens from the store, "
            f"largest |dlogprob| {largest(judgement.outcomes):.1e}"
        )
    for line in lines:
        say(line)
    return passed
