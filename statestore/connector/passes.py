# SPDX-License-Identifier: Apache-2.0
"""The forward passes in which one request's tokens were computed: what proves that no token was computed twice.

A pass is an engine step that computes tokens of the request. A prompt that is longer than what a step takes has
several; in all of them together every token is computed once, unless the request was preempted, or a second pass was
needed for a state from the middle of the first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Passes:
    """Of one request, until its state was published."""

    steps: int = 0
    """Forward passes with tokens of the request."""
    computed: int = 0
    """Tokens that they computed, all together."""
    again: int = 0
    """How many of those an earlier pass had computed already."""
    end: int = 0
    """One past the last token that has been computed."""

    def step(self, first: int, tokens: int) -> None:
        """A pass computes the tokens [first, first + tokens)."""
        if tokens <= 0:
            return
        self.steps += 1
        self.computed += tokens
        self.again += max(0, min(self.end, first + tokens) - first)
        self.end = max(self.end, first + tokens)
