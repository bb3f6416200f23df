# SPDX-License-Identifier: Apache-2.0
"""`deltaserve verify`: the same prompts through a cluster and through one aggregated engine (docs/verify.md).

    prompts ─▶ aggregated engine (a process of its own, or its kept answers) ─▶ it ends
            ─▶ cluster starts ─▶ pass "handover", pass "auto" ─▶ cluster stops ─▶ judgement, JSON, exit code

Exit codes: 0 all is as it must be, 1 it is not or the run could not be made, 130 interrupted. Whatever happens, the
cluster that was started is stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from deltaserve.config import VerifyConfig
from deltaserve.model_check import ModelError, require_servable
from deltaserve.up import Cluster, ClusterError
from deltaserve.up.display import Lines
from deltaserve.verify import layouts, reference, report, rounding
from deltaserve.verify.client import Endpoint, EndpointError
from deltaserve.verify.compare import NEED_ANOTHER, Outcome
from deltaserve.verify.judge import Judge, Judgement, is_excused
from deltaserve.verify.prompts import Group, PromptError, make_groups
from deltaserve.verify.runner import run_pass

QUICK_LENGTHS = [1, 2, 17, 129, 500]
CACHE_VARIABLE = "DELTASERVE_REFERENCE_CACHE"
"""Names another folder for the kept answers of the aggregated engine."""


class OptionsDoNotFit(ValueError):
    """Options that contradict each other or the model; the message names them and the remedy."""


def run(config: VerifyConfig) -> int:
    """Verify; see the module's description for the exit codes."""
    with _signals():
        try:
            passed = _verify_all(config, lambda text: print(text, flush=True))
        except (
            ClusterError,
            EndpointError,
            ModelError,
            OptionsDoNotFit,
            PromptError,
            reference.ReferenceError,
            OSError,
        ) as error:
            for line in getattr(error, "log_tail", []):
                print(f"  | {line}", file=sys.stderr)
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
    return 0 if passed else 1


def _verify_all(config: VerifyConfig, say: Callable[[str], None]) -> bool:
    """Every layout that `layouts` names, or the one that the other fields give; whether all passed."""
    if not config.layouts:
        return verify(config, say).passed
    if config.endpoint:
        raise OptionsDoNotFit(
            "layouts: each starts a cluster of its own, so they cannot be used with --endpoint; leave one of them out"
        )
    try:
        chosen = layouts.parse(config.layouts)
    except ValueError as error:
        raise OptionsDoNotFit(str(error)) from error
    return layouts.verify_each(config, chosen, verify, say)


def verify(config: VerifyConfig, say: Callable[[str], None]) -> Judgement:
    """The whole run; `say` gets the lines for people. Writes `json_file` when it is named.

    Raises ClusterError, EndpointError, ModelError, OptionsDoNotFit, PromptError, ReferenceError, OSError.
    """
    began = time.monotonic()
    config = _settled(config)
    if config.json_file is not None:
        report.require_writable(config.json_file)
    require_servable(config.model)
    engine = reference.engine_config(config)
    if config.drafts:
        # A draft is accepted or replaced by draws of its own: the answer's distribution stays, its tokens do not.
        say(
            "drafts: greedy requests only, since a seed does not give the same tokens with drafts and without"
        )
    groups = _groups(config, greedy_only=reference.rounds(engine) or bool(config.drafts))
    expected = reference.answers(engine, groups, _cache(), say)
    placements = ["handover"] if config.damage != "none" else list(config.placements)
    tolerance, gap = config.tolerance, None
    excuse: Callable[[Outcome], bool] | None = None
    if reference.rounds(engine):
        noise = rounding.of_answers(expected)
        if not noise.plausible:
            raise reference.ReferenceError(
                f"the aggregated engine contradicts itself: its own batches move log-probs by up to "
                f"{noise.logprob:.1e} and the two likeliest tokens by up to {noise.gap:.1e}, more than rounding does; "
                "look at its kernels"
            )
        tolerance, gap = noise.tolerance(config.tolerance), noise.gap
        say(
            f"rounding: the engine's own batches move log-probs by up to {noise.logprob:.1e} and the distance of the "
            f"two likeliest tokens by up to {noise.gap:.1e}"
        )
        if config.damage == "none":
            excuse = partial(is_excused, tolerance=tolerance, gap=gap)
    judge = Judge(config.damage, tolerance, gap)
    with _endpoint(config, say) as endpoint:
        say(report.header())
        for placement in placements:
            for outcome in run_pass(endpoint, groups, expected, placement, excuse):
                say(report.line(outcome, judge.take(outcome), tolerance, gap))
    judgement = judge.close()
    for text in report.summary(judgement):
        say(text)
    if config.json_file is not None:
        report.write(config.json_file, report.document(judgement, _facts(config, time.monotonic() - began)))
    return judgement


def _settled(config: VerifyConfig) -> VerifyConfig:
    """The configuration with what `quick` and `damage` imply."""
    changes: dict[str, Any] = {}
    if config.quick and "lengths" not in config.model_fields_set:
        changes["lengths"] = QUICK_LENGTHS
    if config.damage != "none" and config.endpoint:
        raise OptionsDoNotFit(
            "damage: it is injected by the decode workers that this command starts, so it cannot be used with "
            "--endpoint; leave one of the two out"
        )
    if config.prefill < 1 and not config.endpoint and "handover" in config.placements:
        raise OptionsDoNotFit(
            "prefill: 0 workers can hand nothing over; start at least one, or use --placements auto"
        )
    if not config.placements:
        raise OptionsDoNotFit("placements: empty; give handover, auto or both")
    longest = config.max_model_len - config.max_tokens
    too_long = [length for length in config.lengths if length > longest]
    if too_long:
        raise OptionsDoNotFit(
            f"lengths: {max(too_long)} and {config.max_tokens} generated tokens do not fit "
            f"max_model_len {config.max_model_len}; raise --max-model-len or leave the length out"
        )
    return config.model_copy(update=changes)


def _groups(config: VerifyConfig, greedy_only: bool) -> list[Group]:
    # Where states are exchanged, no two requests in a row may have the same prompt: their states would be equal.
    # (Those that are sent at once have different prompts.)
    seeded = not config.quick and config.damage not in NEED_ANOTHER
    groups = make_groups(
        config.model,
        config.lengths,
        config.concurrency,
        config.max_tokens,
        seeded and not greedy_only,
        greedy_only,
    )
    if not groups:
        raise OptionsDoNotFit("lengths: empty, and --concurrency 1 adds none; give at least one length")
    longest = max(case.length for group in groups for case in group.cases)
    if longest + config.max_tokens > config.max_model_len:
        raise OptionsDoNotFit(
            f"max_model_len: {config.max_model_len} does not hold the prompts that are sent at once "
            f"({longest} tokens and {config.max_tokens} generated); raise it, or use --concurrency 1"
        )
    return groups


@contextlib.contextmanager
def _endpoint(config: VerifyConfig, say: Callable[[str], None]) -> Iterator[Endpoint]:
    """The running endpoint, or one of a cluster that lives as long as the context."""
    if config.endpoint:
        yield Endpoint(config.endpoint)
        return
    changes: dict[str, object] = {"verify": False} if config.damage == "swap" else {}
    cluster = Cluster(
        config.cluster(**changes), on_event=Lines(), on_folder=lambda folder: say(f"logs: {folder}")
    )
    with cluster:
        yield Endpoint(cluster.endpoint)


def _cache() -> Path | None:
    named = os.environ.get(CACHE_VARIABLE, "")
    return Path(named) if named else None


def _facts(config: VerifyConfig, seconds: float) -> dict[str, Any]:
    return {
        "model": str(config.model),
        "endpoint": config.endpoint or None,
        "prefill_tp": config.prefill_tp,
        "decode_tp": config.decode_tp,
        "decode_dcp": config.decode_dcp,
        "damage": config.damage,
        "seconds": round(seconds, 1),
    }


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM unwinds, so that the cluster stops; further ones must not disturb that."""
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
