# SPDX-License-Identifier: Apache-2.0
"""Costs learned online: seconds as a fixed part and a part that grows, `seconds = fixed + slope * amount`.

Weighted least squares in which an observation's weight halves every HALF_LIFE observations, so that a machine that
becomes slower is noticed; both parts are kept from being negative. A prior of a few observations keeps the first
decisions sane and is outweighed soon. Of the prior only the shape lasts: the first observation says how fast the
machine is, and the prior is scaled to it. A prior of another speed would bend the line for as long as all amounts are
alike, up to a slope of zero, by which no queue has a price.
"""

from __future__ import annotations

HALF_LIFE = 32
_FORGET = 0.5 ** (1 / HALF_LIFE)


class Line:
    """One learned cost."""

    def __init__(self, fixed: float, slope: float, amount: float, weight: float = 2.0) -> None:
        """A prior: `fixed` and `slope`, believed as if `weight` observations at 0 and at 2 * `amount` had shown it."""
        if min(fixed, slope, amount, weight) < 0:
            raise ValueError("fixed, slope, amount and weight must not be negative")
        self.fixed, self.slope = fixed, slope
        self.learned = False
        """Whether anything has been observed."""
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        for x in (0.0, 2 * amount):
            self._add(x, fixed + slope * x, weight)

    def __call__(self, amount: float) -> float:
        """Seconds expected."""
        return self.fixed + self.slope * amount

    def learn(self, amount: float, seconds: float) -> None:
        """An observation."""
        if not self.learned:
            self.learned = True
            self._scale(seconds / self(amount) if self(amount) > 0 else 0.0)
        for name in ("_n", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * _FORGET)
        self._add(amount, seconds, 1.0)
        spread = self._n * self._xx - self._x * self._x
        slope = (
            (self._n * self._xy - self._x * self._y) / spread
            if spread > 1e-12 * self._n * self._xx
            else self.slope
        )
        slope = max(0.0, slope)
        fixed = (self._y - slope * self._x) / self._n
        if fixed < 0:
            # All of it grows: the best line through the origin.
            fixed, slope = 0.0, self._xy / self._xx if self._xx else 0.0
        self.fixed, self.slope = fixed, slope

    def _scale(self, factor: float) -> None:
        """Make the prior a machine's that is so much slower; it has no scale where the factor is 0."""
        if factor > 0:
            self._y *= factor
            self._xy *= factor

    def _add(self, x: float, y: float, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._y += weight * y
        self._xx += weight * x * x
        self._xy += weight * x * y
