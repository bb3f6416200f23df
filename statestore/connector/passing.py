# SPDX-License-Identifier: Apache-2.0
"""Which parts of a step's state are final while the step still computes (docs/layer_streams.md).

    engine's thread    Layers.begin ─▶ passed, passed, ... ─▶ end         hooks behind the model's layers
    an I/O thread      Passing.wait(mark) ── as the fences come ──▶ gathers what lies before that mark

A mark is a place in the step: the end of each group of KDA layers, the last MLA layer. Its fence is a point in the
stream in which the layers run, recorded there and then. Whether the step as a whole went as was thought, its end says.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from statestore.geometry import Geometry
from statestore.reshard import head_bytes

log = logging.getLogger(__name__)

GROUPS_VARIABLE = "DELTASERVE_LAYER_GROUPS"
"""Groups of KDA layers that leave by themselves; 1: nothing leaves before its step has ended."""

MOST_GROUPS = 4
LEAST_FRAGMENT = 256 << 10
"""Bytes of a head in one group, unless the variable says how many groups there are: a fragment has a price of its
own."""

LEAST_TOKENS = 256
"""Of a request in one step, for its publish to be streamed: a shorter step is over before a group has left."""


class StepFailed(RuntimeError):
    """The step whose state was to be published did not end, or not as its layers said."""


def layer_groups(geometry: Geometry, device_proves: bool) -> tuple[range, ...]:
    """KDA layers, by their place in `geometry.kda_layers`, that leave together. None: nothing leaves before its step
    has ended.

    `device_proves`: kernels copy the caches. Raises ValueError for a value of the variable that is not a number of at
    least 1.
    """
    layers, chosen = len(geometry.kda_layers), os.environ.get(GROUPS_VARIABLE, "")
    if chosen:
        if not chosen.isdecimal() or int(chosen) < 1:
            raise ValueError(
                f"{GROUPS_VARIABLE}={chosen!r} is not a number of at least 1; 1 takes all layers together"
            )
        count = int(chosen)
    else:
        count = max(1, min(MOST_GROUPS, head_bytes(geometry) // LEAST_FRAGMENT))
    # What may be changed after its layer has run: states with drafts, folded or copied back behind the step.
    if geometry.num_spec or chosen == "1" or not (chosen or device_proves):
        return ()
    count = min(count, layers)
    edges = [layers * number // count for number in range(count + 1)]
    return tuple(range(low, high) for low, high in pairwise(edges))


class Passing:
    """One publish's view of the step that computes its state. The engine's thread tells, an I/O thread waits."""

    def __init__(self, patience: float, groups: Sequence[range] = ()) -> None:
        """`patience`: seconds from the first wait until the waits give up; `groups`: more than one, where parts may
        leave before the end."""
        self.groups = tuple(groups)
        self._patience, self._deadline = patience, 0.0
        self._changed = threading.Condition()
        self._fences: dict[int, Any] = {}
        self._ended = False
        self._last: Any = None
        self._error: StepFailed | None = None

    @property
    def rows(self) -> int:
        """The mark of the last MLA layer; those of the groups are their numbers."""
        return len(self.groups)

    # ---- engine's thread

    def reach(self, mark: int, fence: Any) -> None:
        """What lies before a mark is in the device's queue, in front of `fence` (None: has been computed)."""
        with self._changed:
            self._fences.setdefault(mark, fence)
            self._changed.notify_all()

    def end(self, fence: Any) -> None:
        """All of the step is."""
        with self._changed:
            self._ended, self._last = True, fence
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """Every wait fails from now on, also where the step ends."""
        with self._changed:
            self._error = self._error or StepFailed(why)
            self._changed.notify_all()

    # ---- an I/O thread

    def wait(self, mark: int) -> bool:
        """Return when the caches hold what lies before a mark, and whether the step's end had not come yet.

        Raises StepFailed, TimeoutError.
        """
        self._wait(lambda: mark in self._fences or self._ended)
        # What no hook has told of comes with the end.
        _wait_for(self._fences.get(mark, self._last))
        return mark in self._fences and not self._over()

    def _over(self) -> bool:
        """Whether the device, too, has come to the step's end."""
        return self._ended and (self._last is None or bool(self._last.query()))

    def wait_end(self) -> None:
        """Return when the caches hold all of the step's state. Raises StepFailed, TimeoutError."""
        self._wait(lambda: self._ended)
        _wait_for(self._last)

    def _wait(self, come: Callable[[], bool]) -> None:
        with self._changed:
            self._deadline = self._deadline or time.monotonic() + self._patience
            left = self._deadline - time.monotonic()
            if not self._changed.wait_for(lambda: self._error is not None or come(), max(left, 0.0)):
                raise TimeoutError(f"the step did not end within {self._patience:g} s")
            if self._error is not None:
                raise self._error


class Layers:
    """Counts the model's layers as they are launched, and tells the publishes of the step that is computing.

    All but the hooks' installation runs on the engine's thread.
    """

    def __init__(self, geometry: Geometry, groups: Sequence[range], fence: Callable[[], Any]) -> None:
        """`fence`: records one (None on a CPU)."""
        self.groups = tuple(groups)
        self.order = tuple(sorted((*geometry.kda_layers, *geometry.mla_layers)))
        """The layers with state, by their index in the model."""
        self._marks = {
            self.order.index(geometry.kda_layers[group.stop - 1]): number
            for number, group in enumerate(self.groups)
        }
        self._marks[self.order.index(geometry.mla_layers[-1])] = len(self.groups)
        self._fence = fence
        self._jobs: list[Passing] = []
        self._seen: set[int] = set()
        """Places in `order` of the layers that this step has launched."""
        self._whole = True
        """They came in the model's order so far."""
        self.spoiled = False
        """A layer came twice in one step: nothing is streamed in this process any more."""

    def install(self, modules: Mapping[int, Any]) -> None:
        """Put hooks behind the layers, torch modules by index in the model. Raises KeyError for one that is missing."""
        found = [modules[layer] for layer in self.order]
        for place, module in enumerate(found):
            module.register_forward_hook(partial(self._hook, place))

    def _hook(self, place: int, module: Any, arguments: Any, output: Any) -> None:
        if self._jobs:
            self.passed(place)

    def begin(self, jobs: Sequence[Passing]) -> None:
        """A step begins that computes the state of these publishes; those that may be streamed."""
        for job in self._jobs:
            job.fail("the next step began before this one had ended")
        self.end()
        if jobs and not self.spoiled:
            self._jobs = list(jobs)

    def passed(self, place: int) -> None:
        """A layer, by its place in `order`, has been launched."""
        if place in self._seen:
            self._again(place)
            return
        # One that is left out may come later, or never: what follows it is not known to be complete.
        self._whole = self._whole and place == len(self._seen)
        self._seen.add(place)
        if self._whole and (mark := self._marks.get(place)) is not None:
            self._reach(mark)

    def end(self) -> None:
        """The step has been launched, or will not be."""
        self._jobs, self._whole = [], True
        self._seen.clear()

    def _reach(self, mark: int) -> None:
        fence = self._fence()
        for job in self._jobs:
            job.reach(mark, fence)

    def _again(self, place: int) -> None:
        why = (
            f"layer {self.order[place]} ran twice in one step, so its state may have left before it was final"
        )
        if not self.spoiled:
            log.error("%s; layers leave when their step has ended from now on", why)
        self.spoiled = True
        for job in self._jobs:
            job.fail(why)


def _wait_for(fence: Any) -> None:
    """Return when the device has come to a fence of `CacheView.fence`."""
    if fence is not None:
        fence.synchronize()
