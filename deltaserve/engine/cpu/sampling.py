# SPDX-License-Identifier: Apache-2.0
"""Seeded sampling of prompts that are computed in chunks.

Every chunk of a prompt samples a token, and vLLM throws away all but the last chunk's. For a request with a seed the
generator must then stand where it stood before, else the answer would depend on how the prompt was cut. vLLM rewinds
the generator's offset; a CPU generator has none (it raises, and takes the engine with it), so its state is kept across
a draw that will be thrown away, and vLLM's own rewinding finds no generator.
"""

from __future__ import annotations

import functools
from typing import Any

from deltaserve.engine.cpu import vllm_internals as internals


def install(runner: Any = internals.CPUModelRunner) -> None:
    """Teach vLLM's CPU model runner to keep generators still while it samples what it throws away."""
    sample, bookkeeping = runner._sample, runner._bookkeeping_sync
    if getattr(sample, "keeps_generators", False):
        return

    @functools.wraps(sample)  # keeps the signature, which is checked
    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = [(generator, generator.get_state()) for generator in _discarded(self)]
        output = sample(self, *args, **kwargs)
        for generator, state in kept:
            generator.set_state(state)
        return output

    @functools.wraps(bookkeeping)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators = self.input_batch.generators
        self.input_batch.generators = {}
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    _sample.keeps_generators = True  # type: ignore[attr-defined]
    internals.replace(runner, "_sample", _sample)
    internals.replace(runner, "_bookkeeping_sync", _bookkeeping_sync)


def _discarded(runner: Any) -> list[Any]:
    """Generators of the requests whose sample of this step vLLM will throw away."""
    batch = runner.input_batch
    if not batch.generators:
        return []
    mask = runner.discard_request_mask.np[: batch.num_reqs]
    return [generator for index, generator in batch.generators.items() if mask[index]]
