# SPDX-License-Identifier: Apache-2.0
"""Least outstanding work: no memory, no learning."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.base import Choice, Policy, Prompt, W, lowest, works


class Least(Policy):
    """See the module's description."""

    name = "least"

    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        decode, _ = lowest(decodes, works(decodes))
        if decode is None:
            return None
        if not forced and prompt.length < self.handover_min_tokens:
            why = f"{prompt.length} tokens are fewer than {self.handover_min_tokens}"
            return Choice(decode, None, why, "short_prompt")
        prefill, _ = lowest(prefills, works(prefills))
        return Choice(decode, prefill, "least outstanding work")
