# SPDX-License-Identifier: Apache-2.0
"""What rounding alone may change, where arithmetic is narrow: measured on the reference, before a cluster is judged.

Sums of bfloat16 products depend on how a batch is cut: an engine that computes a prompt at once and the same engine
that goes on from a cached part of it, alone or beside others, give log-probs that differ, and where two tokens are
nearly as likely, another token. So the aggregated engine answers every greedy request three times: as the cluster is
asked; once more, alone, going on from its own prefix cache; and all requests at once. What moves between these, behind
the first answer's tokens all the way, is its noise:

logprob   the largest change of a chosen token's log-prob
gap       the largest change of the distance between the two likeliest tokens; where another token was chosen, the sum
          of both distances, because that is how far the two have moved

A cluster's token that differs is excused where the reference's own gap is at most `gap`, and every such token is
counted. The rest of that answer is compared all the same: it is asked for again after the reference's token. Log-probs
may differ by twice `logprob`: the cluster is a further draw of the same noise.

In float32 none of this applies: tokens must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from deltaserve.verify.compare import Answer, compare
from deltaserve.verify.prompts import Case, Prompt

LOGPROB_FACTOR = 2.0
MOST = (1.0, 2.0)
"""Of log-prob and gap, nats: an engine that moves more than that by itself is no reference. Logits of some tens have
steps of an eighth in bfloat16, and a token whose two best experts are nearly tied goes through another one: over 8,000
tokens of the demonstration model on one H200 the largest moves were .55 and 1.6."""


@dataclass(frozen=True)
class Noise:
    """What an engine's own batches change, nats."""

    logprob: float = 0.0
    gap: float = 0.0

    def tolerance(self, configured: float) -> float:
        """Largest difference of log-probs that is no difference."""
        return max(configured, LOGPROB_FACTOR * self.logprob)

    @property
    def plausible(self) -> bool:
        """Whether rounding alone can be the cause; a NaN is infinite noise."""
        return self.logprob <= MOST[0] and self.gap <= MOST[1]


def between(first: Answer, other: Answer) -> Noise:
    """Noise of two answers of one engine to one request, up to where they choose different tokens."""
    difference = compare(first, other)
    compared = len(first.tokens) if difference.first_token is None else difference.first_token
    gaps = [abs(a - b) for a, b in zip(first.gaps[:compared], other.gaps[:compared], strict=True)]
    if difference.first_token is not None and difference.first_token < len(first.gaps):
        gaps.append(first.gaps[difference.first_token] + other.gaps[difference.first_token])
    return Noise(difference.logprob, max(gaps, default=0.0))


def rest(case: Case, answer: Answer, done: int) -> tuple[Case, Answer]:
    """The request for what follows the first `done` tokens of an answer, and that part of the answer."""
    left = Answer(answer.tokens[done:], answer.logprobs[done:], answer.gaps[done:])
    prompt = Prompt(case.prompt.tokens + answer.tokens[:done])
    return replace(case, name=f"{case.name} +{done}", prompt=prompt, max_tokens=len(left.tokens)), left


def largest(noises: Iterable[Noise]) -> Noise:
    """The largest of each kind."""
    found = list(noises)
    return Noise(
        max((noise.logprob for noise in found), default=0.0), max((noise.gap for noise in found), default=0.0)
    )


def of_answers(groups: Sequence[Sequence[Answer]]) -> Noise:
    """The noise that has been measured with the reference's answers."""
    return largest(Noise(*answer.noise) for group in groups for answer in group)
