# SPDX-License-Identifier: Apache-2.0
"""What a device found in state, as digests and refusals: `statestore.connector.proofs` for state that it looked at.

What is looked for, and why, is `statestore.connector.checks`'; the same words say what was found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from statestore.checksum import finish, finish_all
from statestore.connector.checks import VerificationFailed
from statestore.digest import ML64, unit_digest
from statestore.geometry import Geometry
from statestore.gpu.found import Found
from statestore.reshard import ROW_DIGEST, Ints, Unit, head_bytes


def heads_digests(found: Found, geometry: Geometry) -> list[str]:
    """A digest a head."""
    return [finish(total, head_bytes(geometry)) for total in found.sums]


class HeadSums:
    """The digests of heads whose layers come group by group."""

    def __init__(self, heads: int, geometry: Geometry) -> None:
        self._geometry, self._totals = geometry, [0] * heads

    def add(self, first: int, found: Found) -> None:
        """What was found of some layers of head `first` and those that follow."""
        for head, total in enumerate(found.sums, first):
            self._totals[head] += total

    def digests(self) -> tuple[str, ...]:
        """A digest a head, once all layers have come."""
        return tuple(finish(total, head_bytes(self._geometry)) for total in self._totals)


def heads_problem(
    found: Found, geometry: Geometry, first: int, layers: range | None = None
) -> VerificationFailed | None:
    """What is wrong with heads of which the first is head `first`; None when nothing is. `layers`: found of these."""
    of = geometry.kda_layers if layers is None else geometry.kda_layers[layers.start : layers.stop]

    def where(index: int) -> str:
        head, layer = divmod(index, len(of))
        return f"head {first + head}, layer {of[layer]}"

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


class RowSums:
    """The digests of an object's rows, which come piece by piece: its table."""

    def __init__(self, rows: int, row_bytes: int) -> None:
        self._row = row_bytes
        self.table = np.zeros((rows, ROW_DIGEST), np.uint8)
        """[rows, bytes]: of those that have been added."""

    @staticmethod
    def places(rows: int) -> Ints:
        """[2, rows]: every row is a unit of its own, as the kernels call it."""
        return np.stack([np.arange(rows), np.zeros(rows, np.int64)])

    def add(self, low: int, found: Found) -> None:
        """What was found of rows `low` and those that follow, with `places` of them."""
        digests = finish_all(found.sums, self._row).astype("<u8", copy=False)
        self.table[low : low + len(digests)] = digests.view(np.uint8).reshape(-1, ROW_DIGEST)

    def digests(self, units: Sequence[Unit]) -> tuple[str, ...]:
        """A digest a unit, once all rows have come."""
        return tuple(unit_digest(self.table[u.first : u.first + u.count], ML64) for u in units)
