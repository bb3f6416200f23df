# SPDX-License-Identifier: Apache-2.0
"""Who answers the measured prompts: the torch model, one vLLM engine, or an OpenAI-compatible endpoint.

Each engine has `answer(cases)`, greedy token ids for every case, and `logprobs(prompts)`, the first token that it
chooses after each prompt with its log-probability.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from models.demo_training import checkpoint, measure, tokenizer
from models.demo_training.cases import Case

MAX_MODEL_LEN = 17408


def one_of_each_first(cases: Sequence[Case]) -> list[int]:
    """An order of the cases in which those that share a context come late, when its prefix is cached."""
    seen: dict[tuple[int, ...], int] = {}
    rank = []
    for case in cases:
        rank.append(seen.get(case.tokens, 0))
        seen[case.tokens] = rank[-1] + 1
    return sorted(range(len(cases)), key=lambda i: rank[i])


class Engine(Protocol):
    """The seam that `evaluate.py` measures through."""

    def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """Greedy token ids, as many as the right answer has."""

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
        """The first token chosen after each prompt, and its log-probability."""


class TorchEngine:
    """The training code's own model; bfloat16 on a GPU, float32 on a CPU."""

    def __init__(self, folder: Path, device: str) -> None:
        from models.demo_training import kda

        self.device = torch.device(device)
        if self.device.type == "cuda":
            from models.demo_training.kernels import prepare_gpu

            kda.use_kernel(prepare_gpu(lambda what, value: None))
        text, head = checkpoint.load(folder)
        tokens = tokenizer.load(folder)
        vocabulary = tokenizer.vocabulary(tokens)
        self.subject = measure.Subject(text.to(self.device), head.to(self.device), tokens, vocabulary)

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """See `Engine`; the right tokens before each answer token are given."""
        with self.autocast():
            return measure.predictions(self.subject, cases)

    @torch.no_grad()
    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
        """See `Engine`."""
        found = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)], device=self.device)
            with self.autocast():
                last = self.subject.text(ids).logits[0, -1].float().log_softmax(-1)
            token = int(last.argmax())
            found.append((token, float(last[token])))
        return found


class VllmEngine:
    """One vLLM engine in this process."""

    def __init__(self, folder: Path, dtype: str, options: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        defaults: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "seed": 0,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
        }
        self.llm = LLM(**(defaults | options))

    def _generate(
        self, prompts: Sequence[Sequence[int]], lengths: Sequence[int], logprobs: int | None
    ) -> Any:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=logprobs, detokenize=False)
            for n in lengths
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(inputs, params, use_tqdm=False)

    def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """See `Engine`."""
        order = one_of_each_first(cases)
        prompts, lengths = [cases[i].prompt for i in order], [cases[i].stop - cases[i].start for i in order]
        outputs = self._generate(prompts, lengths, None)
        found = {i: list(output.outputs[0].token_ids) for i, output in zip(order, outputs, strict=True)}
        return [found[i] for i in range(len(cases))]

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
        """See `Engine`."""
        found = []
        for output in self._generate(prompts, [1] * len(prompts), 1):
            token = output.outputs[0].token_ids[0]
            found.append((token, output.outputs[0].logprobs[0][token].logprob))
        return found

    def accepted(self) -> dict[str, float]:
        """Counts of drafts, drafted and accepted tokens since the start (all zero without speculation)."""
        names = {"spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"}
        counts = dict.fromkeys(names, 0.0)
        for metric in self.llm.get_metrics():
            name = metric.name.split(":")[-1]
            if name in names:
                counts[name] = float(metric.value)
        return counts


class EndpointEngine:
    """An OpenAI-compatible completions endpoint that takes token ids and returns them (vLLM's does)."""

    def __init__(self, url: str, concurrency: int, timeout_s: float) -> None:
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.pool = ThreadPoolExecutor(concurrency)
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=timeout_s) as reply:
            self.model: str = json.load(reply)["data"][0]["id"]

    def _complete(self, prompt: Sequence[int], length: int) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": length,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                choice: dict[str, Any] = json.load(reply)["choices"][0]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.url} answered {error.code}: {error.read()[:500]!r}") from error
        if not choice.get("token_ids"):
            raise RuntimeError(
                f"{self.url} returned no token_ids; the endpoint must support return_token_ids"
            )
        return choice

    def answer(self, cases: Sequence[Case]) -> list[list[int]]:
        """See `Engine`."""
        work = {
            i: self.pool.submit(self._complete, cases[i].prompt, cases[i].stop - cases[i].start)
            for i in one_of_each_first(cases)
        }
        return [list(work[i].result()["token_ids"]) for i in range(len(cases))]

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, float]]:
        """See `Engine`."""
        work = [self.pool.submit(self._complete, prompt, 1) for prompt in prompts]
        return [(w.result()["token_ids"][0], w.result()["logprobs"]["token_logprobs"][0]) for w in work]
