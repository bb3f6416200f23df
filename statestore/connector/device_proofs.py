# SPDX-License-Identifier: Apache-2.0
"""What a device found in state, as digests and refusals: `statestore.connector.proofs` for state that it looked at.

What is looked for, and why, is `statestore.connector.checks`'; the same words say what was found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statestore.checksum import finish
from statestore.connector.checks import VerificationFailed
from statestore.geometry import Geometry
from statestore.gpu.found import Found
from statestore.reshard import Ints, Unit, head_bytes


def heads_digests(found: Found, geometry: Geometry) -> list[str]:
    """A digest a head."""
    return [finish(total, head_bytes(geometry)) for total in found.sums]


def heads_problem(found: Found, geometry: Geometry, first: int) -> VerificationFailed | None:
    """What is wrong with heads of which the first is head `first`; None when nothing is."""

    def where(index: int) -> str:
        head, layer = divmod(index, len(geometry.kda_layers))
        return f"head {first + head}, layer {geometry.kda_layers[layer]}"

    if found.null is not None:
        return VerificationFailed("null_state", f"KDA state of {where(found.null)} is all zeros")
    for name, index in (("recurrent", found.not_finite), ("convolution", found.conv_not_finite)):
        if index is not None:
            return VerificationFailed(
                "not_finite", f"KDA {name} state of {where(index)} has a number that is not finite"
            )
    return None


def rows_problem(found: Found, geometry: Geometry, first: int, finite: bool) -> VerificationFailed | None:
    """The same of rows, of which the first is row `first` of its object; `finite`: numbers matter."""

    def where(index: int) -> str:
        row, layer = divmod(index, len(geometry.mla_layers))
        return f"row {first + row}, layer {geometry.mla_layers[layer]}"

    if found.null is not None:
        return VerificationFailed("null_state", f"MLA {where(found.null)} is all zeros")
    if finite and found.not_finite is not None:
        return VerificationFailed(
            "not_finite", f"MLA {where(found.not_finite)} has a number that is not finite"
        )
    return None


class UnitSums:
    """The sums of an object's units, whose rows come piece by piece."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._starts = np.array([unit.first for unit in units])
        self._sums = [0] * len(units)
        self._low = 0

    def places(self, low: int, high: int) -> Ints:
        """[2, rows] of the object's rows [low, high): each one's unit, from 0 for the first of them, and row there."""
        rows = np.arange(low, high)
        units = np.searchsorted(self._starts, rows, side="right") - 1
        self._low = int(units[0])
        return np.stack([units - self._low, rows - self._starts[units]])

    def add(self, found: Found) -> None:
        """What was found of the rows that `places` was asked for last."""
        for number, total in enumerate(found.sums):
            self._sums[self._low + number] += total

    def digests(self) -> tuple[str, ...]:
        """A digest a unit, once all rows have come."""
        return tuple(finish(total, unit.nbytes) for total, unit in zip(self._sums, self._units, strict=True))
