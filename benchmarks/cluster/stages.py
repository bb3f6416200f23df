# SPDX-License-Identifier: Apache-2.0
"""The stages: one run of `deltaserve verify` each, short enough to be run one at a time.

Stages of one family (`short`, `long`) ask the same questions, so the aggregated engine answers them once: its answers
are kept in the output folder and serve the stages that follow, also after an interruption.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORT = ["--quick", "--lengths", "1,2,17,129,500,2000,8000"]
"""Every kind of short prompt, alone and eight at once."""
LONG = ["--lengths", "", "--max-tokens", "2000", "--concurrency", "4"]
"""Four answers of 2,000 tokens at once: one by one the reference alone takes minutes."""
TWO = ["--lengths", "100,1000", "--max-tokens", "2000", "--concurrency", "1"]
"""Two of them: the aggregated engine answers each several times over, to measure its rounding."""
WIDE = [
    "--lengths",
    "16000,32000",
    "--max-model-len",
    "32768",
    "--concurrency",
    "1",
    "--max-tokens",
    "4",
]
"""Prompts of 16K and 32K tokens with short answers: such a stage takes the start of two engines and little more."""
HANDOVER = ["--placements", "handover"]
EVERY = [
    "--quick",
    "--lengths",
    "1,2,17,129,1000,8000,16000,32000",
    "--max-model-len",
    "32768",
    *HANDOVER,
]
"""1 to 32K tokens alone, and eight prompts at once."""
SOME = ["--quick", "--lengths", "1,17,129,2000,8000", *HANDOVER]
FP8 = ["--kv-cache-dtype", "fp8"]


@dataclass(frozen=True)
class Stage:
    """One run."""

    name: str
    what: str
    options: tuple[str, ...]
    gpus: int = 1
    drafts: bool = False
    """Both roles draft with the model's own head (MTP), states not written a draft."""
    replay: str = ""
    """Drafts are folded by this project's kernels (docs/replay_ssm.md) instead of vLLM's: "1" at the start of every
    step, "ring" when 16 tokens have gathered."""
    preset: str = ""
    """Model with random weights (`models.random_model`) that is made for it; empty: the model that is asked for."""

    @property
    def environment(self) -> dict[str, str]:
        """What the stage's processes find in their environment."""
        return {"DELTASERVE_REPLAY_SSM": self.replay} if self.replay else {}


def _layout(prefill: int, decode: int, dcp: int) -> list[str]:
    return ["--prefill-tp", str(prefill), "--decode-tp", str(decode), "--decode-dcp", str(dcp)]


STAGES = (
    Stage("short-1-1-1", "TP1 to TP1", (*SHORT,)),
    Stage("short-drafts", "TP1 to TP1, MTP drafts, use_replayssm", (*SHORT,), drafts=True),
    Stage("short-replay", "the same, drafts folded (ReplaySSM)", (*SHORT,), drafts=True, replay="1"),
    Stage("short-ring", "the same, folded by 16 tokens (ring)", (*SHORT,), drafts=True, replay="ring"),
    Stage("damage", "every kind of damage before a load", ("--quick", "--damage", "each")),
    Stage("short-2-2-1", "TP2 to TP2", (*SHORT, *_layout(2, 2, 1)), 2),
    Stage("short-1-2-2", "TP1 to TP2 + DCP2", (*SHORT, *_layout(1, 2, 2)), 2),
    Stage("short-2-2-2", "TP2 to TP2 + DCP2", (*SHORT, *_layout(2, 2, 2)), 2),
    Stage("short-2-1-1", "TP2 to TP1", (*SHORT, *_layout(2, 1, 1)), 2),
    Stage("wide-1-1-1", "prompts of 16K and 32K tokens", (*WIDE, *HANDOVER)),
    Stage("k3", "K3 form, 24 heads, 1 to 32K tokens", (*EVERY,), preset="k3"),
    Stage("k3-files", "K3's published configuration", (*SOME,), preset="k3-published"),
    Stage("k3-files-mtp", "the same with its own draft head", (*SOME,), drafts=True, preset="k3-published"),
    Stage("k3-fp8", "K3 form, fp8 cache", (*SOME, *FP8), preset="k3"),
    Stage("linear", "Kimi-Linear form, 1 to 32K tokens", (*EVERY,), preset="kimi-linear"),
    Stage("linear-files", "Kimi-Linear's published configuration", (*SOME,), preset="kimi-linear-published"),
    Stage("linear-fp8", "Kimi-Linear form, fp8 cache", (*SOME, *FP8), preset="kimi-linear"),
    Stage("k3-2-2-1", "K3 form, TP2 to TP2", (*EVERY, *_layout(2, 2, 1)), 2, preset="k3"),
    Stage("k3-2-2-2", "K3 form, TP2 to TP2 + DCP2", (*EVERY, *_layout(2, 2, 2)), 2, preset="k3"),
    Stage(
        "linear-2-2-2",
        "Kimi-Linear form, TP2, TP2 + DCP2",
        (*SOME, *_layout(2, 2, 2)),
        2,
        preset="kimi-linear",
    ),
    Stage("long-1-1-1", "2,000 tokens, TP1 to TP1", (*LONG, *HANDOVER)),
    Stage("long-drafts", "2,000 tokens, MTP drafts, use_replayssm", (*LONG, *HANDOVER), drafts=True),
    Stage(
        "long-replay", "2,000 tokens, drafts folded (ReplaySSM)", (*TWO, *HANDOVER), drafts=True, replay="1"
    ),
    Stage(
        "long-ring", "2,000 tokens, folded by 16 tokens (ring)", (*TWO, *HANDOVER), drafts=True, replay="ring"
    ),
    Stage("long-2-2-1", "2,000 tokens, TP2 to TP2", (*LONG, *HANDOVER, *_layout(2, 2, 1)), 2),
    Stage("long-2-2-2", "2,000 tokens, TP2 to TP2 + DCP2", (*LONG, *HANDOVER, *_layout(2, 2, 2)), 2),
)


def choose(names: str, gpus: int) -> list[Stage]:
    """Stages by name, or every one that `gpus` devices can run. Raises ValueError naming what is unknown."""
    known = {stage.name: stage for stage in STAGES}
    if not names:
        return [stage for stage in STAGES if stage.gpus <= gpus]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"--stages: {', '.join(unknown)} is no stage; choose among {', '.join(known)}")
    short = [name for name in wanted if known[name].gpus > gpus]
    if short:
        raise ValueError(f"--stages: {', '.join(short)} takes 2 GPUs, {gpus} is visible; leave it out")
    return [known[name] for name in wanted]


def model_of(stage: Stage, model: Path, device: str, folder: Path) -> Path:
    """The folder of a stage's model: `model`, or one with random weights below `folder`, made if it is not there."""
    if not stage.preset:
        return model
    preset = stage.preset if device == "cuda" else f"{stage.preset}-small"
    made = folder / preset
    if not (made / "tokenizer_config.json").is_file():  # written last
        from models.random_model import PRESETS, write_random_model

        write_random_model(made, **PRESETS[preset])
    return made


def command(
    stage: Stage, model: Path, device: str, result: Path, run_dir: Path, extra: list[str]
) -> list[str]:
    """Arguments of `python -m deltaserve` for a stage; `extra` goes last, so that it wins."""
    arguments = ["verify", "--model", str(model), "--device", device, *stage.options]
    if device == "cuda":
        arguments += ["--kv-cache-bytes", str(4 << 30), "--max-num-batched-tokens", "8192"]
    if stage.drafts:
        draft: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
        if not stage.preset:  # a published K3 holds its head itself
            draft["model"] = str(model / "mtp")
        more: dict[str, Any] = {"speculative_config": draft}
        if device == "cuda":
            more["use_replayssm"] = True
        options = json.dumps({"extra_args": more})
        arguments += ["--prefill-options", options, "--decode-options", options]
    return [*arguments, "--run-dir", str(run_dir), "--json", str(result), *extra]


def row(stage: Stage, result: Path) -> str:
    """The table's line of a stage, from what its run wrote."""
    if not result.is_file():
        return f"{stage.name:14} {stage.what:42} not run to its end"
    found = json.loads(result.read_text())
    store = f"{found['from_store']:>8}"
    state = "passed" if found["passed"] else "FAILED"
    if found["damaged"]:
        differs = f"{found['found']} of {found['damaged']} found"
    else:
        differs = f"{found['different']} different, {found.get('excused', 0)} excused"
    return f"{stage.name:14} {stage.what:42} {found['requests']:>4} {store} {differs:28} {state}"
