# SPDX-License-Identifier: Apache-2.0
"""What every placement policy sees, answers and hears."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Protocol, TypeVar

from router.placement import LocalReason

PREFIX_UNIT = 256
"""Tokens: prefixes are compared at multiples of it."""
MAX_UNITS = 512
"""Longest prefix that is compared, in units."""
STATE_TOKEN_BYTES = 64 << 10
"""State held for others counts as work: so many bytes as one token."""


class Worker(Protocol):
    """A worker that work can be given to."""

    outstanding: int
    """Tokens given to it and not yet done with."""
    state_bytes: int
    """Bytes of boundaries that its running requests hold."""

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
    _prefixes: tuple[bytes, ...] | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens)

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """Digests of its prefixes of 1, 2, 3 ... units, with the salt; computed once."""
        if self._prefixes is None:
            words = array("I", self.tokens[: MAX_UNITS * PREFIX_UNIT])
            running = hashlib.blake2b(self.cache_salt.encode(), digest_size=16)
            found = []
            for end in range(PREFIX_UNIT, len(words) + 1, PREFIX_UNIT):
                running.update(words[end - PREFIX_UNIT : end].tobytes())
                found.append(running.digest())
            self._prefixes = tuple(found)
        return self._prefixes


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


def work(worker: Worker) -> float:
    """What a worker has to do, in tokens."""
    return worker.outstanding + worker.state_bytes / STATE_TOKEN_BYTES


def lowest(workers: Sequence[W], price: Callable[[W], float]) -> tuple[W | None, float]:
    """The worker with the lowest price, and that; ties go to the smaller id. (None, inf) among none."""
    best, best_price = None, inf
    for worker in workers:
        found = price(worker)
        if found < best_price or (found == best_price and best and worker.worker_id < best.worker_id):
            best, best_price = worker, found
    return best, best_price
