# SPDX-License-Identifier: Apache-2.0
"""Run requests through one real engine, whole, then again from a history of their first tokens.

A process of its own (``python -m tests.unit.engine.resume_probe MODEL``). Prints one line of JSON: by name of the
request, [token, log-prob] of the whole answer, of the resumed one, and of one whose history was given as prompt.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from deltaserve.config import WorkerConfig
from deltaserve.engine.arguments import engine_args, set_environment
from deltaserve.engine.host import EngineHost
from tests.support.core_requests import core_request

TOKENS = 24
HISTORY = 9
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


class Engine:
    """An engine host, and what it has answered."""

    def __init__(self, model: Path) -> None:
        config = WorkerConfig(
            model=model, max_model_len=1024, max_num_batched_tokens=256, kv_cache_bytes=128 << 20
        )
        set_environment(config)
        from vllm.engine.arg_utils import AsyncEngineArgs

        vllm_config = AsyncEngineArgs(**engine_args(config, None)).create_engine_config()
        self._answers: dict[str, list[tuple[int, float]]] = {}
        self._ended: dict[str, threading.Event] = {}
        self.host = EngineHost(vllm_config, self._on_step, lambda reason: sys.exit(reason))
        self.host.start(300)

    def _on_step(self, batches: list[Any]) -> None:
        for output in (output for batch in batches for output in batch.outputs):
            rows = output.new_logprobs.logprobs[:, 0] if output.new_logprobs is not None else []
            answer = self._answers[output.request_id]
            answer.extend((int(t), float(p)) for t, p in zip(output.new_token_ids, rows, strict=True))
            if output.finish_reason is not None:
                self._ended[output.request_id].set()

    def run(self, name: str, prompt: list[int], params: Any, history: list[int]) -> list[tuple[int, float]]:
        """The answer of one request: (token, log-prob)."""
        request = core_request(name, prompt, params, salt=name)  # nobody's prefix cache helps
        self._answers[name], self._ended[name] = [], threading.Event()
        refused: list[str] = []
        self.host.add(request, lambda reason: (refused.append(reason), self._ended[name].set()), history)
        assert self._ended[name].wait(200), f"{name} did not end"
        assert not refused, refused
        return self._answers[name]


def requests() -> dict[str, Any]:
    """What a resumption must not change."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    base: dict[str, Any] = {"max_tokens": TOKENS, "logprobs": 0, "ignore_eos": True}
    grammar = StructuredOutputsParams(json=SCHEMA)
    grammar._backend = "xgrammar"
    return {
        "greedy": SamplingParams(temperature=0.0, **base),
        "penalties": SamplingParams(
            temperature=0.0, presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.3, **base
        ),
        "seeded": SamplingParams(temperature=1.3, top_p=0.95, seed=7, **base),
        "minimum": SamplingParams(temperature=0.0, max_tokens=TOKENS, min_tokens=16, logprobs=0),
        "grammar": SamplingParams(
            temperature=1.0, seed=3, max_tokens=40, logprobs=0, structured_outputs=grammar
        ),
    }


def main() -> None:
    model = Path(sys.argv[1])
    engine = Engine(model)
    prompt = next(p["prompt"] for p in json.loads((model / "prompts.json").read_text()) if p["length"] >= 400)
    found = {}
    for name, params in requests().items():
        whole = engine.run(f"{name}-whole", prompt, params.clone(), [])
        history = [token for token, _ in whole[:HISTORY]]
        resumed = engine.run(f"{name}-resumed", prompt, params.clone(), history)
        # The wrong way, for the negative control: what has been said becomes prompt.
        wrong = params.clone()
        wrong.max_tokens -= HISTORY
        appended = engine.run(f"{name}-appended", prompt + history, wrong, [])
        found[name] = {"whole": whole, "resumed": resumed, "appended": appended}
    print("PROBE " + json.dumps(found), flush=True)
    engine.host.stop(20)


if __name__ == "__main__":
    main()
