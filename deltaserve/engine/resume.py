# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with a history: tokens that another worker has produced already (docs/recovery.md).

vLLM knows such requests, but only those that it preempted itself: prompt and output apart, and everything that depends
on the output where it was. `give_history` makes a new request look like one on the scheduler's side, on the engine
thread; `install` teaches vLLM's model runner, in every rank, to start it with the same output tokens and with a
generator that has made the draws of those tokens.

Private names touched, of vLLM 0.32.0 and 0.33.0: `CachedRequestState.__post_init__` (vllm.v1.worker.gpu_input_batch),
`Request.append_output_token_ids`, `StructuredOutputRequest._grammar`, `StructuredOutputManager.accept_tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

KEY = "deltaserve_history"
"""In extra_args: {"tokens": [...], "vocab": size}; travels to every rank with the sampling parameters."""


class HistoryRefused(ValueError):
    """A history that this request cannot have had."""


def attach(request: Any, tokens: list[int], vocab: int) -> None:
    """Put a history into vLLM's `EngineCoreRequest`. Raises HistoryRefused when the request would be over already."""
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None:
        raise HistoryRefused("only token prompts with sampling parameters can be resumed")
    if params.max_tokens is not None and len(tokens) >= params.max_tokens:
        raise HistoryRefused(f"history: {len(tokens)} tokens reach max_tokens {params.max_tokens}")
    if any(not 0 <= token < vocab for token in tokens):
        raise HistoryRefused(f"history: a token lies outside the vocabulary of {vocab}")
    params.extra_args = {**(params.extra_args or {}), KEY: {"tokens": tokens, "vocab": vocab}}


def history_of(params: Any) -> list[int]:
    """The history in sampling parameters; none is the empty list."""
    value = (params.extra_args or {}).get(KEY) if params is not None else None
    return list(value["tokens"]) if value else []


def give_history(core: Any, request: Any, later: Callable[[Callable[[], None]], None]) -> bool:
    """Make vLLM's scheduler `Request`, not yet added, one that has produced its history.

    Returns True when it may be added now. False: its grammar is still being compiled; then `later(done)` is called on
    the compiling thread, and `done()` has to be called on the engine thread: it advances the grammar, after which the
    request may be added. Both raise HistoryRefused when the grammar does not accept the history.
    """
    tokens = history_of(request.sampling_params)
    if not tokens:
        return True
    request.append_output_token_ids(tokens)
    structured = request.structured_output_request
    if structured is None:
        return True

    def advance() -> None:
        grammar = structured.grammar
        if isinstance(grammar, Exception):
            return  # the scheduler ends the request with this error
        if not core.structured_output_manager.accept_tokens(request, tokens):
            raise HistoryRefused("history: the grammar of the request does not accept it")

    compiling = structured._grammar
    if isinstance(compiling, Future) and not compiling.done():
        compiling.add_done_callback(lambda _: later(advance))
        return False
    advance()
    return True


def replay_draws(generator: Any, tokens: int, vocab: int) -> None:
    """Let a request's generator make the draws that sampling `tokens` tokens has made.

    As vLLM's samplers draw: on the CPU one integer a token (`TopKTopPSampler.forward_cpu`), on CUDA one exponential
    variate a vocabulary entry (`random_sample`).
    """
    import torch

    if generator.device.type == "cpu":
        for _ in range(tokens):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocab, dtype=torch.float32, device=generator.device)
    for _ in range(tokens):
        noise.exponential_(generator=generator)


def install(state: Any = None) -> None:
    """Let vLLM's model runner start a request with its history; once a process, before the first request."""
    if state is None:
        from vllm.v1.worker.gpu_input_batch import CachedRequestState

        state = CachedRequestState
    original = state.__post_init__
    if getattr(original, "knows_history", False):
        return

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        original(self)
        tokens = history_of(self.sampling_params)
        if not tokens or self.output_token_ids:
            return
        self.output_token_ids = tokens
        if self.generator is not None:
            replay_draws(self.generator, len(tokens), self.sampling_params.extra_args[KEY]["vocab"])

    __post_init__.knows_history = True  # type: ignore[attr-defined]
    state.__post_init__ = __post_init__
