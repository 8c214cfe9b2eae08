"""One axis of a plot: map values to positions between 0 and 1, and choose round tick values."""

from __future__ import annotations

import math
from collections.abc import Sequence

LOGARITHMIC_FROM = 8.0  # ratio of the largest to the smallest value above which the axis is logarithmic


class Axis:
    """One axis of a plot: linear, or logarithmic if all values are positive and span a wide range."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values), max(values)
        self.is_logarithmic = self.low > 0 and self.high / self.low >= LOGARITHMIC_FROM

    def place(self, value: float) -> float:
        """Return the position of a value: 0 for the smallest, 1 for the largest, 0.5 if all are equal."""
        if self.high <= self.low:
            return 0.5
        if self.is_logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def list_ticks(self) -> list[float]:
        """List round values on the axis: 1, 2 and 5 times powers of ten if it is logarithmic, else equal steps."""
        if self.high <= self.low:
            return [self.low]
        if self.is_logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        else:
            rough = (self.high - self.low) / 4
            unit = 10.0 ** math.floor(math.log10(rough))
            step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough)
            first = math.ceil(self.low / step)
            ticks = [step * k for k in range(first, first + 8)]
        return [tick for tick in ticks if self.low <= tick <= self.high]
