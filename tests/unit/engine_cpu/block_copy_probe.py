# SPDX-License-Identifier: Apache-2.0
"""Ask one real engine every prompt twice, the second time from a prefix that ends inside a block; then without the fix.

And one prompt twice at once, after a shorter one that it continues: each of the two gets a copy of the block in which
the shorter one ends.

A process of its own (``python -m tests.unit.engine_cpu.block_copy_probe MODEL TP DRAFT``): an engine leaves its
settings in the process that it ran in. Prints one line of JSON: the block size, and for each round and prompt
[tokens, log-probs, cached tokens].
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.probes import ENGINE_HERE

LENGTHS = (60, 100, 130, 250, 260)
"""Prompt tokens. Hits come in units of 16 (one less with a draft), and most of these end inside a block of 128."""


TOGETHER, HISTORY = 400, 232
"""Prompt tokens: of the prompt asked twice at once, and of what was asked before."""


def use_vllms_copies(worker: Any) -> None:
    """Take this project's wrapper off the rank of ``worker``."""
    from vllm.v1.worker import gpu_model_runner, utils

    gpu_model_runner.copy_kv_cache_blocks_inplace = utils.copy_kv_cache_blocks_inplace


def main() -> None:
    os.environ.update(ENGINE_HERE, TORCHDYNAMO_DISABLE="1")
    from vllm import LLM, SamplingParams
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    from deltaserve.verify.prompts import PromptMaker

    model, ranks, draft = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    options: dict[str, Any] = {"distributed_executor_backend": "mp" if ranks > 1 else "uni"}
    if draft:
        options["speculative_config"] = {
            "method": "mtp",
            "model": str(model / "mtp"),
            "num_speculative_tokens": draft,
        }
    llm = LLM(
        model=str(model),
        dtype="float32",
        tensor_parallel_size=ranks,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=128 << 20,
        enable_prefix_caching=True,
        prefix_match_unit=16,
        async_scheduling=False,
        **options,
    )
    maker = PromptMaker(model)
    # A salt each: what two prompts have in common would be a hit in the first round already.
    prompts = [
        {"prompt_token_ids": list(maker.make(length).tokens), "cache_salt": str(length)} for length in LENGTHS
    ]
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)

    def at_once(asked: list[Any]) -> list[tuple[list[int], list[float], int]]:
        answers = []
        for output in llm.generate(asked, sampling, use_tqdm=False):
            tokens, chosen = list(output.outputs[0].token_ids), output.outputs[0].logprobs
            logprobs = [chosen[i][token].logprob for i, token in enumerate(tokens)]
            answers.append((tokens, logprobs, output.num_cached_tokens))
        return answers

    def run() -> list[tuple[list[int], list[float], int]]:
        return [answer for prompt in prompts for answer in at_once([prompt])]

    def together(salt: str) -> list[tuple[list[int], list[float], int]]:
        tokens = list(maker.make(TOGETHER).tokens)
        at_once([{"prompt_token_ids": tokens[:HISTORY], "cache_salt": salt}])
        return at_once([{"prompt_token_ids": tokens, "cache_salt": salt}] * 2)

    rounds = {"fresh": run(), "repeated": run()}
    rounds["alone"] = at_once(
        [{"prompt_token_ids": list(maker.make(TOGETHER).tokens), "cache_salt": "alone"}]
    )
    rounds["together"] = together("together")
    waiting = FullAttentionManager.get_num_blocks_to_allocate
    FullAttentionManager.get_num_blocks_to_allocate = waiting.__wrapped__
    rounds["control_together"] = together("control")
    FullAttentionManager.get_num_blocks_to_allocate = waiting
    llm.collective_rpc(use_vllms_copies)
    llm.reset_prefix_cache()
    rounds["control_fresh"] = run()
    rounds["control_repeated"] = run()
    block_size = llm.llm_engine.vllm_config.cache_config.block_size
    print("PROBE " + json.dumps({"block_size": block_size, "rounds": rounds}), flush=True)


if __name__ == "__main__":
    main()
