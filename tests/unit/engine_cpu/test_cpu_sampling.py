# SPDX-License-Identifier: Apache-2.0
"""A seeded request's answer does not depend on how many chunks its prompt took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deltaserve.engine.cpu import sampling


def runner_class() -> Any:
    """A runner that draws and rewinds as vLLM's does, for one seeded request."""

    class Runner:
        def __init__(self, seed: int) -> None:
            self.input_batch = SimpleNamespace(
                generators={0: torch.Generator().manual_seed(seed)}, num_reqs=1
            )
            self.discard_request_mask = SimpleNamespace(np=np.zeros(4, dtype=bool))

        def _sample(self, logits: Any, spec_decode_metadata: Any) -> float:
            return float(torch.rand(1, generator=self.input_batch.generators[0]))

        def _bookkeeping_sync(self, *args: Any) -> None:
            for index in np.nonzero(self.discard_request_mask.np)[0]:
                generator = self.input_batch.generators.get(int(index))
                if generator is not None:
                    generator.set_offset(generator.get_offset() - 4)

        def step(self, discard: bool) -> float:
            self.discard_request_mask.np[0] = discard
            drawn = self._sample(None, None)
            self._bookkeeping_sync()
            return drawn

    return Runner


def test_discarded_draws_leave_the_generator_where_it_was() -> None:
    kind = runner_class()
    sampling.install(kind)
    whole, chunked = kind(seed=5), kind(seed=5)
    for _ in range(3):
        chunked.step(discard=True)
    assert [whole.step(False) for _ in range(4)] == [chunked.step(False) for _ in range(4)]
    assert chunked.input_batch.generators, "hidden only while vLLM keeps its books"


def test_kept_draws_move_it() -> None:
    kind = runner_class()
    sampling.install(kind)
    runner = kind(seed=5)
    assert runner.step(False) != runner.step(False)


def test_control_without_it_a_chunked_seeded_prompt_ends_the_engine() -> None:
    runner = runner_class()(seed=5)
    runner.step(False)
    with pytest.raises(RuntimeError, match="offset"):
        runner.step(True)


def test_installing_twice_wraps_once() -> None:
    kind = runner_class()
    sampling.install(kind)
    once = kind._sample
    sampling.install(kind)
    assert kind._sample is once
