# SPDX-License-Identifier: Apache-2.0
"""What every placement policy sees, answers and hears."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from router.placement import LocalReason

PREFIX_UNIT = 256
"""Tokens: prefixes are compared at multiples of it."""
MAX_UNITS = 512
"""Longest prefix that is compared, in units."""
_SEED = secrets.randbits(61)
STATE_TOKEN_BYTES = 64 << 10
"""State held for others counts as work: so many bytes as one token."""
_TOKENS_PER_BYTE = 1 / STATE_TOKEN_BYTES


class Worker(Protocol):
    """A worker that work can be given to."""

    outstanding: int
    """Tokens given to it and not yet done with."""
    state_bytes: int
    """Bytes of boundaries that its running requests hold."""

    @property
    def others(self) -> int:
        """Tokens that other routers have given it."""

    @property
    def worker_id(self) -> str: ...

    @property
    def running(self) -> int:
        """Requests on it."""


W = TypeVar("W", bound=Worker)


@dataclass(slots=True)
class Prompt:
    """A request as a policy sees it."""

    tokens: Sequence[int]
    cache_salt: str = ""
    answer_tokens: int = 0
    state_bytes: int = 0
    """Bytes of its boundary; 0: not known."""
    _digests: list[int] = field(default_factory=list, repr=False)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    @property
    def units(self) -> int:
        """How many of its prefixes are compared."""
        return min(len(self.tokens) // PREFIX_UNIT, MAX_UNITS)

    def prefix(self, number: int) -> int:
        """Digest of its first `number` units, with the salt: 64 bits, good in this process only.

        Computed as far as it is asked for, and once: most prompts are known to nobody beyond a short beginning. Two
        prompts with the same digest would cost a detour and nothing else, so it need not be a cryptographic one;
        Python's own is seeded here, so that nobody can look for such prompts.
        """
        digests = self._digests
        while len(digests) < number:
            end = (len(digests) + 1) * PREFIX_UNIT
            before = digests[-1] if digests else hash((_SEED, self.cache_salt))
            digests.append(hash((before, hash(tuple(self.tokens[end - PREFIX_UNIT : end])))))
        return digests[number - 1]

    @property
    def prefixes(self) -> Sequence[int]:
        """Digests of its prefixes of 1, 2, 3 ... units."""
        if units := self.units:
            self.prefix(units)
        return self._digests

    def followed_by(self, answer: Sequence[int]) -> Prompt:
        """The prompt with its answer, as a worker holds it at the end; what is digested of it is not digested again."""
        return Prompt([*self.tokens, *answer], self.cache_salt, _digests=self._digests.copy())


@dataclass(frozen=True, slots=True)
class Choice(Generic[W]):
    """Where a request goes. `prefill` None: its decode worker computes the prompt."""

    decode: W
    prefill: W | None
    why: str
    """For people: in traces and headers."""
    reason: LocalReason = "no_prefill_worker"
    """For the counter, when `prefill` is None."""


class Observer:
    """Hears what came of decisions; by default nothing is learned from it."""

    def prefilled(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        """A prefill worker has published the prompt; `alone`: it had nothing else to do meanwhile."""

    def loaded(self, nbytes: int, seconds: float) -> None:
        """A boundary of so many bytes has been loaded."""

    def computed(self, worker_id: str, prompt: Prompt, computed: int, seconds: float, alone: bool) -> None:
        """A decode worker has computed the prompt itself and given the first token."""

    def ended(self, worker_id: str, prompt: Prompt, answer: Sequence[int]) -> None:
        """A decode worker has ended a request; it holds prompt and answer now."""

    def gone(self, worker_ids: Collection[str]) -> None:
        """These workers have left, with what they held."""


class Policy(Observer, ABC):
    """Decides, and learns from what comes of it. Belongs to one event loop; nothing here may block."""

    name = ""

    def __init__(self, handover_min_tokens: int) -> None:
        self.handover_min_tokens = handover_min_tokens

    @abstractmethod
    def choose(
        self, prompt: Prompt, decodes: Sequence[W], prefills: Sequence[W], forced: bool = False
    ) -> Choice[W] | None:
        """Choose among workers that take requests; None without a decode worker.

        `forced`: whether to hand over is decided already; `prefills` are then the ones to choose from, or none.
        """


def works(workers: Sequence[Worker]) -> list[float]:
    """What each worker has to do, in tokens.

    Lists rather than a function of a worker, here and in `lowest`: a thousand workers are priced within a millisecond.
    """
    return [worker.outstanding + worker.others + worker.state_bytes * _TOKENS_PER_BYTE for worker in workers]


def held_as_work(state_bytes: int) -> int:
    """Tokens that state held for others counts as."""
    return state_bytes // STATE_TOKEN_BYTES


def lowest(workers: Sequence[W], prices: Sequence[float]) -> tuple[W | None, float]:
    """The worker with the lowest price, and that; ties go to the smaller id. (None, inf) among none."""
    if not workers:
        return None, inf
    price = min(prices)
    if prices.count(price) == 1:
        return workers[prices.index(price)], price
    ties = (worker for worker, other in zip(workers, prices, strict=True) if other == price)
    return min(ties, key=lambda worker: worker.worker_id), price
