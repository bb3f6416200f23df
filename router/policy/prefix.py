# SPDX-License-Identifier: Apache-2.0
"""Prefix-aware: work goes where the least is left to do, counting what a worker holds of the prompt already."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from router.policy.base import Choice, Policy, Prompt, W, lowest, works
from router.policy.warmth import Warmth, warmest


class PrefixAware(Policy):
    """See the module's description. A warm worker that is busy loses against a cold one that is idle."""

    name = "prefix"

    def __init__(self, handover_min_tokens: int) -> None:
        super().__init__(handover_min_tokens)
        self.warmth = Warmth()

    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        warm = self.warmth.tokens(prompt)

        def left(workers: Sequence[W]) -> list[float]:
            prices = works(workers)
            for number, held in warmest(workers, warm):
                prices[number] -= held
            return prices

        decode, _ = lowest(decodes, left(decodes))
        if decode is None:
            return None
        here = prompt.length - warm.get(decode.worker_id, 0)
        if not forced and here < self.handover_min_tokens:
            why = f"{decode.worker_id} lacks {here} of {prompt.length} tokens"
            return Choice(decode, None, why, "warm_prefix" if here < prompt.length else "short_prompt")
        prefill, _ = lowest(prefills, left(prefills))
        if prefill is None:
            return Choice(decode, None, "no prefill worker")
        there = prompt.length - warm.get(prefill.worker_id, 0)
        return Choice(decode, prefill, f"{prefill.worker_id} lacks {there} of {prompt.length} tokens")

    def prefilled(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        self.warmth.add(worker_id, prompt)

    def computed(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        self.warmth.add(worker_id, prompt)

    def ended(self, worker_id: str, prompt: Prompt, answer: Sequence[int]) -> None:
        self.warmth.add(worker_id, prompt.followed_by(answer))

    def gone(self, worker_ids: Collection[str]) -> None:
        self.warmth.forget(worker_ids)
