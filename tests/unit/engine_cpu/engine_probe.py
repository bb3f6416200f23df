# SPDX-License-Identifier: Apache-2.0
"""Run recall prompts through one real engine, again from its prefix cache, and again after its KDA states are lost.

A process of its own (``python -m tests.unit.engine_cpu.engine_probe MODEL``): an engine leaves its settings in the
process that it ran in. Prints one line of JSON: for each round, [token, log-prob, cached tokens] per prompt.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.probes import ENGINE_HERE


def lose_states(worker: Any) -> int:
    """Zero both state tensors of every KDA layer of ``worker``; return how many layers there were."""
    layers = worker.model_runner.compilation_config.static_forward_context.values()
    caches = [getattr(layer, "kv_cache", None) for layer in layers]
    states = [cache for cache in caches if isinstance(cache, (tuple, list)) and len(cache) == 2]
    for tensor in itertools.chain.from_iterable(states):
        tensor.zero_()
    return len(states)


def main() -> None:
    os.environ.update(ENGINE_HERE)
    from vllm import LLM, SamplingParams

    model = Path(sys.argv[1])
    prompts = [p["prompt"] for p in json.loads((model / "prompts.json").read_text()) if p["length"] <= 500]
    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=128 << 20,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        distributed_executor_backend="uni",
        additional_config={"kda_prefill_checkpoint": "--checkpoint" in sys.argv},
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=1)

    def run() -> list[tuple[int, float, int]]:
        answers = []
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False):
            token = output.outputs[0].token_ids[0]
            answers.append((token, output.outputs[0].logprobs[0][token].logprob, output.num_cached_tokens))
        return answers

    rounds = {"fresh": run(), "cached": run()}
    layers = llm.collective_rpc(lose_states)
    rounds["lost"] = run()
    print("PROBE " + json.dumps({"layers": layers, "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
