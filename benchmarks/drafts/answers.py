# SPDX-License-Identifier: Apache-2.0
"""One mode's engine and its answers, in a process of its own; and the comparison of two modes' answers.

``python -m benchmarks.drafts.answers MODE MODEL TOKENS PROMPTS FILE`` writes FILE as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LENGTHS = (116, 300, 700, 1000)
"""Prompt tokens of the first, second, ... prompt."""
BLOCK_BYTES = 128 << 20
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}
MODES = ("none", *DRAFTS, *(f"{name}-written" for name in DRAFTS), "control")
"""Without drafts; drafts folded at start; one state written a position; n-grams with one token too few folded."""
TOLERANCE = 1e-3
"""How far a log-prob may move, nats: another order of the same fp32 sums moves them by some 1e-5."""


@dataclass(frozen=True)
class Verdict:
    """What became of one prompt's answer."""

    tokens: int
    first_difference: int | None
    logprob: float
    """Largest difference of log-probs before the first token that differs, nats."""

    @property
    def exact(self) -> bool:
        """The same tokens, and log-probs within ``TOLERANCE``."""
        return self.first_difference is None and self.logprob <= TOLERANCE


def compare(wanted: dict[str, Any], found: dict[str, Any]) -> list[Verdict]:
    """Every prompt's answer against the wanted one, as far as the shorter of the two goes."""
    verdicts = []
    for (a, x), (b, y) in zip(wanted["answers"], found["answers"], strict=True):
        count = min(len(a), len(b))
        first = next((i for i in range(count) if a[i] != b[i]), None)
        until = count if first is None else first
        moved = max((abs(p - q) for p, q in zip(x[:until], y[:until], strict=True)), default=0.0)
        verdicts.append(Verdict(count, first, moved))
    return verdicts


def _options(mode: str, model: Path) -> dict[str, Any]:
    if mode == "none":
        return {}
    name = "ngram" if mode == "control" else mode.removesuffix("-written")
    draft = dict(DRAFTS[name])
    if name == "mtp":
        draft["model"] = str(model / "mtp")
    return {"speculative_config": draft, "use_replayssm": not mode.endswith("-written")}


def _lose_a_token(steps: Any) -> None:
    """The control: whoever accepted more than one token has one too few folded."""
    accept = steps.accept
    steps.accept = lambda counts: accept([max(1, n - 1) for n in counts])


def answer(mode: str, model: Path, tokens: int, prompts: int) -> dict[str, Any]:
    """Load the engine, ask all prompts at once; answers, seconds, counts of drafts and the cache's room."""
    from vllm import LLM, SamplingParams

    from deltaserve.engine.cpu import replay
    from deltaserve.verify.prompts import PromptMaker

    maker = PromptMaker(model)
    asked = [list(maker.make(length, length).tokens) for length in LENGTHS[:prompts]]
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=len(asked),
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=BLOCK_BYTES,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        distributed_executor_backend="uni",
        async_scheduling=False,
        disable_log_stats=False,
        **_options(mode, model),
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)
    if mode == "control":
        llm.generate([{"prompt_token_ids": asked[0][:8]}], SamplingParams(max_tokens=1), use_tqdm=False)
        _lose_a_token(replay.active())
    begin = time.monotonic()
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    seconds = time.monotonic() - begin
    answers = []
    for output in outputs:
        ids, chosen = list(output.outputs[0].token_ids), output.outputs[0].logprobs
        answers.append([ids, [chosen[i][token].logprob for i, token in enumerate(ids)]])
    counts = {
        m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")
    }
    config = llm.llm_engine.vllm_config
    return {
        "mode": mode,
        "seconds": seconds,
        "answers": answers,
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "folded": replay.wanted(config),
    }


if __name__ == "__main__":
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_WAIT_POLICY="PASSIVE",
        TORCHDYNAMO_DISABLE="1",
    )
    found = answer(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    Path(sys.argv[5]).write_text(json.dumps(found))
