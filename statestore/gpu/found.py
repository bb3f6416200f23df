# SPDX-License-Identifier: Apache-2.0
"""What the kernels found in state; plain numbers, so that who reads them needs no Triton."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Found:
    """What a look at staging found."""

    sums: list[int]
    """A unit each, as `statestore.checksum.finish` takes them; the sums of a unit's pieces add up."""
    null: int | None = None
    """Index of the first part (unit by unit, layers inside) that is all zeros."""
    not_finite: int | None = None
    """The same of a number that is not finite: recurrent state, or rows."""
    conv_not_finite: int | None = None
