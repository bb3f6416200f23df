# SPDX-License-Identifier: Apache-2.0
"""The price of state: a prompt is handed over when moving its state costs less than computing it where it is needed.

With N tokens, of which a prefill worker p is believed to hold w_p and a decode worker d w_d, and s bytes of state:

    hand over    queue(p) + prefill(N - w_p) + move(s) + queue(d)
    here         queue(d) + local(N - w_d) * (1 + INTERFERENCE * running(d))

prefill, local and move are learned (costs.py): seconds over tokens computed, and over bytes loaded. A prompt computed
on a decode worker stops the answers that run there, which is why it is dearer there by a share for each of them; a
prefill worker has nobody to stop. The bytes come from the geometry; what is not known yet is priced by the prior, and
until a decode worker has computed a prompt alone it is taken to be as fast as a prefill worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Choice, Prompt, W, lowest, works
from router.policy.costs import Line
from router.policy.prefix import PrefixAware
from router.policy.warmth import warmest

INTERFERENCE = 0.5
"""How much dearer a second of prefill is on a decode worker for each answer that it interrupts."""


class Price(PrefixAware):
    """See the module's description."""

    name = "price"

    def __init__(self, handover_min_tokens: int) -> None:
        super().__init__(handover_min_tokens)
        # Priors: a machine that computes 2,000 tokens a second and moves 1 GB/s, and hands over at about the limit.
        self.prefill = Line(0.02, 0.0005, 1000)
        self.local = Line(0.02, 0.0005, 1000)
        self.move = Line(0.0005 * INTERFERENCE * handover_min_tokens, 1e-9, 1e8)

    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        if not decodes:
            return None
        local = self.local if self.local.learned or not self.prefill.learned else self.prefill
        warm, length, slope = self.warmth.tokens(prompt), prompt.length, local.slope
        busy, own = works(decodes), local(length)
        costs = [
            tokens * slope + own * (1 + INTERFERENCE * worker.running)
            for tokens, worker in zip(busy, decodes, strict=True)
        ]
        for number, held in warmest(decodes, warm):
            costs[number] -= slope * held * (1 + INTERFERENCE * decodes[number].running)
        decode, cost_here = lowest(decodes, costs)
        # Who reads a boundary needs nothing of the prompt: the store brings all of it.
        reader, queued = lowest(decodes, busy)
        assert decode is not None
        assert reader is not None
        if not prefills:
            return Choice(decode, None, "no prefill worker")
        away, all_of_it = self.prefill.slope, self.prefill(length)
        costs = [tokens * away + all_of_it for tokens in works(prefills)]
        for number, held in warmest(prefills, warm):
            costs[number] -= away * held
        prefill, cost_there = lowest(prefills, costs)
        cost_there += self.move(prompt.state_bytes) + queued * slope
        if not forced and cost_here <= cost_there:
            why = f"here {cost_here:.3f} s, handed over {cost_there:.3f} s"
            return Choice(decode, None, why, "cheaper_here")
        return Choice(reader, prefill, f"handed over {cost_there:.3f} s, here {cost_here:.3f} s")

    def prefilled(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        super().prefilled(worker_id, prompt, computed, seconds, alone)
        if alone:
            self.prefill.learn(computed, seconds)

    def computed(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        super().computed(worker_id, prompt, computed, seconds, alone)
        if alone:
            self.local.learn(computed, seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        self.move.learn(nbytes, seconds)
