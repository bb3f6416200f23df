# SPDX-License-Identifier: Apache-2.0
"""Ask one engine without drafts and one that drafts and folds at start the same; then break the second in four ways.

The second engine is also interrupted between two windows: all its requests are preempted, and one is aborted.

A process of its own (``python -m tests.unit.engine_cpu.draft_probe MODEL``): an engine leaves its settings in the
process that it ran in. Prints one line of JSON: for each round, for each prompt [tokens, log-probs, cached tokens];
the counters of the drafts, and the speculative blocks of each group of the cache.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.probes import ENGINE_HERE

LENGTHS = (116, 244)
"""Prompt tokens; each answer crosses the end of a block of 128."""
TOKENS, CONTINUED, NEXT = 40, 36, 8
"""Answer tokens, how many of them the next turn's prompt contains (the block's end lies inside), and tokens of the next
turn's answer."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

Answer = tuple[list[int], list[float], int]


def make(model: Path, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=96 << 20,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        prefix_cache_retention_interval=128,
        distributed_executor_backend="uni",
        async_scheduling=False,
        disable_log_stats=False,
        **options,
    )


def sampling(**fields: Any) -> Any:
    from vllm import SamplingParams

    greedy = {"temperature": 0, "max_tokens": TOKENS, "logprobs": 1, "ignore_eos": True}
    return SamplingParams(**{**greedy, **fields})


def given(prompts: list[list[int]], salt: str) -> list[dict[str, Any]]:
    """A salt each: what two prompts have in common would be a hit."""
    return [{"prompt_token_ids": p, "cache_salt": f"{salt} {i}"} for i, p in enumerate(prompts)]


def answer(output: Any) -> Answer:
    tokens, chosen = list(output.outputs[0].token_ids), output.outputs[0].logprobs
    return tokens, [chosen[i][token].logprob for i, token in enumerate(tokens)], output.num_cached_tokens


def ask(llm: Any, prompts: list[list[int]], salt: str, **fields: Any) -> list[Answer]:
    return [answer(o) for o in llm.generate(given(prompts, salt), sampling(**fields), use_tqdm=False)]


def rounds(llm: Any, prompts: list[list[int]]) -> dict[str, list[Answer]]:
    """All that drafts must not change."""
    from vllm.sampling_params import StructuredOutputsParams

    found = {"greedy": ask(llm, prompts, "greedy")}
    longer = [p + a[0][:CONTINUED] for p, a in zip(prompts, found["greedy"], strict=True)][: len(LENGTHS)]
    found["continued"] = ask(llm, longer, "greedy", max_tokens=NEXT)
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.3}
    found["penalties"] = ask(llm, prompts[1:], "penalties", max_tokens=24, **penalties)
    grammar = StructuredOutputsParams(json=SCHEMA)
    found["grammar"] = ask(
        llm, prompts[:1], "grammar", max_tokens=32, ignore_eos=False, structured_outputs=grammar
    )
    return found


def interrupted(llm: Any, prompts: list[list[int]]) -> list[Answer]:
    """The greedy answers of all but the first prompt, whose request is aborted; the others are preempted before."""
    engine = llm.llm_engine
    for i, prompt in enumerate(given(prompts, "interrupted")):
        engine.add_request(f"i{i}", prompt, sampling())
    for _ in range(8):
        engine.step()
    engine.reset_prefix_cache(reset_running_requests=True)
    for _ in range(4):
        engine.step()
    engine.abort_request(["i0"], internal=False)
    answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = answer(output)
    return [answers[f"i{i}"] for i in range(1, len(prompts))]


@contextmanager
def broken(llm: Any, what: str) -> Iterator[None]:
    """The drafting engine without one of the things that make it exact."""
    from vllm.v1.sample import rejection_sampler

    from deltaserve.engine.cpu import replay

    steps: Any = replay.active()
    accept, sample = steps.accept, rejection_sampler.rejection_sample

    def take_every_draft(drafts: Any, counts: list[int], *args: Any, **kwargs: Any) -> Any:
        out = sample(drafts, counts, *args, **kwargs)
        bonus, at = args[4], 0
        for row, n in enumerate(counts):
            out[row, :n] = drafts[at : at + n]
            out[row, n] = bonus[row, 0]
            at += n
        return out

    if what == "acceptance":
        rejection_sampler.rejection_sample = take_every_draft
    elif what == "accepted count":
        steps.accept = lambda counts: accept([max(1, n - 1) for n in counts])
    elif what == "boundary":
        steps.boundary = lambda cuts: None
    elif what == "move":
        steps.move = lambda moves: [steps._pending.pop(steps.requests[row], 0) for row, _, _ in moves]
    try:
        yield
    finally:
        rejection_sampler.rejection_sample = sample
        for name in ("accept", "boundary", "move"):
            steps.__dict__.pop(name, None)


def counters(llm: Any) -> dict[str, float]:
    wanted = (
        "vllm:num_preemptions",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
    )
    return {m.name: m.value for m in llm.get_metrics() if m.name in wanted}


def main() -> None:
    os.environ.update(ENGINE_HERE, OMP_WAIT_POLICY="PASSIVE", TORCHDYNAMO_DISABLE="1")
    from deltaserve.verify.prompts import PromptMaker

    model = Path(sys.argv[1])
    maker = PromptMaker(model)
    prompts = [list(maker.make(length).tokens) for length in LENGTHS]
    # Eight tokens again and again: the model goes on repeating, so that drafts are accepted.
    prompts.append([prompts[0][0], *prompts[1][10:18] * 14])
    found: dict[str, Any] = {"plain": rounds(make(model), prompts)}
    # N-grams: with a draft model a hit ends a match unit earlier, and no hit would end where a window left the state.
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 2,
    }
    llm = make(model, speculative_config=drafts, use_replayssm=True)
    found["drafted"] = rounds(llm, prompts)
    found["interrupted"] = interrupted(llm, prompts)
    found["counters"] = counters(llm)
    for what in ("acceptance", "accepted count", "boundary", "move"):
        with broken(llm, what):
            answers = ask(llm, prompts[:2], what)
            longer = [p + a[0][:CONTINUED] for p, a in zip(prompts, found["plain"]["greedy"], strict=True)][
                :2
            ]
            if what == "boundary":
                answers = ask(llm, longer, what, max_tokens=NEXT)
            found[f"without {what}"] = answers
    groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    found["speculative_blocks"] = [getattr(g.kv_cache_spec, "num_speculative_blocks", 0) for g in groups]
    print("PROBE " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
